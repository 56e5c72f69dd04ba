"""Options of saving and loading: which parts of a checkpoint `skip=` names."""

from __future__ import annotations

import pytest

from penstock.checkpoint.checkpoint_options import PARTS, CheckpointOptions, parse_skip
from penstock.errors import SettingError


@pytest.mark.parametrize(
    ("skip", "parts"),
    [
        ((), ()),
        ("", ()),
        ("schedulers", ("schedulers",)),
        ("averages", ("averages",)),
        (["scaler", "weight_rule", "scaler"], ("scaler", "weight_rule")),
        ({"weight_rule"}, ("weight_rule",)),
        ("optimizer", PARTS),
        (("averages", "optimizer"), PARTS),
    ],
)
def test_a_part_is_skipped_alone_and_the_optimizer_with_all_others(skip, parts):
    """Schedulers, scaler, rule and averages belong to the run of the optimizer that was saved."""
    assert parse_skip(skip) == frozenset(parts)


@pytest.mark.parametrize("skip", ["scalar", ["optimizer", "weights"], "opt", ("",), "schedulers "])
def test_an_unknown_part_is_refused_with_the_names_of_all_parts(skip):
    """A misspelt name must not load what the user wanted to skip; nor a known one beside it."""
    wrong = skip if isinstance(skip, str) else skip[-1]
    with pytest.raises(SettingError) as refusal:
        parse_skip(skip)
    assert str(refusal.value) == (
        "skip is any of optimizer, schedulers, scaler, weight_rule, averages, not " + repr(wrong)
    )


def test_options_that_are_not_given_skip_nothing_and_refuse_nan():
    """A synchronous pipeline without schedulers, scaler and averages gives none."""
    options = CheckpointOptions()
    assert (options.rule, options.copies, options.nonfinite) == (None, 1, False)
    assert (options.skip, options.scaler) == (frozenset(), False)
    assert (list(options.schedulers), list(options.averages)) == ([], [])
