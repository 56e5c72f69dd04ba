"""Renamed arguments: old names work, warn, and name the new ones."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import fields, replace

import numpy as np
import pytest

import penstock as ps
from penstock.errors import SettingError
from penstock.simulate.costs import RENAMED, Costs

every_renamed = pytest.mark.parametrize(("old", "new"), list(RENAMED.items()))


@every_renamed
def test_an_old_name_of_a_cost_is_accepted_with_a_warning_that_names_the_new_one(old, new):
    """A script of the last version runs, and says what to change."""
    with pytest.warns(DeprecationWarning, match=rf"^{old} is deprecated.*use {new}$") as caught:
        costs = Costs(forward=2, activation_bytes=9, **{old: [1, 3]})
    assert caught[0].filename == __file__
    assert costs == Costs(forward=2, activation_bytes=9, **{new: [1, 3]})
    with pytest.warns(DeprecationWarning, match=rf"{old} is deprecated.*use {new}"):
        assert getattr(costs, old) == (1, 3)
    with pytest.warns(DeprecationWarning, match=new):
        assert getattr(replace(Costs(), **{old: 4}), new) == 4


@every_renamed
def test_old_names_of_a_sweep_are_accepted_too(old, new):
    """Its costs are a mapping by the names of the fields."""
    program = ps.schedule("dualpipe", 2, 4)
    amounts = {"activation_bytes": 9.0, "forward": np.array([1.0, 2.0])}
    with pytest.warns(DeprecationWarning, match=rf"{old} is deprecated.*use {new}"):
        outcomes = ps.simulate_many(program, {**amounts, old: 0.5})
    expected = ps.simulate_many(program, {**amounts, new: 0.5})
    assert outcomes.makespan.tolist() == expected.makespan.tolist()


def test_both_names_at_once_are_refused():
    """One of the two would win in silence."""
    with (
        pytest.warns(DeprecationWarning, match="again"),
        pytest.raises(SettingError, match="again is the old name of recompute, and both are given"),
    ):
        Costs(again=1, recompute=2)


def test_new_names_do_not_warn_and_unknown_ones_are_refused():
    """Copies and pickles ask for attributes that are not there."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        costs = Costs(**dict.fromkeys(RENAMED.values(), 1.0))
        assert copy.deepcopy(costs) == pickle.loads(pickle.dumps(costs)) == costs
        assert not {field.name for field in fields(costs)} & set(RENAMED)
        with pytest.raises(AttributeError, match="Costs has no attribute 'agian'"):
            _ = costs.agian
        with pytest.raises(TypeError, match="agian"):
            Costs(agian=1)


def test_an_old_keyword_of_a_function_is_accepted():
    """`export` called what it writes `made`."""
    program = ps.schedule("1f1b", 2, 4)
    with pytest.warns(DeprecationWarning, match=r"made is deprecated.*use source") as caught:
        text = ps.export(made=program, to="csv")
    assert caught[0].filename == __file__
    assert text == ps.export(program, "csv")
