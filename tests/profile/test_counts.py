"""Counts as plain data: arithmetic, and validation of JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from penstock.errors import FileError, SettingError
from penstock.profile.counts import LayerCounts, ModelCounts, Work, check_counts

GEMM = Work("addmm", "matrix", 2, 10.0, 100.0, 40.0, 8.0)
RELU = Work("relu", "other", 1, 0.0, 5.0, 0.0, 40.0)
LAYER = LayerCounts("fc", "Linear", (GEMM, RELU), (GEMM, GEMM), (GEMM,), (), 12, 48, 0, 20.0, 4.0)
COUNTS = ModelCounts((LAYER, replace(LAYER, name="fc2")), "0123456789ab", 16.0, 12.0, 32)


def test_work_grows_with_the_samples_from_a_fixed_part():
    """Weights are read whatever the batch."""
    assert GEMM.flops_at(3) == 310
    assert GEMM.bytes_at(0.5) == 44


def test_a_layer_adds_up_its_ops_and_a_model_its_layers():
    """What planners ask for."""
    assert LAYER.flops("forward", 2) == 210 + 10
    assert (
        LAYER.launches("forward"),
        LAYER.launches("backward"),
        LAYER.launches("weight_grad"),
    ) == (3, 4, 0)
    assert COUNTS.flops("backward", 1) == 2 * 2 * 110
    assert (len(COUNTS), COUNTS.parameters, COUNTS.parameter_bytes) == (2, 24, 96)
    assert [layer.name for layer in COUNTS] == ["fc", "fc2"]


def test_saved_counts_read_back_equal(tmp_path):
    """Everything prints as itself and reads back."""
    COUNTS.save(tmp_path / "counts.json")
    assert ModelCounts.load(tmp_path / "counts.json") == COUNTS


def test_a_tied_parameter_of_no_earlier_layer_is_refused(tmp_path):
    """A profile that is made of the counts would look for its size."""
    path = tmp_path / "counts.json"
    COUNTS.save(path)
    data = json.loads(path.read_text())
    data["layers"][0]["tied_tensors"] = [[99, 0]]
    path.write_text(json.dumps(data))
    with pytest.raises(FileError, match=r"tied_tensors has \[99, 0\]"):
        ModelCounts.load(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 7}, "schema is 7"),
        ({"batch": -1}, "batch is -1, and cannot be below 0"),
        ({"layers": [{}]}, "at layers.0"),
        ({"speed": 1}, "speed"),
    ],
)
def test_a_malformed_file_of_counts_is_refused_with_the_position(tmp_path, change, words):
    """Files come from other machines and may be damaged."""
    path = tmp_path / "counts.json"
    COUNTS.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FileError, match=words):
        ModelCounts.load(path)


@pytest.mark.parametrize(
    "work",
    [replace(GEMM, launches=0), replace(GEMM, flops_per_sample=-1.0), replace(GEMM, bytes=-9.0)],
)
def test_an_op_that_cannot_be_is_refused_by_name(work):
    """A negative number of bytes would attract every cut."""
    with pytest.raises(SettingError, match="here: layer fc: addmm has"):
        check_counts(replace(COUNTS, layers=(replace(LAYER, forward=(work,)),)), "here")


def test_an_op_may_cost_less_than_nothing_at_no_samples_if_it_costs_something_at_one():
    """Two sizes that take different ways make a line with an intercept below 0."""
    check_counts(
        replace(COUNTS, layers=(replace(LAYER, forward=(replace(GEMM, bytes=-8.0),)),)), "here"
    )
