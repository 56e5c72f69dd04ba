"""launch: results by rank; and whatever ends a rank ends all, with one message that says which and
why.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import cloudpickle
import psutil
import pytest
from tests.runtime.jobs import trapped, trapped_copy
from tests.time_limits import HANG_S

from penstock.errors import RankDied, SettingError
from penstock.ranks.processes.launch import RankFailed, _Child, launch


@pytest.fixture(autouse=True)
def nobody_stays() -> None:
    """No rank outlives its launch."""
    yield
    assert [child for child in psutil.Process().children(recursive=True) if is_rank(child)] == []


def is_rank(process):
    """Whether a process was started by launch."""
    try:
        return (
            process.is_running()
            and process.status() != psutil.STATUS_ZOMBIE
            and process.name().startswith("penstock-rank")
        )
    except psutil.Error:
        return False


@pytest.mark.parametrize(("kind", "op", "failed"), [("F", "1F1", "1F1"), ("B", "1B1", "1B1")])
def test_a_layer_that_raises_ends_all_ranks_and_is_named(kind, op, failed):
    """The other rank waits for what will never come: it hears of the failure, and its own message
    is not the one that is told.
    """
    with pytest.raises(
        RankFailed,
        match=rf"^rank 1 \(stage 1\) failed in {failed} of step 0: ValueError: a planted failure",
    ) as error:
        launch(trapped, 2, "raise", kind)
    assert error.value.rank == 1
    assert "in spring" in error.value.remote_traceback
    assert "a planted failure" in "".join(error.value.__notes__)


def test_a_rank_that_is_killed_in_mid_batch_is_named_with_its_signal():
    """The kernel kills who takes too much memory, and the process cannot say a word."""
    with pytest.raises(
        RankDied, match=r"^rank 1 \(pid \d+\) was killed by SIGKILL; rank 0 stopped$"
    ) as error:
        launch(trapped, 2, "kill", "B")
    assert error.value.rank == 1


@pytest.fixture
def short_grace(monkeypatch):
    """Do not wait for a rank that hangs: it says nothing more."""
    monkeypatch.setattr("penstock.ranks.processes.launch._GRACE_S", 0.1)


@pytest.mark.usefixtures("short_grace")
def test_a_stuck_op_is_told_by_who_waits_for_it_and_what_the_other_is_at():
    """Nothing fails when a layer hangs: only the deadline ends it, and only the board knows where
    everybody is.
    """
    message = (
        r"^rank 0 has waited \d+ s for 1B1, past its deadline\n  rank 1 is at 1F1 since \d+ s\n"
    )
    with pytest.raises(RankFailed, match=message):
        launch(trapped, 2, "hang", "F", 5, 3.0)


def test_a_copy_that_is_killed_lets_go_of_the_one_that_waits_to_meet_it():
    """Gradient synchronisation is where copies wait longest for each other."""
    with pytest.raises(
        RankDied, match=r"^rank 1 \(pid \d+\) was killed by SIGKILL; rank 0 stopped$"
    ):
        launch(trapped_copy, 2, "kill")


@pytest.mark.usefixtures("short_grace")
def test_a_stuck_copy_is_told_by_the_one_that_waits_to_meet_it():
    """Who waits for whom, and where."""
    message = (
        r"^rank 0 has waited \d+ s for rank 1, past its deadline\n  rank 1 is at 0B2 since \d+ s\n"
    )
    with pytest.raises(RankFailed, match=message):
        launch(trapped_copy, 2, "hang", 3.0)


def test_leaving_the_program_from_a_layer_is_a_failure_that_is_named():
    """sys.exit(3) raises what no `except Exception` catches."""
    with pytest.raises(RankFailed, match=r"^rank 1: SystemExit: 3\n"):
        launch(trapped, 2, "exit")


def test_a_process_that_ends_well_but_without_a_result_is_no_success():
    """os._exit(0), in native code or by a library: the status is 0, and the result is missing."""
    with pytest.raises(
        RankDied,
        match=r"^rank 1 \(pid \d+\) ended with exit status 0 and no message; rank 0 stopped$",
    ):
        launch(trapped, 2, "vanish")


def test_an_exception_in_the_users_code_between_batches_ends_all_and_is_told():
    """A logger that fails on rank 0, in a training loop of the user's own."""

    def job():
        import os

        from tests.runtime.jobs import everything

        rank = int(os.environ["RANK"])
        result = everything("mlp", {"balance": [3, 4], "micro_batches": 2}, None, "processes")
        if rank == 0:
            {}["a metric"]
        return (
            everything("mlp", {"balance": [3, 4], "micro_batches": 2}, None, "processes")["step"]
            + result["step"]
        )

    with pytest.raises(RankFailed, match=r"^rank 0: KeyError: 'a metric'\n") as error:
        launch(job, 2)
    assert "in job" in error.value.remote_traceback


def test_results_come_back_by_rank_or_it_is_said_why_not():
    """A lambda over a local variable, which no ordinary pickle takes; then something that nothing
    can send.
    """
    offset = 10

    def job(factor):
        import os
        import sys
        import threading

        rank = int(os.environ["RANK"])
        if factor == 0:
            return threading.Lock()
        if rank == 1:
            sys.exit(0)
        return (
            rank * factor + offset,
            os.environ["WORLD_SIZE"],
            os.environ["LOCAL_RANK"],
            os.environ["OMP_NUM_THREADS"],
        )

    assert launch(job, 2, 5, threads=3) == [(10, "2", "0", "3"), None]
    with pytest.raises(
        RankFailed,
        match=r"^rank 0: the lock that it returned cannot be sent back: cannot pickle '_thread.lock'",
    ):
        launch(job, 1, 0)


