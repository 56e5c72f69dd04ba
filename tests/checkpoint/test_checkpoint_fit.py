"""Whether a checkpoint fits a pipeline: every mismatch is listed, and nothing that fits."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.checkpoint.checkpoint_files import Header
from penstock.checkpoint.checkpoint_fit import (
    Findings,
    average_tensors,
    check_averages,
    check_model,
    check_names,
    describe_form,
    expected_tensors,
    model_difference,
    nan_names,
    parameter_names,
)
from penstock.checkpoint.checkpoint_index import Checkpoint
from penstock.checkpoint.checkpoint_options import CheckpointOptions
from penstock.stage.stage_state import stage_tensors


class Tied(nn.Module):
    """A layer that uses the weight of another one, and has a buffer and a frozen bias."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("mask", torch.tensor([-math.inf, math.nan]))

    def forward(self, x):
        return x @ self.weight.t() + self.bias


@pytest.fixture(scope="module")
def placed():
    """The placement of a model with a tied weight in two stages; state under its names."""
    torch.manual_seed(0)
    first = nn.Linear(3, 3)
    model = nn.Sequential(first, nn.Tanh(), Tied(first.weight), nn.Linear(3, 1).double())
    pipe = ps.Pipeline(
        model, loss=nn.functional.mse_loss, balance=[2, 2], micro_batches=2, executor="threads"
    )
    yield pipe._assembly.placed
    pipe.close()


FORMS = {
    "0.weight": ("F32", (3, 3)),
    "0.bias": ("F32", (3,)),
    "2.bias": ("F32", (3,)),
    "2.mask": ("F32", (2,)),
    "3.weight": ("F64", (1, 3)),
    "3.bias": ("F64", (1,)),
}


def headers_of(forms):
    """Return headers of two files that have model tensors of these forms, and other state."""
    entries = [(f"model/{name}", form) for name, form in forms.items()]
    more = {"optimizer/9.weight/exp_avg": ("F32", (1,)), "weights/k": ("F64", ())}
    return [Header(dict(entries[::2]) | more, {}), Header(dict(entries[1::2]), {})]


def state_of(placed):
    """Return the state that the placement's own stages would save."""
    return {name: tensor.clone() for name, tensor in expected_tensors(placed).items()}


# -- the list of mismatches ------------------------------------------------------------------------


def test_mismatches_of_a_kind_are_one_sentence_with_all_names_once():
    """In the order in which they were found."""
    findings = Findings()
    assert findings.text() == ""
    findings.add("no {} here", "b")
    findings.add("a sentence of its own")
    for name in ("a", "b"):
        findings.add("no {} here", name)
    assert findings.text() == "no b, a here; a sentence of its own"
    assert list(findings.rows) == ["no {} here", "a sentence of its own"]
    assert Findings().rows == {}


