"""BaPipe's table against simulation of the programs that it stands for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.search.planners.bapipe_table import (
    AS,
    S,
    Stages,
    fbp_as,
    one_f_one_b_as,
    one_f_one_b_sno,
    one_f_one_b_so,
)


def simulated(name, stages):
    """Makespan of a family of ours with the same costs."""
    plan = ps.schedule(name, stages=stages.count, micro_batches=stages.micro_batches)
    return ps.simulate(
        plan,
        ps.Costs(forward=stages.forward_s, backward=stages.backward_s, transfer=stages.transfer_s),
    ).makespan


SHAPES = st.builds(
    Stages,
    count=st.integers(1, 6),
    micro_batches=st.integers(1, 20),
    forward_s=st.floats(0.5, 2),
    backward_s=st.floats(0.5, 4),
    transfer_s=st.floats(0, 0.5),
)


@settings(deadline=None, max_examples=40)
@given(SHAPES)
def test_1f1b_that_waits_takes_what_simulation_says(stages):
    """SNO is plain 1F1B on links that nothing hides: the formula is exact."""
    assert one_f_one_b_sno(stages).seconds == pytest.approx(simulated("1f1b", stages))


@settings(deadline=None, max_examples=40)
@given(SHAPES)
def test_1f1b_with_twice_the_warm_up_takes_what_simulation_says(stages):
    """SO is the eager order: only filling and draining pay for transfers, as long as a pair of ops
    hides one each way.
    """
    assert 2 * stages.transfer_s <= stages.forward_s + stages.backward_s
    assert one_f_one_b_so(stages).seconds == pytest.approx(simulated("eager-1f1b", stages))


def test_1f1b_that_computes_and_transfers_at_once_takes_no_time_for_transfers():
    """AS on links that are fast enough: the table's first line."""
    stages = Stages(4, 8, 1.0, 2.0, transfer_s=0.5, feature_bytes=6.0, weight_bytes=5.0)
    row = one_f_one_b_as(stages)
    assert row.seconds == 33
    assert row.feature_bytes == (24, 18, 12, 6)
    assert row.weight_bytes == 10
    assert row.demand_bytes_per_s == (6, 3)


def test_forward_and_backward_at_once_ask_for_less_bandwidth_and_twice_the_memory():
    """That is what FBP-AS is chosen for."""
    stages = Stages(4, 8, 1.0, 2.0, feature_bytes=6.0)
    row = fbp_as(stages)
    assert row.seconds == one_f_one_b_as(stages).seconds
    assert row.feature_bytes == (48, 36, 24, 12)
    assert row.demand_bytes_per_s == (4, 4)
    assert max(row.demand_bytes_per_s) < max(one_f_one_b_as(stages).demand_bytes_per_s)


def test_the_table_has_two_schedules_for_each_kind_of_device():
    """What the exploration goes through."""
    stages = Stages(3, 8, 1.0, 2.0, feature_bytes=6.0, weight_bytes=5.0)
    features = {name: row(stages).feature_bytes for name, row in {**AS, **S}.items()}
    assert features == {
        "1F1B-AS": (18, 12, 6),
        "FBP-AS": (36, 24, 12),
        "1F1B-SNO": (18, 12, 6),
        "1F1B-SO": (36, 24, 12),
    }
    assert all(row(stages).weight_bytes == 10 for row in {**AS, **S}.values())
    assert (list(AS), list(S)) == (["1F1B-AS", "FBP-AS"], ["1F1B-SNO", "1F1B-SO"])
