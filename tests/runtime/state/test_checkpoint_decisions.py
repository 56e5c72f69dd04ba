"""When a series of checkpoints saves, and what the ranks agree on: with stand-ins for the pipeline,
the ranks and the files.
"""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.runtime.scripted import failing

from penstock.errors import CheckpointDamaged, FileError, SettingError
from penstock.runtime.state import checkpoints as module
from penstock.runtime.state.checkpoints import Checkpoints, SeriesContext


class Job:
    """A save that is ready, and complete, when the test says so."""

    def __init__(self, step, log):
        self.step, self.log, self.ready, self.steps_left = step, log, True, 0

    def advance(self):
        """Take the next step of completing; whether it was the last."""
        self.log.append(("advance", self.step))
        self.steps_left -= 1
        return self.steps_left < 0

    def wait(self):
        """Record that the save is complete."""
        self.log.append(("complete", self.step))


class Pipe:
    """A pipeline of one process.

    Args:
        others: what the other ranks say at an agreement: end, save and ready of each.
        ranks: those of this process.
    """

    def __init__(self, others=(), ranks=(0,)):
        self.step, self._accumulated, self.log, self.jobs = 0, 0, [], []
        self.others, self.targets, self.calls = list(others), [], []
        self.from_rank_0 = None
        self.parallelism = None
        self._assembly = SimpleNamespace(parallelism=None)
        self._world = SimpleNamespace(
            local_ranks=ranks,
            size=len(ranks) + len(self.others),
            calls=SimpleNamespace(enter=self.calls.append),
            gather=self.gather,
            broadcast=self.broadcast,
        )
        self.damaged, self.attempts = set(), []

    def gather(self, rows, forms):
        """Return the rows of all ranks on rank 0."""
        assert {form.shape for row in forms.values() for form in row} == {(5,)}
        assert len(forms) == self._world.size
        if 0 not in self._world.local_ranks:
            return {}
        # Whether a checkpoint is due, and when the ranks agree again, is for rank 0 to decide.
        more = {
            rank: [torch.tensor([*row, 1, 7])] for rank, row in enumerate(self.others, len(rows))
        }
        return {**rows, **more}

    def broadcast(self, value, source, form):
        """Return what rank 0 has."""
        assert (source, form.shape) == (0, (5,))
        return value if self.from_rank_0 is None else torch.tensor(self.from_rank_0)

    def _begin_save(self, target):
        self.targets.append(target)
        self.log.append(("begin", self.step))
        self.jobs.append(Job(self.step, self.log))
        return self.jobs[-1]

    def load(self, folder):
        """Load a checkpoint, whose step is the number in its name."""
        self.attempts.append(folder.name)
        if folder.name in self.damaged:
            raise CheckpointDamaged(f"{folder.name} is damaged")
        self.step = int(folder.name[-1])


class FakeClock:
    """A clock that the test sets."""

    def __init__(self):
        self.now_s = 1000.0

    def monotonic(self):
        """Return the time."""
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    """The clock of the series."""
    fake = FakeClock()
    monkeypatch.setattr(module, "time", fake)
    return fake


def run(checkpoints, pipe, steps):
    """Train for some steps; return those at which the run had to end."""
    ends = []
    for _ in range(steps):
        pipe.step += 1
        if checkpoints.step(pipe):
            ends.append(pipe.step)
    return ends


def save_steps(pipe):
    """Return the steps at which a save has begun."""
    return [step for name, step in pipe.log if name == "begin"]


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "3", None])
def test_at_least_one_checkpoint_is_kept(tmp_path, keep):
    """Without any, the newest one would be removed as soon as it is complete."""
    with pytest.raises(SettingError, match=r"keep is a number of checkpoints, 1 or more, not "):
        Checkpoints(tmp_path, keep=keep)
    Checkpoints(tmp_path, keep=1)


