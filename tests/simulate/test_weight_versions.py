"""Memory of weight versions in streams."""

import numpy as np
import pytest

from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import peak_memory, simulate_schedule
from penstock.simulate.sweep import simulate_many
from penstock.simulate.weight_versions import versions_per_stage, with_versions
from penstock.weights.catalogue import weight_rule

BYTES = Costs(
    forward=1, weight_bytes=100, gradient_bytes=25, optimizer_bytes=25, activation_bytes=1
)


def test_every_version_that_stash_keeps_is_counted():
    """Weights are 50 of the 100 bytes; stage s keeps p - s versions of them and as many
    micro-batches.
    """
    case_schedule = schedule("pipedream", 3, 1)
    assert simulate_schedule(case_schedule, BYTES).peak_memory == (
        50 + 150 + 3,
        50 + 100 + 2,
        50 + 50 + 1,
    )
    assert peak_memory(case_schedule, BYTES) == (203, 152, 101)


def test_a_synchronous_schedule_keeps_one():
    """All of its ops read the same weights."""
    case_schedule = schedule("1f1b", 3, 3)
    assert versions_per_stage(case_schedule) == (1, 1, 1)
    assert with_versions(BYTES, case_schedule, weight_rule("flush")) is BYTES
    assert peak_memory(case_schedule, BYTES) == (103, 102, 101)
    seconds = Costs(forward=1)
    assert with_versions(seconds, schedule("pipedream", 3, 1), weight_rule("stash")) is seconds


def test_versions_that_are_given_are_believed():
    """Explicit numbers of versions take precedence over the rule's."""
    costs = Costs(forward=1, weight_bytes=100, weight_versions=[2, 2, 2])
    assert simulate_schedule(schedule("pipedream", 3, 1), costs).peak_memory == (200, 200, 200)


@pytest.mark.parametrize(
    ("rule", "held"), [("none", (1, 1, 1)), ("vertical-sync", (3, 3, 3)), ("pipemare", (3, 3, 3))]
)
def test_another_rule_keeps_others(rule, held):
    """Vertical sync p on every stage; PipeMare one, its corrections and a working copy."""
    case_schedule = schedule("pipedream", 3, 1)
    assert versions_per_stage(case_schedule, weight_rule(rule)) == held
    memory = simulate_schedule(
        case_schedule, with_versions(BYTES, case_schedule, weight_rule(rule))
    ).peak_memory
    assert memory == tuple(50 + 50 * count + 3 - stage for stage, count in enumerate(held))


def test_a_stretch_that_is_too_short_to_be_full_is_held_for_the_whole_stream():
    """Else a plan would promise memory that a run of more batches does not keep to."""
    assert versions_per_stage(schedule("pipedream", 8, 1, batches=12)) == (8, 7, 6, 5, 4, 3, 2, 1)


def test_copies_of_the_weights_that_take_turns_have_an_optimizer_state_each():
    """AvgPipe with 2: two versions, the reference and its sum, and twice the optimizer's 25 bytes."""
    case_schedule = schedule("avgpipe", 2, 4)
    assert peak_memory(case_schedule, BYTES)[0] - 25 - 2 * 25 - 4 * 50 == max(
        simulate_schedule(case_schedule, BYTES).peak_on_rank
    )


def test_many_costs_at_once_count_the_same():
    """`simulate_many` and `simulate_schedule` agree."""
    for name, options in (("pipedream", {}), ("avgpipe", {"pipelines": 3})):
        case_schedule = schedule(name, 2, 4, **options)
        alone = simulate_schedule(case_schedule, BYTES).peak_memory
        assert (
            simulate_many(case_schedule, [BYTES, BYTES]).peak_memory.tolist() == [list(alone)] * 2
        )
        arrays = {
            "forward": np.ones(2),
            "weight_bytes": [100.0, 100.0],
            "gradient_bytes": 25.0,
            "optimizer_bytes": 25.0,
            "activation_bytes": 1.0,
        }
        assert simulate_many(case_schedule, arrays).peak_memory.tolist() == [list(alone)] * 2


def test_an_asynchronous_schedule_of_one_s_own_without_a_stream_is_left_alone():
    """Nothing is known of how it goes on."""
    case_schedule = Schedule.parse("0F0 0B0 0U1 0F1 0B1 0U2", synchronous=False)
    assert versions_per_stage(case_schedule) == (1,)
    assert simulate_schedule(case_schedule, BYTES).peak_memory == (101,)
