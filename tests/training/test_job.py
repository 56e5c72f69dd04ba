"""Checks of a run before its measurement, which takes minutes."""

from __future__ import annotations

import re

import pytest

from penstock.errors import PenstockError
from penstock.training.config import TrainConfig
from penstock.training.job import check_run
from penstock.training.task import make_task

SMALL = {"model": "mlp", "data": "digits", "model_options": {"layers": 2, "hidden": 4}, "batch": 8}


@pytest.fixture(scope="module")
def task():
    """The model and the data of a small run."""
    return make_task(TrainConfig(**SMALL))


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("callbacks", "nowhere.to:be_found", "--callbacks nowhere.to:be_found"),
        ("initial_weights", "no.safetensors", "no.safetensors"),
        ("plan", "no.json", "no.json"),
        ("stages", 99, "99 stages"),
    ],
)
def test_what_a_setting_names_is_looked_at_before_the_measurement(task, setting, value, message):
    """Also of a run that torchrun has started: its ranks would measure for nothing."""
    with pytest.raises(PenstockError, match=re.escape(message)):
        check_run(TrainConfig(**SMALL, **{setting: value}), task)


def test_a_run_without_a_plan_has_none_to_return(task):
    """Only a named plan decides the number of ranks."""
    assert check_run(TrainConfig(**SMALL), task) is None