@pytest.mark.parametrize(
    ("every", "steps"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6]), (9, []), (None, [])]
)
def test_steps_of_the_interval_are_saved_and_the_last_one_at_the_end(tmp_path, every, steps):
    """Each is complete before the next begins; the program hears of each once."""
    pipe, saved = Pipe(), []
    context = SeriesContext(
        on_saved=lambda step, folder: saved.append((step, folder, checkpoints.saved_step)),
        logs=[tmp_path / "log"],
    )
    checkpoints = Checkpoints(tmp_path, every=every, context=context)
    assert run(checkpoints, pipe, 7) == []
    assert save_steps(pipe) == steps
    checkpoints.finish(pipe)
    checkpoints.finish(pipe)
    expected = [*steps, *[7] * (7 not in steps)]
    assert save_steps(pipe) == expected
    assert saved == [(step, checkpoints.path(step), step) for step in expected]
    assert checkpoints.saved_step == 7
    order = [step for name, step in pipe.log if name != "advance"]
    assert order == sorted(order)
    for target, step in zip(pipe.targets, expected, strict=True):
        assert target.folder == module.partial_folder(tmp_path, step)
        assert target.publication.folder == tmp_path
        assert (target.nonfinite, target.score) == (False, None)


def test_a_run_that_begins_at_a_later_step_saves_at_multiples_alone(tmp_path):
    """Its weights may be loaded by hand; what came before is not due."""
    pipe = Pipe()
    pipe.step = 7
    checkpoints = Checkpoints(tmp_path, every=5)
    run(checkpoints, pipe, 4)
    assert save_steps(pipe) == [10]


def test_the_number_of_checkpoints_that_stay_and_the_logs_go_with_every_save(tmp_path, monkeypatch):
    """Three stay by default."""
    calls = []
    monkeypatch.setattr(module, "publication", lambda *args: calls.append(args))
    for options, keep in (({}, 3), ({"keep": 1}, 1)):
        pipe = Pipe()
        context = SeriesContext(logs=[tmp_path / "log"])
        checkpoints = Checkpoints(tmp_path, context=context, **options)
        run(checkpoints, pipe, 2)
        checkpoints.finish(pipe)
        assert calls.pop() == (tmp_path, 2, keep, [tmp_path / "log"])


def test_a_request_to_end_is_not_taken_back(tmp_path):
    """The rank that was asked may have ended already."""
    pipe = Pipe()
    checkpoints = Checkpoints(tmp_path)
    checkpoints._signals.end = True
    run(checkpoints, pipe, 1)
    checkpoints._signals.end, checkpoints._countdown = False, 1
    assert run(checkpoints, pipe, 1) == [2]
    assert checkpoints.ended


def test_what_is_due_waits_for_the_step_that_uses_the_gradients(tmp_path):
    """A checkpoint does not hold any; this is also true of the end of a run."""
    pipe = Pipe()
    checkpoints = Checkpoints(tmp_path, every=2)
    pipe._accumulated = 1
    assert run(checkpoints, pipe, 2) == []
    assert save_steps(pipe) == []
    pipe._accumulated = 0
    assert run(checkpoints, pipe, 2) == []
    assert save_steps(pipe) == [3, 4]
    pipe._accumulated, checkpoints._signals.end, checkpoints._countdown = 2, True, 1
    assert run(checkpoints, pipe, 1) == []
    assert checkpoints.ended
    pipe._accumulated = 0
    assert run(checkpoints, pipe, 1) == [6]
    assert save_steps(pipe) == [3, 4, 6]
    assert checkpoints.saved_step == 6


def test_a_step_with_a_score_is_saved_again(tmp_path):
    """The score is known only after the step was saved; without one, nothing has changed."""
    pipe = Pipe()
    checkpoints = Checkpoints(tmp_path, every=1)
    run(checkpoints, pipe, 1)
    checkpoints.save(pipe)
    checkpoints.save(pipe, score=0.0)
    checkpoints.save(pipe)
    assert save_steps(pipe) == [1, 1]
    assert [target.score for target in pipe.targets] == [None, 0.0]


