"""The GPU benchmark on a machine without a GPU: every section runs, and a failed section does not
stop the others.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.time_limits import HANG_S

import penstock as ps

ROOT = Path(__file__).parents[2]
GPU = ROOT / "benchmarks" / "gpu"
RUN = GPU / "run.py"

KEYS = {
    "schema",
    "kit",
    "device",
    "smoke",
    "limit_s",
    "machine",
    "seconds",
    "ended",
    "sections",
    "expected",
}

GOOD = """
def measure(section):
    section.row("good", value=1.5)
"""

#: What can go wrong in a section, by the name of its file; "a_" and "z_" stand before and behind.
FAULTS = {
    "a_good": GOOD,
    "b_raises": """
def measure(section):
    section.row("before", value=2)
    raise ValueError("on purpose")
""",
    "c_dies": """
import os, signal
def measure(section):
    section.row("before", value=3)
    os.kill(os.getpid(), signal.SIGSEGV)
""",
    "d_hangs": """
import subprocess, sys, threading
def measure(section):
    code = "import threading; threading.Event().wait()"
    child = subprocess.Popen([sys.executable, "-S", "-c", code])
    section.row("before", pid=child.pid)
    threading.Event().wait()
""",
    "e_garbage": """
def measure(section):
    section.row("before", value=float("nan"))
    with section.rows_file.open("ab") as file:
        file.write(b'{"row": 1}\\n[]\\n\\xff\\xfe{\\n{"row": "no status"}\\n{"row": "half", "sta')
""",
    "f_no_syntax": "def measure(section:\n",
    "g_no_measure": "",
    "h_leaves": """
import sys
def measure(section):
    section.row("before", value=4)
    sys.exit(3)
""",
    "z_good": GOOD,
}


def run(out, *words, limit=240):
    """The finished command, and its results.json, or None."""
    command = [sys.executable, str(RUN), "--out", str(out), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    file = Path(out) / "results.json"
    return done, json.loads(file.read_text()) if file.exists() else None


def run_here(kit, monkeypatch, out, *words):
    """The exit status of the command in this process, which has imported torch, and the results."""
    monkeypatch.setattr(kit.run.signal, "signal", lambda *_: None)
    status = kit.run.main(["--out", str(out), *map(str, words)])
    file = Path(out) / "results.json"
    return status, json.loads(file.read_text()) if file.exists() else None


def is_alive(pid):
    """Whether a process runs; one that has ended and is not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def write(folder, **files):
    """Sections in a folder."""
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def kit():
    """The benchmark's modules, which stand beside its run.py and not in a package."""
    before = set(sys.modules)
    sys.path.insert(0, str(GPU))
    names = (
        "kit.results",
        "kit.expected",
        "kit.one_rank",
        "kit.timing",
        "kit.workloads",
        "run",
    )
    yield SimpleNamespace(**{name.split(".")[-1]: importlib.import_module(name) for name in names})
    while str(GPU) in sys.path:
        sys.path.remove(str(GPU))
    for name in set(sys.modules) - before:
        if str(GPU) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """One run of all sections with small sizes."""
    out = tmp_path_factory.mktemp("smoke")
    done, results = run(out, "--smoke", limit=400)
    return SimpleNamespace(done=done, results=results, out=out)


def test_every_section_passes_with_small_sizes_on_the_cpu(kit, smoke):
    """What runs here in CI need not be mended in the few minutes of a GPU."""
    sections = smoke.results["sections"]
    assert {part["name"]: part["error"] for part in sections if part["status"] != "passed"} == {}
    assert [part["name"] for part in sections] == [entry.name for entry in kit.run.SECTIONS]
    assert smoke.done.returncode == 0
    assert smoke.results["ended"] == "complete"


def test_results_have_the_schema(kit, smoke):
    """Readers, and later runs, depend on it."""
    results = smoke.results
    assert set(results) == KEYS
    assert results["schema"] == kit.results.SCHEMA
    assert results["machine"]["torch"]
    for part in results["sections"]:
        assert set(part) == {"name", "status", "seconds", "error", "rows", "conditions"}
        assert part["status"] in kit.results.STATUSES
        assert part["rows"]
        assert {row["status"] for row in part["rows"]} <= set(kit.results.ROW_STATUSES)
    for row in results["expected"]:
        assert set(row) == {"row", "low", "high", "found", "verdict"}


def test_no_row_with_small_sizes_is_wrong_or_failed(smoke):
    """A figure of a system that trains something else is no figure; peers that are not installed
    are skipped.
    """
    rows = {
        f"{part['name']}: {row['row']}": row.get("note")
        for part in smoke.results["sections"]
        for row in part["rows"]
        if row["status"] in {"wrong", "failed"}
    }
    assert rows == {}


