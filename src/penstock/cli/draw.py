"""`penstock draw`: a picture of a schedule, or of several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options
from penstock.cli.options import (
    Batches,
    Boundary,
    Bytes,
    CsvFile,
    MicroBatches,
    Recompute,
    ScheduleName,
    ScheduleOption,
    Seconds,
    Stages,
    Weights,
)

if TYPE_CHECKING:
    from penstock.schedule.op import Schedule
    from penstock.simulate.costs import Costs

#: Costs of a stage as a whole: what v stages in its place share.
_OF_A_STAGE = (
    "forward",
    "backward",
    "input_grad",
    "weight_grad",
    "update",
    "pair",
    "activation_bytes",
    "weight_bytes",
)
Against = Annotated[
    list[str] | None,
    typer.Option(
        help="Another schedule below it, for the same model on as many ranks: where it puts v stages on one, each costs "
        "a v-th. Again for more."
    ),
]


def draw(
    out: Annotated[
        Path | None,
        typer.Argument(
            help="Where to: .svg, .png, .html, .txt or .json (Perfetto). Without: here."
        ),
    ] = None,
    schedule: ScheduleName = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    against: Against = None,
    csv: CsvFile = None,
    option: ScheduleOption = None,
    batches: Batches = None,
    weights: Weights = None,
    forward: Seconds = "1",
    backward: Seconds = None,
    input_grad: Seconds = None,
    weight_grad: Seconds = None,
    update: Seconds = None,
    transfer: Boundary = None,
    activation_bytes: Bytes = None,
    weight_bytes: Bytes = None,
    recompute: Recompute = "never",
) -> None:
    """Draw a schedule as it runs with given times; with bytes, also what the ranks hold.

    Example: penstock draw --schedule 1f1b --stages 4 --micro-batches 8 --against zb-h1 out.html
    """
    from penstock.cli.comparison import fitted
    from penstock.draw.draw import draw as draw_timelines
    from penstock.simulate.simulate import simulate_schedule
    from penstock.simulate.versions import with_versions
    from penstock.verify.verify import verify
    from penstock.weights.choice import rule_of

    flags = {
        "forward": forward,
        "backward": backward,
        "input_grad": input_grad,
        "weight_grad": weight_grad,
        "update": update,
        "transfer": transfer,
        "activation_bytes": activation_bytes,
        "weight_bytes": weight_bytes,
    }
    costs = options.costs_given(flags, "duplex")
    name = options.for_weights(schedule, csv, weights)
    made = options.the_schedule(name, stages, micro_batches, csv, option, costs)
    all_made = [made, *(fitted(name, made.ranks, made.micro_batches) for name in against or ())]
    if not any(each.stream for each in all_made):
        options.shown(made, batches)  # refuses the number
    timelines = []
    for each, asked in zip(all_made, [weights, *[None] * len(all_made)], strict=False):
        verify(each, weights=asked)
        # Of the whole schedule: how many versions a stream keeps shows only where it is full.
        own = with_versions(_shared(costs, made, each), each, rule_of(each, asked))
        cut = options.shown(each, batches) if each.stream else each
        timelines.append(simulate_schedule(cut, own, recompute=recompute))
    if out is None:
        print(draw_timelines(timelines, width=options.columns(), colour=options.colour()))
        return
    draw_timelines(timelines, out)
    typer.echo(f"wrote {out}", err=True)


def _shared(costs: Costs, first: Schedule, other: Schedule) -> Costs:
    """The first schedule's costs for the same model in another number of stages; those given per
    stage cannot be shared out.
    """
    share = first.stages / other.stages
    parts: dict[str, Any] = {
        name: share * value
        for name in _OF_A_STAGE
        if isinstance(value := getattr(costs, name), int | float)
    }
    return replace(costs, **parts) if share != 1 else costs
