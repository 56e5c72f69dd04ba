"""Metrics of a run, as lines and in TensorBoard."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest

from penstock.errors import FileError, SettingError
from penstock.training.metrics import Metrics, check_wandb


def test_every_number_of_a_line_is_in_tensorboard(tmp_path):
    """Shares and bytes per rank too, and the predicted step as a line beside the measured one."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Metrics(tmp_path, predicted_step_s=0.25) as metrics:
        metrics.write(1, loss=2.0, step_s=0.5, lr=0.1, grad_norm=3.0)
        metrics.write(1, epoch=1, test_loss=1.0, busy=[0.5, 0.75], peak_memory=(10, 20))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    values = {name: board.Scalars(name)[0].value for name in board.Tags()["scalars"]}
    assert values == {
        "loss": 2.0,
        "step_s": 0.5,
        "predicted_step_s": 0.25,
        "lr": pytest.approx(0.1),
        "grad_norm": 3.0,
        "epoch": 1.0,
        "test_loss": 1.0,
        "busy/0": 0.5,
        "busy/1": 0.75,
        "peak_memory/0": 10.0,
        "peak_memory/1": 20.0,
    }


def test_tensorboard_shows_every_step_of_a_resumed_run_once(tmp_path, monkeypatch):
    """Steps after the checkpoint are trained again; the lost attempt's are hidden."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Files of one second and one process are read in the order of a counter as text: 9 after 10.
    counter = event_file_writer.AtomicCounter(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)
    for start, end in ((0, 3), (2, 4), (0, 2)):
        with Metrics(tmp_path, step=start) as metrics:
            for step in range(start + 1, end + 1):
                metrics.write(step, loss=float(10 * start + step))
        board = EventAccumulator(str(tmp_path / "tensorboard"))
        board.Reload()
        rows = [(event.step, event.value) for event in board.Scalars("loss")]
        assert [step for step, _ in rows] == list(range(1, end + 1))
        assert rows[-1] == (end, 10.0 * start + end)


def test_lines_are_complete_json(tmp_path):
    """A report and other programs read them."""
    with Metrics(tmp_path) as metrics:
        metrics.write(1, loss=2.0)
        metrics.write(2, busy=[0.5])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 2.0},
        {"step": 2, "busy": [0.5]},
    ]


def test_a_full_disk_is_one_error_that_names_the_file(tmp_path):
    """The device takes nothing; closing the file after an error hides no error."""
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(FileError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        _write_line(tmp_path)


def _write_line(folder):
    """Write one line of metrics."""
    with Metrics(folder) as metrics:
        metrics.write(1, loss=2.0)


class FakeRun:
    """What `wandb.init` returns."""

    def __init__(self):
        self.rows = []

    def log(self, figures, step):
        self.rows.append((step, figures))

    def finish(self):
        self.rows.append("finished")


def test_a_project_of_weights_and_biases_gets_every_figure_in_one_run(tmp_path, monkeypatch):
    """Also those of a resumed run, which has the same id."""
    runs = []

    def init(**settings):
        runs.append((settings, FakeRun()))
        return runs[-1][1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for start in (0, 1):
        with Metrics(tmp_path, 0.25, start, wandb="penguins") as metrics:
            metrics.write(start + 1, loss=2.0, step_s=0.5, busy=[0.5, 0.75], note="text")
    (first, rows), (second, _) = runs
    assert first == second
    assert (first["project"], first["name"], first["resume"]) == (
        "penguins",
        tmp_path.name,
        "allow",
    )
    figures = {"loss": 2.0, "step_s": 0.5, "busy/0": 0.5, "busy/1": 0.75, "predicted_step_s": 0.25}
    assert rows.rows == [(1, figures), "finished"]


def test_a_project_without_the_package_is_refused(monkeypatch):
    """Before the model is measured."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_wandb(None)
    with pytest.raises(SettingError, match="wandb needs the package of that name"):
        check_wandb("penguins")
