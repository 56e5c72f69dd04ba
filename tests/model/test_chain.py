"""Chain: tensors count once, tied ones are known, and invalid partitions raise an error."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ChainError, SettingError
from penstock.model.chain import Chain, Layer, TensorFacts, check_fingerprint


def facts(name, *shape, trainable=True):
    return TensorFacts(name, shape, "float32", 4, trainable)


#: An embedding whose weight the head uses again, and a norm in between that lists its own weight
#: twice.
TIED = Chain(
    (
        Layer("embed", "Embedding", ("embed",), ("embed.weight",)),
        Layer("norm", "LayerNorm", ("norm",), ("norm.weight", "norm.weight"), ("norm.mean",)),
        Layer("body", "Linear", ("body",), ("body.weight", "body.bias")),
        Layer("head", "Linear", ("head",), ("embed.weight",), ("mask",)),
        Layer("last", "Linear", ("last",), (), ("mask",)),
    ),
    (
        facts("embed.weight", 10, 3),
        facts("norm.weight", 3),
        facts("norm.mean", 3, trainable=False),
        facts("body.weight", 3, 3),
        facts("body.bias"),
        facts("mask", 7, trainable=False),
    ),
)


def test_a_chain_is_a_sequence_of_its_layers():
    """Partitioners and profilers iterate over it."""
    assert len(TIED) == 5
    assert [layer.name for layer in TIED] == ["embed", "norm", "body", "head", "last"]
    assert TIED[2].kind == "Linear"
    assert TIED.tensor("norm.mean").shape == (3,)


def test_a_parameter_counts_once_however_often_it_is_used():
    """30 + 3 + 9 + 1 elements; buffers do not count, and a scalar has one."""
    assert TIED.parameter_count == 43


def test_a_chain_without_parameters_counts_none():
    """A chain of pools and activations."""
    assert Chain((Layer("pool", "MaxPool2d"),)).parameter_count == 0


def test_tied_tensors_are_those_of_more_than_one_layer():
    """A layer that lists its tensor twice ties nothing, since no cut separates it from itself."""
    assert TIED.tied == {"embed.weight": (0, 3), "mask": (3, 4)}


def test_stage_bounds_are_first_and_one_past_last():
    """As slices of the chain."""
    assert TIED.stage_bounds([5]) == [(0, 5)]
    untied = Chain(tuple(Layer(str(i), "Linear") for i in range(5)))
    assert untied.stage_bounds((1, 3, 1)) == [(0, 1), (1, 4), (4, 5)]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
@settings(deadline=None, max_examples=50)
def test_stage_bounds_join_end_to_end(lengths):
    """Every layer is in exactly one stage, in order."""
    bounds = Chain(tuple(Layer(str(i), "Linear") for i in range(sum(lengths)))).stage_bounds(
        lengths
    )
    assert [end - start for start, end in bounds] == lengths
    assert [layer for start, end in bounds for layer in range(start, end)] == list(
        range(sum(lengths))
    )


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (
            [2, 2],
            r"stage lengths \[2, 2\] sum to 4 and must be positive and sum to 5, the number of layers",
        ),
        ([3, 3], r"stage lengths \[3, 3\] sum to 6"),
        ([5, 0], r"stage lengths \[5, 0\] sum to 5 and must be positive"),
        ([6, -1], r"stage lengths \[6, -1\] sum to 5 and must be positive"),
        ([], r"stage lengths \[\] sum to 0"),
    ],
)
def test_lengths_that_do_not_make_the_chain_are_refused(lengths, message):
    """Otherwise a model would be trained without a layer."""
    with pytest.raises(ChainError, match=message):
        TIED.stage_bounds(lengths)


def test_a_cut_may_go_between_tied_layers():
    """The runtime synchronises weights that several stages share, so cuts are not restricted."""
    assert TIED.stage_bounds([2, 3]) == [(0, 2), (2, 5)]


@pytest.mark.parametrize(
    "change",
    [
        lambda chain: replace(chain, layers=chain.layers[::-1]),
        lambda chain: replace(chain, layers=(replace(chain[0], name="other"), *chain.layers[1:])),
        lambda chain: replace(chain, layers=(replace(chain[0], kind="Linear"), *chain.layers[1:])),
        lambda chain: replace(
            chain, tensors=(replace(chain.tensors[0], shape=(3, 10)), *chain.tensors[1:])
        ),
        lambda chain: replace(
            chain, tensors=(replace(chain.tensors[0], dtype="float16"), *chain.tensors[1:])
        ),
    ],
)
def test_the_fingerprint_differs_when_the_model_does(change):
    """It detects plans and profiles of another model."""
    assert change(TIED).fingerprint != TIED.fingerprint


def test_the_fingerprint_is_the_same_for_the_same_model():
    """Across objects and processes, since it is written to files."""
    assert replace(TIED).fingerprint == TIED.fingerprint
    assert Chain((Layer("pool", "MaxPool2d"),)).fingerprint == "dbb4a6a0f8a7"


def test_chains_are_values():
    """Equal when their layers and tensors are, whatever is cached inside."""
    assert replace(TIED) == TIED
    assert hash(replace(TIED)) == hash(TIED)


@pytest.mark.parametrize("fingerprint", ["{a: " * 2000, "0123\ufeff"])
def test_a_fingerprint_that_no_message_could_quote_is_refused(fingerprint):
    """Files with it may be damaged or hostile, and a dozen messages quote fingerprints."""
    check_fingerprint(TIED.fingerprint, "plan.json")
    with pytest.raises(SettingError, match=r"^plan\.json: the fingerprint '[{0]") as refusal:
        check_fingerprint(fingerprint, "plan.json")
    assert len(str(refusal.value)) < 300
    assert str(refusal.value).isprintable()