def test_sections_that_need_cuda_report_it_and_no_row_claims_a_gpu(smoke):
    """A run on a CPU has no predictions for a GPU to compare with."""
    rows = {row["row"]: row for part in smoke.results["sections"] for row in part["rows"]}
    assert rows["pinned h2d"]["status"] == "not on this machine"
    assert rows["communicator"]["status"] == "not on this machine"
    assert smoke.results["device"] == "cpu"
    assert {row["verdict"] for row in smoke.results["expected"]} == {"missing"}


def test_a_rank_that_is_played_alone_holds_what_it_holds_among_the_others(smoke):
    """To the byte, by Penstock's own account: a plan for several GPUs can be tried on one."""
    (part,) = [part for part in smoke.results["sections"] if part["name"] == "fidelity"]
    rows = [row for row in part["rows"] if row["row"].startswith("rehearse 4 ranks")]
    assert len(rows) == 2
    for row in rows:
        assert row["alone_MiB"] == row["together_MiB"]
        assert all(mebibytes > 0 for mebibytes in row["alone_MiB"])


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 3), (4, 1), (4, 8)])
def test_all_ranks_in_turn_are_a_sound_schedule_of_the_same_ops(kit, name, stages, micro_batches):
    """Nothing is left out, and every op comes after those that it depends on."""
    schedule = ps.schedule(name, stages=stages, micro_batches=micro_batches)
    one = kit.one_rank.all_in_turn(schedule)
    assert one.ranks == 1
    assert sorted(one.programs[0]) == sorted(op for ops in schedule.programs for op in ops)
    ps.verify(one)


def test_the_summary_is_printed_last_and_saved(smoke):
    """A log whose beginning is lost still has the main results."""
    text = (smoke.out / "summary.txt").read_text()
    assert smoke.done.stdout.rstrip().endswith(text.rstrip())
    assert text.rstrip().splitlines()[-1].startswith("sections: ")


def test_a_run_returns_only_its_result_files(smoke):
    """Eight files may."""
    names = {path.name for path in smoke.out.iterdir()}
    assert names == {"results.json", "summary.txt", "timeline.json.gz", "junit.xml"}


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """A run of sections that go wrong in all ways."""
    out = tmp_path_factory.mktemp("faults")
    folder = write(out / "sections", **FAULTS)
    done, results = run(out, "--smoke", "--sections-from", folder, "--section-limit", 4)
    parts = {part["name"]: part for part in results["sections"]}
    return SimpleNamespace(done=done, results=results, parts=parts)


@pytest.mark.parametrize(
    ("name", "status", "word"),
    [
        ("b_raises", "failed", "ValueError: on purpose"),
        ("c_dies", "crashed", "Segmentation fault"),
        ("d_hangs", "timeout", "in measure"),
        ("e_garbage", "failed", "5 lines of its output are no rows"),
        ("f_no_syntax", "failed", "SyntaxError"),
        ("g_no_measure", "failed", "AttributeError"),
        ("h_leaves", "failed", "SystemExit"),
    ],
)
def test_a_failed_section_reports_its_status_and_last_output(faults, name, status, word):
    """For a hang, the last lines show where it stopped."""
    assert faults.parts[name]["status"] == status
    assert word in faults.parts[name]["error"]


@pytest.mark.parametrize("name", ["b_raises", "c_dies", "d_hangs", "e_garbage", "h_leaves"])
def test_rows_before_a_failure_are_saved(faults, name):
    """Rows are flushed one by one."""
    assert [row["row"] for row in faults.parts[name]["rows"]] == ["before"]


def test_a_fault_costs_no_other_section_and_shows_in_the_exit_status(faults):
    """The sections behind it run as if nothing had been."""
    for name in ("a_good", "z_good"):
        assert faults.parts[name]["status"] == "passed"
        assert faults.parts[name]["rows"] == [{"row": "good", "status": "measured", "value": 1.5}]
    assert faults.results["ended"] == "complete"
    assert faults.done.returncode == 1


def test_processes_of_a_hanging_section_are_ended_with_it(faults):
    """A process that keeps the card would spoil every figure after it."""
    pid = faults.parts["d_hangs"]["rows"][0]["pid"]
    assert not is_alive(pid)


def test_a_number_that_is_not_finite_is_saved_as_a_string(faults):
    """JSON has no NaN, and a reader that fails on one loses the whole run."""
    assert faults.parts["e_garbage"]["rows"][0]["value"] == "nan"


def test_sections_are_selected_and_skipped_by_name(kit, monkeypatch, tmp_path):
    """After a repair only some sections run again."""
    folder = write(tmp_path / "sections", one=GOOD, two=GOOD, three=GOOD)
    names = ("--only", "one,two", "--skip", "two")
    status, results = run_here(
        kit, monkeypatch, tmp_path, "--smoke", "--sections-from", folder, *names
    )
    assert [part["name"] for part in results["sections"]] == ["one"]
    assert status == 0


