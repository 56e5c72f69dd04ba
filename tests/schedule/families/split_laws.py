"""Properties of families with a split backward: soundness, time, gradients at runtime."""

from __future__ import annotations

from tests.schedule.families.laws import check_facts

from penstock.event import Timeline
from penstock.schedule.catalogue import schedule as plain_schedule
from penstock.schedule.catalogue import schedules
from penstock.schedule.op import Kind, Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.verify.verify import Report, verify


def check_split(schedule: Schedule) -> Report:
    """Sound, synchronous, its text reads back, and every stage's gradients add up in the order of
    the micro-batches.

    Returns:
        What `verify` found.
    """
    # Schedules that are generated from costs are in a catalogue of their own.
    if schedule.name in schedules():
        check_facts(schedule)
    report = verify(schedule)
    assert schedule.splits_backward
    assert report.staleness_max == (0,) * schedule.stages
    assert Schedule.parse(str(schedule)).programs == schedule.programs
    for stage in range(schedule.stages):
        order = [
            op.micro_batch
            for op in schedule.ops
            if op.stage == stage and op.kind in (Kind.B, Kind.W)
        ]
        assert order == [*range(schedule.micro_batches)]
    return report


def split_timeline(
    schedule: Schedule, f: float = 1, i: float = 1, w: float = 1, c: float = 0
) -> Timeline:
    """The timeline with f, i and w on every stage, and c for every message."""
    return simulate_schedule(schedule, Costs(forward=f, input_grad=i, weight_grad=w, transfer=c))


def longest_span(line: Timeline) -> float:
    """Seconds between the first op's start and the last op's end on the rank where they are most;
    updates left out.
    """
    spans: dict[int, list[float]] = {}
    for rank, op, start, end, *_ in line.compute:
        if op.kind is not Kind.U:
            spans.setdefault(rank, []).extend((start, end))
    return max(max(times) - min(times) for times in spans.values())


def check_gradients(split_schedule: Schedule) -> None:
    """Run on all ranks, as threads: loss and gradients are, to the bit, those of one stage with
    whole backwards.
    """
    import torch  # here: planning's other tests need none of it
    from tests.conformance.models import CASES, Case, lengths_of
    from tests.conformance.models import made as made_case
    from tests.conformance.reference import differences, gradients, layers_of

    from penstock.runtime.pipeline import Pipeline
    from penstock.zoo.catalogue import model as zoo_model

    small = CASES["gpt"]  # with more blocks: nine layers, enough for eight stages
    deep = Case(
        lambda: zoo_model("gpt", layers=6, width=16, heads=2, tokens=6, vocabulary=11, dropout=0.2),
        small.data,
        small.loss,
        whole=False,
    )

    def trained(schedule: Schedule) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model, x, y = made_case(
            deep, samples=split_schedule.micro_batches + 3
        )  # micro-batches of unequal size
        lengths = lengths_of(len(layers_of(model)), schedule.stages)
        pipe = Pipeline(
            model, loss=deep.loss, balance=lengths, schedule=schedule, executor="threads"
        )
        try:
            return pipe.train_batch(x, y), gradients(model)
        finally:
            pipe.close()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums are split by threads, which would change last bits
    try:
        (loss, ours), (plain_loss, plain) = (
            trained(split_schedule),
            trained(plain_schedule("gpipe", 1, split_schedule.micro_batches)),
        )
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(loss, plain_loss)
    assert differences(ours, plain) == []
