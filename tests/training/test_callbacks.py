"""Calls into the user's code during a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.training.user_modules import MODEL, write_module

from penstock.errors import SettingError
from penstock.training.callbacks import Callbacks, load_callbacks
from penstock.training.config import TrainConfig
from penstock.training.devices import Devices
from penstock.training.job import prepare
from penstock.training.rank import train_on

CALLS = """
from penstock.checkpoint.checkpoint_index import INDEX

calls = []

class Log:
    def on_step(self, step, loss, seconds):
        calls.append(("step", step))

    def on_evaluation(self, step, loss, accuracy):
        calls.append(("evaluation", step, 0 <= accuracy <= 1))

    def on_checkpoint(self, step, folder):
        calls.append(("checkpoint", step, (folder / INDEX).exists()))

class Broken:
    def on_step(self, step, **facts):
        raise ValueError(f"step {step}")
"""


@pytest.fixture
def module(monkeypatch, tmp_path):
    """The name of a module with a model, data and callbacks."""
    return write_module(MODEL + CALLS, monkeypatch, tmp_path)


def test_a_run_reports_steps_evaluations_and_whole_checkpoints(module, tmp_path):
    """In the order in which they happen; a checkpoint is whole when it is reported."""
    import importlib

    import torch

    config = TrainConfig(
        model=f"{module}:make",
        data=f"{module}:load",
        batch=18,
        epochs=2,
        stages=1,
        ranks=1,
        micro_batches=1,
        schedule="gpipe",
        self_check=False,
        baseline_steps=0,
        profile_repeats=1,
        callbacks=f"{module}:Log",
        out=str(tmp_path / "run"),
        device="cpu",
    )
    prepared = prepare(config, lambda text: None)
    assert prepared.devices == Devices()
    train_on(config, prepared.plan, prepared.folder, True, torch.device("cpu"), "threads")
    calls = importlib.import_module(module).calls
    assert [call for call in calls if call[0] == "step"] == [("step", n) for n in (1, 2, 3, 4)]
    assert [call[1:] for call in calls if call[0] == "evaluation"] == [(2, True), (4, True)]
    assert [call[1:] for call in calls if call[0] == "checkpoint"] == [(2, True), (4, True)]
    assert calls.index(("step", 2)) < calls.index(("evaluation", 2, True))


def test_what_a_user_does_not_define_is_not_called(module):
    """One method is enough; without callbacks nothing happens."""
    load_callbacks(f"{module}:Broken").on_evaluation(1, 0.5, None)
    Callbacks().on_checkpoint(1, Path("folder"))
    assert load_callbacks(None) == Callbacks()


def test_an_exception_in_a_callback_shows_its_line(module):
    """It ends the run, as an exception in a loop does."""
    callbacks = load_callbacks(f"{module}:Broken")
    with pytest.raises(SettingError, match=r"Broken\.on_step raised ValueError: step 3") as caught:
        callbacks.on_step(3, 0.5, 0.1)
    assert caught.match("in on_step: raise ValueError")
    assert "callbacks.py" not in str(caught.value)


def test_an_object_without_callbacks_is_refused(module):
    """A misspelt method would never be called."""
    with pytest.raises(SettingError, match="has none of the methods on_step, on_evaluation"):
        load_callbacks(f"{module}:make")
