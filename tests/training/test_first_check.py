"""The self-check before a run: what it lets pass, and what it refuses."""

from __future__ import annotations

from penstock.runtime.comparison.one_device_comparison import Comparison
from penstock.runtime.comparison.undivided_batch import WholeBatch
from penstock.training.config import TrainConfig
from penstock.training.first_check import _evaluate

SCALE = {"a": 1.0, "loss": 1.0}


def compared(same=0.0, whole=0.0, causes=()):
    """A comparison with these differences of one gradient."""
    undivided = WholeBatch({"a": whole}, 0.0, SCALE, causes)
    return Comparison({"a": same}, {}, 0.0, SCALE, {}, undivided)


def test_a_sound_pipeline_is_said_to_be_so_in_one_line():
    """With both differences."""
    line, fault = _evaluate(compared(2e-7, 3e-7), TrainConfig())
    assert fault == ""
    assert line == (
        "self-check: as one device to 2e-07 with the same micro-batches, to 3e-07 with the undivided batch"
    )


def test_a_difference_from_the_same_micro_batches_is_refused_whatever_the_cause():
    """It is a fault of the pipeline; mixed precision rounds more."""
    _, fault = _evaluate(compared(0.01, 0.01, ("dropout",)), TrainConfig())
    assert "differs from plain training on the same micro-batches by 0.01" in fault
    assert "--no-self-check" in fault
    assert _evaluate(compared(0.01), TrainConfig(autocast="bfloat16"))[1] == ""


def test_a_difference_from_the_undivided_batch_needs_a_cause():
    """Batch normalisation is one; without any the loss or the model is not what micro-batches take
    it for.
    """
    line, fault = _evaluate(compared(0.0, 0.3, ("batch normalisation",)), TrainConfig())
    assert fault == ""
    assert line.endswith("the undivided batch differs: batch normalisation")
    _, fault = _evaluate(compared(0.0, 0.3), TrainConfig())
    assert "differs from plain training on the undivided batch by 0.3" in fault


def test_a_number_that_is_none_is_refused():
    """No comparison with it is true."""
    assert "the self-check failed" in _evaluate(compared(float("nan")), TrainConfig())[1]
