"""What ops wait for by the rules, and the links that their values cross."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import ScheduleError
from penstock.schedule.op import Schedule
from penstock.schedule.op_inputs import OpInputs, number_keys

TWO_RANKS = "0F0 0B0 0U1\n1F0 1B0 1U1"


def by_op(inputs: OpInputs, references) -> dict[str, str]:
    """References from op to op, by their texts."""
    ops = list(map(str, inputs.ops.all_ops()))
    return {ops[row]: ops[other] for row, other in enumerate(references.tolist()) if other >= 0}


def test_inputs_of_the_own_rank_are_left_out_and_values_of_others_cross_links():
    """Programs run in order, so that only what comes from another rank has to be waited for."""
    inputs = OpInputs(Schedule.parse(TWO_RANKS))
    assert by_op(inputs, inputs.first) == {"1F0": "0F0", "0B0": "1B0"}
    assert by_op(inputs, inputs.second) == {}
    assert by_op(inputs, inputs.consumer) == {"0F0": "1F0", "1B0": "0B0"}
    links = inputs.links[inputs.link[inputs.consumer >= 0]]
    assert links.tolist() == [[0, 1], [1, 0]]


def test_a_value_within_a_rank_has_a_source_but_no_link():
    """Two stages on one rank pass values on directly; memory still counts them as received."""
    inputs = OpInputs(Schedule.parse("0F0 1F0 1B0 0B0 0U1 1U1"))
    assert by_op(inputs, inputs.source) == {"1F0": "0F0", "0B0": "1B0"}
    assert len(inputs.links) == 0
    assert (inputs.link == -1).all()


def test_an_op_whose_input_no_rank_runs_is_refused_by_name():
    """Else it would wait for ever, or start without its input."""
    with pytest.raises(ScheduleError, match="1F0 needs 0F0, which no rank runs"):
        OpInputs(Schedule.parse("0F1 0B1 0U1\n1F0 1F1 1B0 1B1 1U1"))


@pytest.mark.parametrize("bound", [8, 10**9])
def test_keys_are_numbered_in_ascending_order_whatever_their_bound(bound):
    """Few possible keys are counted in a table, many are sorted: links must not depend on which."""
    unique, positions = number_keys(np.array([5, 2, 5, 7]), bound)
    assert unique.tolist() == [2, 5, 7]
    assert positions.tolist() == [1, 0, 1, 2]