def test_without_time_left_sections_are_skipped_with_the_reason(kit, monkeypatch, tmp_path):
    """The report must not present a skipped section as measured."""
    folder = write(tmp_path / "sections", one=GOOD)
    _, results = run_here(
        kit, monkeypatch, tmp_path, "--smoke", "--sections-from", folder, "--limit", 0
    )
    assert results["sections"][0]["status"] == "skipped"
    assert results["sections"][0]["error"] == "out of time"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--smoke", "--only", "nothing"), "no section called nothing; there are facts"),
        (("--device", "cuda"), "there is no CUDA device here"),
        ((), "there is no CUDA device here"),
    ],
)
def test_an_impossible_run_is_refused_before_anything_runs(
    kit, monkeypatch, capsys, tmp_path, words, message
):
    """Full sizes on a CPU would take an hour for useless figures."""
    import torch

    if torch.cuda.is_available() and "--smoke" not in words:
        pytest.skip("there is a CUDA device")
    status, results = run_here(kit, monkeypatch, tmp_path, *words)
    assert status == 2
    assert message in capsys.readouterr().err
    assert results is None


def test_ctrl_c_writes_the_results_so_far(tmp_path):
    """`timeout -s INT` ends a run that would be cut off."""
    fifo = tmp_path / "there"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR)
    waiting = f"""
import pathlib, threading
def measure(section):
    section.row("before", value=1)
    pathlib.Path({str(fifo)!r}).write_text("there")
    threading.Event().wait()
"""
    folder = write(tmp_path / "sections", a_good=GOOD, b_waits=waiting, c_good=GOOD)
    command = [
        sys.executable,
        str(RUN),
        "--out",
        str(tmp_path),
        "--smoke",
        "--sections-from",
        str(folder),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    readable, _, _ = select.select([reader], [], [], 120)
    os.close(reader)
    assert readable
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=HANG_S)
    results = json.loads((tmp_path / "results.json").read_text())
    parts = {part["name"]: part for part in results["sections"]}
    assert process.returncode == 130
    assert results["ended"] == "interrupted"
    assert parts["a_good"]["status"] == "passed"
    assert parts["b_waits"]["rows"] == [{"row": "before", "status": "measured", "value": 1}]
    assert parts["c_good"] | {"seconds": 0} == parts["c_good"] | {
        "status": "skipped",
        "error": "interrupted",
        "seconds": 0,
    }
    assert "interrupted" in output


@pytest.mark.parametrize(
    ("value", "better", "verdict"),
    [
        (4.5, "lower", "as expected"),
        (3.0, "lower", "better"),
        (6.0, "lower", "worse"),
        (3.0, "higher", "worse"),
        (6.0, "higher", "better"),
        (6.0, "inside", "worse"),
        (3.0, "inside", "worse"),
        (None, "lower", "missing"),
        ("nan", "lower", "missing"),
        (True, "lower", "missing"),
    ],
)
def test_verdicts(kit, value, better, verdict):
    """Prediction beside measurement, in one word."""
    assert kit.expected.verdict_of(value, 4.0, 5.0, better) == verdict


def test_a_known_gpu_has_a_column_and_an_unknown_one_has_none(kit):
    """Another GPU must not require a change."""
    rows = [{"row": "launch", "status": "measured", "eager_op_us": 6.0}]
    sections = [kit.results.SectionResult("facts", "passed", rows=rows)]
    by_card = {
        name: {row["row"]: row for row in kit.expected.compare(sections, name)}[
            "facts: launch: eager_op_us"
        ]
        for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100", None)
    }
    verdicts = [row["verdict"] for row in by_card.values()]
    assert verdicts == ["as expected", "as expected", "missing", "missing"]


def test_every_prediction_names_a_section_and_both_gpus(kit):
    """A prediction of a row that no section writes would always be missing, unnoticed."""
    content = json.loads((GPU / "expected.json").read_text())
    names = {entry.name for entry in kit.run.SECTIONS}
    for row in content["rows"]:
        assert row["section"] in names
        assert row["better"] in {"lower", "higher", "inside"}
        for card in content["cards"]:
            low, high = row[card]
            assert low <= high


def test_the_tables_predictions_are_of_rows_that_the_table_has(kit):
    """By the labels of cells."""
    content = json.loads((GPU / "expected.json").read_text())
    sys.path.insert(0, str(GPU))
    one_gpu = importlib.import_module("sections.one_gpu")
    graphs = importlib.import_module("sections.graphs")
    labels = {cell.label for cell in one_gpu.cells(smoke=False)}
    known = {
        f"{label} {name}" for label in labels for name in {**one_gpu.SYSTEMS, **graphs.SYSTEMS}
    }
    asked = {row["row"] for row in content["rows"] if row["section"] in {"one_gpu", "graphs"}}
    assert asked - known == set()


def test_the_parent_does_not_start_cuda():
    """A process that is forked from one in which CUDA runs cannot use it."""

    def starts_cuda(folder):
        import sys

        import torch

        sys.path.insert(0, folder)
        importlib.import_module("run")
        return torch.cuda.is_initialized()

    assert ps.launch(starts_cuda, 1, str(GPU), threads=1) == [False]
