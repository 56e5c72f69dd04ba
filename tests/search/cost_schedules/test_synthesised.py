"""`synthesised` by name."""

import copy

import pytest
from tests.conformance.models import CASES, lengths_of, made
from tests.conformance.reference import (
    PlainTraining,
    differences,
    gradients,
    in_order_of,
    layers_of,
)

from penstock.errors import ScheduleError
from penstock.runtime.pipeline import Pipeline
from penstock.search.schedules import schedule, schedules
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.verify.verify import verify

COSTS = Costs(forward=[1, 3, 1, 2], transfer=0.25)


def test_it_is_found_by_name_and_takes_costs():
    """The list of schedules must say that this one needs costs."""
    assert schedules()["synthesised"].needs_costs
    example = schedule("synthesised", costs=COSTS, micro_batches=6, memory_limit=3, max_rounds=2)
    assert example.name == "synthesised"
    assert max(verify(example).peak_on_rank) <= 3


def test_the_schedule_tells_its_makespan_bound_and_gap():
    """A schedule on its own says how far it may be from the best."""
    example = schedule("synthesised", costs=COSTS, micro_batches=6, max_rounds=2)
    facts = dict(example.options)
    assert facts["makespan"] == simulate_schedule(example, COSTS).makespan
    assert facts["lower_bound"] <= facts["makespan"]
    assert facts["gap"] == pytest.approx(facts["makespan"] / facts["lower_bound"] - 1)
    assert isinstance(facts["proved"], bool)


def test_options_it_does_not_know_are_refused():
    """A misspelt setting must not be ignored."""
    with pytest.raises(
        ScheduleError, match="synthesised does not take memory: it takes memory_limit, placement"
    ):
        schedule("synthesised", costs=COSTS, micro_batches=6, memory=3)


@pytest.mark.parametrize("placement", ["linear", "interleaved", "v", "bidirectional"])
def test_gradients_are_those_of_plain_training_to_the_bit(placement):
    """It is a program like any other: it runs. Whole backwards and halves, several stages on a
    rank, copies of them.
    """
    case = CASES["gpt"]
    model, x, y = made(case)
    example = schedule(
        "synthesised",
        costs=COSTS,
        micro_batches=6,
        placement=placement,
        memory_limit=4,
        max_rounds=2,
    )
    _, parts = PlainTraining(copy.deepcopy(model), case.loss).backward_in_parts(x, y, 6)
    lengths = lengths_of(len(layers_of(model)), 4)
    Pipeline(
        model, loss=case.loss, balance=lengths, schedule=example, executor="threads"
    ).train_batch(x, y)
    assert differences(gradients(model), in_order_of(example, lengths, model, parts)) == []