def test_a_save_that_could_not_begin_is_begun_again(tmp_path):
    """Such as one of weights with NaN; it does not count as the checkpoint of its step."""
    pipe = Pipe()
    checkpoints = Checkpoints(tmp_path)
    begin, pipe._begin_save = pipe._begin_save, failing(SettingError("NaN"))
    with pytest.raises(SettingError, match="NaN"):
        checkpoints.save(pipe)
    pipe._begin_save = begin
    checkpoints.finish(pipe)
    assert (save_steps(pipe), checkpoints.saved_step) == ([0], 0)


def test_a_save_that_fails_while_it_is_written_does_not_count_and_is_not_waited_for_again(tmp_path):
    """The disk may have been full; the next checkpoint is another one."""
    pipe = Pipe()
    checkpoints = Checkpoints(tmp_path, every=1)
    run(checkpoints, pipe, 1)
    pipe.jobs[0].wait = failing(FileError("full"))
    with pytest.raises(FileError, match="full"):
        checkpoints.save(pipe, score=1.0)
    assert checkpoints.saved_step is None
    run(checkpoints, pipe, 1)
    checkpoints.finish(pipe)
    assert (save_steps(pipe), checkpoints.saved_step) == ([1, 2], 2)


@pytest.mark.parametrize("stop_when", [False, True])
def test_a_run_ends_at_a_signal_or_on_request_with_its_step_saved(tmp_path, stop_when):
    """The request to end stays, whatever the ranks say later."""
    pipe = Pipe()
    questions = []
    context = SeriesContext(stop_when=lambda: questions.append(pipe.step) or (stop_when and True))
    checkpoints = Checkpoints(tmp_path, context=context)
    checkpoints._signals.end = not stop_when
    assert run(checkpoints, pipe, 1) == [1]
    assert pipe.log == [("begin", 1), ("complete", 1)]
    assert (checkpoints.ended, checkpoints.saved_step) == (True, 1)
    assert questions == ([1] if stop_when else [])
    checkpoints._signals.end, checkpoints._countdown = False, 99
    assert run(checkpoints, pipe, 1) == [2]


def test_a_signal_to_save_is_obeyed_once(tmp_path):
    """And training goes on; a second signal is another request."""
    pipe = Pipe()
    checkpoints = Checkpoints(tmp_path)
    for _ in range(2):
        checkpoints._signals.save, checkpoints._countdown = True, 1
        assert run(checkpoints, pipe, 1) == []
        checkpoints._countdown = 1
        run(checkpoints, pipe, 1)
    assert save_steps(pipe) == [1, 3]
    assert not checkpoints._signals.save


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], "none"),
        ([(0, 0, 1)], "none"),
        ([(0, 0, 1), (1, 0, 1)], "end"),
        ([(0, 1, 1), (0, 0, 1)], "save"),
    ],
)
def test_a_signal_to_any_rank_counts_for_all(tmp_path, others, expected, ranks):
    """A scheduler may send it to one host alone; ranks other than 0 do as rank 0 says."""
    pipe = Pipe(others, ranks)
    if 0 not in ranks:
        ended, save = expected == "end", expected == "save"
        pipe.from_rank_0 = [int(ended), int(save), 1, 0, 4]
    checkpoints = Checkpoints(tmp_path)
    assert run(checkpoints, pipe, 1) == ([1] if expected == "end" else [])
    assert save_steps(pipe) == ([] if expected == "none" else [1])
    assert checkpoints.ended == (expected == "end")
    assert pipe.calls == ["Checkpoints.step"]
    if 0 not in ranks:
        assert checkpoints._countdown == 4