def test_nan_is_looked_for_in_all_dtypes_that_have_it():
    """Infinities are on purpose. Of a dtype that cannot be compared nothing is known."""
    nan = torch.tensor([0.0, math.nan])
    tensors = {
        "single": nan,
        "half": nan.bfloat16(),
        "complex": torch.tensor([1 + 0j, complex(0, math.nan)]),
        "infinite": torch.tensor([math.inf, -math.inf]),
        "whole": torch.tensor([3]),
        "flag": torch.tensor([True]),
        "empty": torch.zeros(0),
        "few bits": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    assert nan_names(tensors) == ["single", "half", "complex"]


# -- the model -------------------------------------------------------------------------------------


def test_the_whole_model_is_expected_under_the_first_names(placed):
    """A rank knows the stages of the others too; a tied weight is saved once."""
    assert {name: tuple(tensor.shape) for name, tensor in expected_tensors(placed).items()} == {
        name: shape for name, (_, shape) in FORMS.items()
    }


DIFFERENCES = {
    "none": ({}, (), ""),
    "a shape": (
        {"0.weight": ("F32", (3, 2))},
        (),
        ": 0.weight is float32 (3, 2) in the checkpoint and float32 (3, 3) in the model",
    ),
    "a dtype": (
        {"3.bias": ("BF16", (1,))},
        (),
        ": 3.bias is bfloat16 (1,) in the checkpoint and float64 (1,) in the model",
    ),
    "a dtype without a name": (
        {"2.mask": ("F8_E5M2", (2,))},
        (),
        ": 2.mask is F8_E5M2 (2,) in the checkpoint and float32 (2,) in the model",
    ),
    "one less": ({}, ("0.bias",), ": 0.bias is not in the checkpoint"),
    "one more": ({"9.bias": ("I64", ())}, (), ": 9.bias is not in the model"),
    "a renamed one": (
        {"9.bias": ("F32", (3,))},
        ("0.bias",),
        ": 0.bias is not in the checkpoint, 9.bias is not in the model",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_another_model_is_described_by_what_differs(placed, name):
    """Optimizer state and state of the weight rule is not the model's."""
    changed, missing, text = DIFFERENCES[name]
    forms = {key: form for key, form in (FORMS | changed).items() if key not in missing}
    assert model_difference(headers_of(forms), placed) == text


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("F64", "float64"),
        ("F32", "float32"),
        ("F16", "float16"),
        ("BF16", "bfloat16"),
        ("I64", "int64"),
        ("I32", "int32"),
        ("I16", "int16"),
        ("I8", "int8"),
        ("U8", "uint8"),
        ("BOOL", "bool"),
        ("C64", "complex64"),
    ],
)
def test_dtypes_have_torchs_names_in_messages(placed, dtype, name):
    """The notation of files is not known to users."""
    saved = FORMS | {"0.bias": (dtype, (4,))}
    assert f": 0.bias is {name} (4,) in the checkpoint" in model_difference(
        headers_of(saved), placed
    )
    assert describe_form(name, (2, 3)) == f"{name} (2, 3)"


def test_names_that_the_model_does_not_have_are_listed_in_order(placed):
    """They would be ignored silently. Missing ones are found by the ranks that need them."""
    findings = Findings()
    check_names(headers_of(FORMS), placed, findings)
    assert findings.text() == ""
    forms = {name: FORMS[name] for name in ("0.bias", "3.bias")}
    check_names(headers_of(forms), placed, findings)
    assert findings.text() == ""
    check_names(
        headers_of({"z": ("F32", ()), "9.b": ("F32", ()), "a": ("F32", ())}), placed, findings
    )
    assert findings.text() == "the state has '9.b', 'a', 'z', which the model does not have"


def model_findings(placed, nonfinite=False, **changes):
    """Return what is said of the state of the model with changed tensors; None removes one."""
    tensors = {
        name: tensor for name, tensor in (state_of(placed) | changes).items() if tensor is not None
    }
    findings = Findings()
    check_model(placed, tensors, findings, nonfinite=nonfinite)
    return findings.text()


def test_the_state_of_every_stage_must_have_its_tensors_in_shape_and_dtype(placed):
    """A tied weight serves both stages under the first name, or each under its own."""
    assert model_findings(placed) == ""
    weight = state_of(placed)["0.weight"]
    assert model_findings(placed, **{"2.weight": weight}) == ""
    assert model_findings(placed, **{"2.weight": torch.zeros(2)}) == (
        "2.weight has shape (2,) in the state and (3, 3) in the model"
    )
    assert model_findings(placed, **{"0.weight": None, "3.bias": None}) == (
        "the state has no '0.weight', which stage 0 needs, '2.weight', which stage 1 needs, "
        "'3.bias', which stage 1 needs"
    )
    assert model_findings(placed, **{"0.bias": torch.zeros(3, 1).double()}) == (
        "0.bias has shape (3, 1) in the state and (3,) in the model"
    )
    assert model_findings(placed, **{"0.bias": torch.zeros(3).double()}) == (
        "0.bias is float64 in the state and float32 in the model (build the model in that dtype, "
        "or convert the weights by load_state_dict)"
    )


def test_nan_is_refused_in_parameters_and_left_to_the_model_in_buffers(placed):
    """Frozen parameters and both names of a tied one included; it may be allowed."""
    bad = torch.full((3,), math.nan)
    advice = (
        ": the run had diverged when this was saved. Resume from an earlier checkpoint; to load "
        "these values nevertheless, pass allow_nonfinite=True"
    )
    assert model_findings(placed, **{"2.bias": bad}) == f"NaN values in 2.bias{advice}"
    weight = torch.full((3, 3), math.nan)
    assert model_findings(placed, **{"0.weight": weight, "0.bias": bad}) == (
        f"NaN values in 0.weight, 0.bias, 2.weight{advice}"
    )
    assert model_findings(placed, nonfinite=True, **{"2.bias": bad}) == ""
    assert model_findings(placed, **{"2.bias": torch.full((3,), math.inf)}) == ""


def test_parameters_are_known_by_all_names_and_buffers_are_none(placed):
    """Frozen ones count: training may have changed them before."""
    names = [parameter_names(stage) for stage in placed.local]
    assert names == [
        {"0.weight", "0.bias"},
        {"2.weight", "2.bias", "3.weight", "3.bias"},
    ]
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    layer = SimpleNamespace(name="layer", module=nn.Sequential(one, nn.BatchNorm1d(2), other))
    assert parameter_names(SimpleNamespace(layers=[layer])) == {
        f"layer.{name}"
        for name in ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")
    }


# -- averages --------------------------------------------------------------------------------------


class OneAverage:
    """A running average of the weights of stages."""

    n_averaged = 2

    def __init__(self, shape):
        self.shape = shape

    def averaged(self, stage):
        """Return the averaged tensors of a stage."""
        return {name: torch.zeros(self.shape) for name in stage_tensors(stage) if "bias" in name}


def average_findings(placed, saved, index, averages):
    """Return what is said of saved averages."""
    findings = Findings()
    check_averages(index, saved, placed, CheckpointOptions(averages=averages), findings)
    return findings.text()


def test_averages_are_those_that_were_saved_by_number_and_shape(placed):
    """A pipeline without any ignores them; older schemas have none."""
    averages = [OneAverage((1,)), OneAverage((2,))]
    saved = average_tensors(placed, CheckpointOptions(averages=averages))
    assert list(saved) == [
        f"average/{number}/{name}.bias" for number in (0, 1) for name in (0, 2, 3)
    ]
    assert [saved[f"average/{number}/3.bias"].shape for number in (0, 1)] == [(1,), (2,)]
    index = Checkpoint(3, "f", (), averages=(5, 0))
    assert average_findings(placed, saved, index, averages) == ""
    assert average_findings(placed, {}, index, []) == ""
    for schema in (1, 2):
        old = Checkpoint(3, "f", (), schema=schema)
        assert average_findings(placed, {}, old, averages) == ""
    assert average_findings(placed, saved, index, averages[:1]) == (
        "it has 2 running averages of the weights, and this pipeline has 1. Make the same ones by "
        "pipe.ema(...) before load; to begin them anew, pass skip='averages'"
    )
    assert average_findings(placed, {}, Checkpoint(3, "f", ()), averages[:1]).startswith(
        "it has 0 running averages of the weights, and this pipeline has 1. Make"
    )
    text = average_findings(placed, saved, index, averages[::-1])
    assert text.startswith("it has no fitting 'average/0/0.bias', 'average/0/2.bias', ")
    assert text.endswith(": another kind of average was saved")
    saved.pop("average/1/2.bias")
    assert average_findings(placed, saved, index, averages) == (
        "it has no fitting 'average/1/2.bias': another kind of average was saved"
    )
