"""Layers of one kind, by regular expression."""

from __future__ import annotations

import re

import pytest

from penstock.errors import PartitionError
from penstock.partition.catalogue import partition

KINDS = ["Conv2d", "ReLU", "Conv2d", "ReLU", "ConvTranspose2d", "Flatten", "Linear", "Linear"]


@pytest.fixture(scope="module")
def profile(make_profile):
    """Three convolutions among eight layers."""
    return make_profile([1.0] * 8, kinds=KINDS)


@pytest.mark.parametrize(
    "by", ["type:conv", "type:CONV", "type:^Conv", "type:.*(conv)", "type:nv(2d|T)"]
)
def test_layers_match_anywhere_in_the_class_name_in_any_case(profile, by):
    """DeepSpeed searches, it does not compare whole names; three convolutions are then one for each
    stage.
    """
    lengths = partition(profile, 3, by)
    ends = [sum(lengths[: stage + 1]) for stage in range(3)]
    counts = [
        sum("Conv" in kind for kind in KINDS[end - length : end])
        for end, length in zip(ends, lengths, strict=True)
    ]
    assert counts == [1, 1, 1]


def test_the_pattern_may_be_an_option_too(profile):
    """A program has it in a variable; only people write it after a colon."""
    assert partition(profile, 3, "type", pattern="conv") == partition(profile, 3, "type:conv")


def test_a_pattern_may_hold_a_colon(make_profile):
    """Only the first colon ends the name: (?:...) is a common group."""
    assert partition(make_profile([1] * 4, kinds=["A", "x", "B", "x"]), 2, "type:(?:a|b)") == [2, 2]


def test_fewer_matches_than_stages_still_fill_every_stage(profile):
    """DeepSpeed's algorithm knows nothing of kinds; layers that weigh nothing fill the rest."""
    assert min(partition(profile, 6, "type:flatten")) >= 1


@pytest.mark.parametrize(
    ("by", "message"),
    [
        (
            "type",
            "needs a regular expression for the kinds of layers, such as 'type:conv', and got ''. Kinds in this profile: Conv",
        ),
        ("type:", "needs a regular expression"),
        ("type:(conv", "type:(conv is not a regular expression: "),
        (
            "type:attention",
            "type:attention matches no layer. Kinds in this profile: Conv2d, ReLU, ConvTranspose2d, Flatten, Linear",
        ),
    ],
)
def test_an_expression_of_no_use_is_refused(profile, by, message):
    """DeepSpeed cuts such a model somewhere, without a word."""
    with pytest.raises(PartitionError, match=re.escape(message)):
        partition(profile, 2, by)


def test_a_pattern_that_is_no_text_is_refused(profile):
    """A forgotten quote or a list in a configuration file."""
    with pytest.raises(PartitionError, match=r"needs a regular expression .* and got 7"):
        partition(profile, 2, "type", pattern=7)