def test_what_cannot_be_launched_is_refused_before_anything_starts():
    """No process is needed to know it."""
    with pytest.raises(SettingError, match="launch starts 1 rank or more, not 0"):
        launch(print, 0)
    with pytest.raises(
        SettingError,
        match=r"print or its arguments cannot be sent to the ranks: cannot pickle '_thread.lock'",
    ):
        launch(print, 2, threading.Lock())


SCRIPT = """
import os, sys
import penstock as ps

# No `if __name__ == "__main__"`: if ranks ran this file again, they would launch ranks of their own.
print("main", flush=True)

def job(word):
    return word * (int(os.environ["RANK"]) + 1)

def wait():
    import threading
    sys.stdout.write(f"{os.getpid()}\\\\n")
    sys.stdout.flush()
    threading.Event().wait()

print(ps.launch(lambda word: job(word), 2, "ab"), flush=True)
ps.launch(wait, 2)
""".replace("\\\\", "\\")


def start_script(tmp_path):
    """The script in a process of its own, as a user has it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    )


def read_lines(process, count):
    """The next lines of a process's output, which must come soon."""
    lines, part = [], b""
    descriptor = process.stdout.fileno()
    while len(lines) < count:
        assert select.select([descriptor], [], [], HANG_S)[0], f"no more than {lines}"
        read = os.read(descriptor, 4096)
        assert read, process.stderr.read().decode()
        *whole, part = (part + read).split(b"\n")
        lines += [line.decode() for line in whole]
    return lines


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_script_without_a_guard_runs_once_and_when_it_ends_no_rank_stays(sent, tmp_path):
    """multiprocessing would run the script again in every rank; notebooks and quick scripts have no
    guard. It ends by Ctrl-C, or is killed without a chance to clean up: ranks without a master would
    hold the device for ever.
    """
    process = start_script(tmp_path)
    lines = read_lines(process, 4)
    assert lines[:2] == ["main", "['ab', 'abab']"]
    ranks = [psutil.Process(int(line)) for line in lines[2:]]
    assert all(is_rank(rank) for rank in ranks)
    process.send_signal(sent)
    _, alive = psutil.wait_procs([*ranks, psutil.Process(process.pid)], timeout=HANG_S)
    left = [rank for rank in alive if rank.status() != psutil.STATUS_ZOMBIE]
    assert left == []
    out, err = process.communicate(timeout=HANG_S)
    assert out == b""
    if sent == signal.SIGINT:
        assert err.decode().rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_kills_ranks_at_once():
    """A rank that notes SIGTERM would save first; Ctrl-C is for users who do not want to wait."""
    processes = []

    def interrupt(started):
        processes.extend(started)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(signal.pause, 2, on_start=interrupt)
    assert [process.wait() for process in processes] == [-signal.SIGKILL, -signal.SIGKILL]


def without_descriptors():
    """Use up all file descriptors, and fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    files = []
    with contextlib.suppress(OSError):
        while True:
            files.append(os.dup(0))
    raise ValueError("a planted failure")


def test_the_error_of_a_rank_without_descriptors_is_told():
    """Its result file is opened before the job begins."""
    with pytest.raises(RankFailed, match=r"^rank 0: ValueError: a planted failure"):
        launch(without_descriptors, 1)


def test_a_result_is_read_once(tmp_path):
    """The launcher looks at it twice a second while other ranks run, and it may be large."""
    child = _Child(0, SimpleNamespace(poll=lambda: 0), tmp_path / "result")
    assert child.failed
    child.result.write_bytes(cloudpickle.dumps({"value": 1}))
    assert not child.failed
    child.result.unlink()
    assert not child.failed
    assert child.record() == {"value": 1}


def killed_at_its_end():
    """Return a value, and be killed when it has been written."""
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)
    return os.environ["RANK"]


def test_a_rank_that_is_killed_after_its_value_was_written_has_not_failed():
    """A cluster's scheduler may signal ranks again that have saved and are about to end."""
    assert launch(killed_at_its_end, 2) == ["0", "1"]


LEFT_OPEN = []


class _Written:
    """Writes to a file when it is destroyed; in a cycle, so that only a collection destroys it."""

    def __init__(self, path):
        self.path, self.cycle = path, self

    def __del__(self):
        self.path.write_text("destroyed")


def leaves_work_for_its_end(folder):
    """Leave a file with unwritten text, a cycle, a function for the exit, and a thread."""
    LEFT_OPEN.append((folder / "file").open("w"))
    LEFT_OPEN[0].write("written")
    _Written(folder / "cycle")
    atexit.register((folder / "exit").write_text, "registered")

    def run():
        threading.main_thread().join()
        (folder / "thread").write_text("ended")

    threading.Thread(target=run).start()


def test_a_rank_that_succeeds_does_what_is_left_before_it_ends(tmp_path):
    """Its modules are not torn down, which would take longer than most ranks' work."""
    launch(leaves_work_for_its_end, 1, tmp_path)
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert texts == {
        "file": "written",
        "cycle": "destroyed",
        "exit": "registered",
        "thread": "ended",
    }