def test_a_save_is_completed_while_training_goes_on_when_it_is_ready_on_all_ranks(tmp_path):
    """In steps that all ranks take together: completing takes messages."""
    pipe = Pipe([(0, 0, 0)])
    saved = []
    context = SeriesContext(on_saved=lambda step, folder: saved.append(step))
    checkpoints = Checkpoints(tmp_path, every=4, context=context)
    run(checkpoints, pipe, 4)
    (job,) = pipe.jobs
    job.steps_left = 1

    def agree():
        checkpoints._countdown = 1
        run(checkpoints, pipe, 1)
        return [name for name, _ in pipe.log].count("advance")

    assert agree() == 0, "another rank still writes"
    pipe.others, job.ready = [(0, 0, 1)], False
    assert agree() == 0, "this rank still writes"
    job.ready = True
    assert (agree(), saved) == (1, [])
    pipe.step, checkpoints._seen_step = 4, 4  # no further save becomes due meanwhile
    assert (agree(), saved, checkpoints.saved_step) == (2, [4], 4)
    assert agree() == 2


@pytest.mark.parametrize(
    ("step_s", "countdown"), [(0.1, 5), (0.024, 21), (1e-9, 1000), (0.5, 1), (60.0, 1)]
)
def test_ranks_agree_about_twice_a_second(tmp_path, clock, step_s, countdown):
    """An agreement costs a message; steps are as long as they have been since the last one."""
    pipe = Pipe()
    checkpoints = Checkpoints(tmp_path)
    intervals = []
    for _ in range(3):
        steps = 0
        while len(pipe.calls) == len(intervals):
            clock.now_s += step_s
            steps += 1
            run(checkpoints, pipe, 1)
        intervals.append(steps)
    assert intervals == [1, countdown, countdown]


def test_a_time_between_checkpoints_counts_from_the_last_one(tmp_path, clock):
    """Of rank 0, whichever step it is then; a save for another reason begins the time anew."""
    pipe = Pipe()
    checkpoints = Checkpoints(tmp_path, every="1min")
    for second in range(1, 200):
        clock.now_s += 1.0
        run(checkpoints, pipe, 1)
        if second == 90:
            checkpoints.save(pipe)
    assert save_steps(pipe) == [60, 90, 150]


def test_layers_that_processes_share_have_no_series(tmp_path):
    """Copies in "dp" alone are fine: each pipeline of them is a whole one."""
    checkpoints, pipe = Checkpoints(tmp_path), Pipe()
    for width in (2, 1):
        mesh = SimpleNamespace(width=width)
        pipe._assembly.parallelism = SimpleNamespace(mesh=mesh)
        if width == 2:
            for call in (checkpoints.resume, checkpoints.save, checkpoints.finish):
                with pytest.raises(SettingError, match=r"call pipe\.save and pipe\.load"):
                    call(pipe)
            assert pipe.log == pipe.attempts == []
        else:
            checkpoints.save(pipe)
            assert save_steps(pipe) == [0]


def test_the_newest_step_is_told_to_what_watches_for_lost_ranks(tmp_path, monkeypatch):
    """The message on a lost rank says from where the run can continue."""
    watch = SimpleNamespace(checkpoint_step=None)
    monkeypatch.setattr(module, "heartbeats", lambda: watch)
    pipe = Pipe()
    checkpoints = Checkpoints(tmp_path)
    run(checkpoints, pipe, 3)
    checkpoints.save(pipe)
    assert watch.checkpoint_step is None, "it is still being written"
    checkpoints.save(pipe, wait=True)
    assert watch.checkpoint_step == 3
    assert checkpoints.path(3) == Path(tmp_path) / module.step_folder(tmp_path, 3).name


def test_signals_are_noted_within_the_block_alone(tmp_path):
    """Outside of it they end the program, as those of any other."""
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    checkpoints = Checkpoints(tmp_path)
    assert [signal.getsignal(number) for number in numbers] == before
    with checkpoints as entered:
        assert entered is checkpoints
        handlers = [signal.getsignal(number) for number in numbers]
        assert handlers != before
        for number, handler in zip(numbers, handlers, strict=True):
            handler(number, None)
    assert [signal.getsignal(number) for number in numbers] == before
    pipe = Pipe()
    assert run(checkpoints, pipe, 1) == [1]
    assert pipe.log == [("begin", 1), ("complete", 1)]
