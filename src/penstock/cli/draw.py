"""`penstock draw`: draw the timeline of one schedule, or of several."""

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

#: Fields of `Costs` that are per stage: v stages in the place of one take a v-th each.
_COSTS_PER_STAGE = (
    "forward",
    "backward",
    "input_grad",
    "weight_grad",
    "update",
    "forward_backward",
    "activation_bytes",
    "weight_bytes",
)
Against = Annotated[
    list[str] | None,
    typer.Option(
        help="Draw another schedule below, for the same model on the same number of ranks: "
        "with v stages per rank, each costs 1/v. Repeatable."
    ),
]


def draw(
    out: Annotated[
        Path | None,
        typer.Argument(
            help="Output file: .svg, .png, .html, .txt or .json (Perfetto); default: the terminal."
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
    """Draw the simulated timeline of a schedule with the given costs; with bytes, also the memory
    of each rank.

    Example: penstock draw --schedule 1f1b --stages 4 --micro-batches 8 --against zb-h1 out.html
    """
    from penstock.draw.draw import draw as draw_timelines
    from penstock.search.schedule_figures import schedule_for_ranks
    from penstock.simulate.simulate import simulate_schedule
    from penstock.simulate.weight_versions import with_versions
    from penstock.verify.verify import verify
    from penstock.weights.compatibility import rule_of

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
    costs = options.parse_costs(flags, "duplex")
    name = options.schedule_name_for_weights(schedule, csv, weights)
    first = options.resolve_schedule(name, stages, micro_batches, csv, option, costs)
    # --weights holds for the first schedule alone: the others have rules of their own.
    schedules: list[tuple[Schedule, str | None]] = [(first, weights)]
    for other_name in against or ():
        other = schedule_for_ranks(other_name, first.ranks, first.micro_batches)
        schedules.append((other, None))
    if not any(candidate.stream for candidate, _ in schedules):
        options.with_batches(first, batches)  # raises SettingError if --batches is set
    timelines = []
    for candidate, rule_name in schedules:
        verify(candidate, weights=rule_name)
        # Count weight versions in the whole schedule: a cut one may end before the pipeline is
        # full, and would show too few.
        stage_costs = _costs_for_stages(costs, first.stages, candidate.stages)
        stage_costs = with_versions(stage_costs, candidate, rule_of(candidate, rule_name))
        simulated = options.with_batches(candidate, batches) if candidate.stream else candidate
        timelines.append(simulate_schedule(simulated, stage_costs, recompute=recompute))
    if out is None:
        print(draw_timelines(timelines, width=options.columns(), colour=options.colour()))
        return
    draw_timelines(timelines, out)
    typer.echo(f"wrote {out}", err=True)


def _costs_for_stages(costs: Costs, stages: int, other_stages: int) -> Costs:
    """Scale costs for `stages` stages to the same model in `other_stages` stages.

    Costs that are given stage by stage stay as they are: there is no way to divide them.
    """
    if stages == other_stages:
        return costs
    share = stages / other_stages
    scaled: dict[str, Any] = {}
    for name in _COSTS_PER_STAGE:
        value = getattr(costs, name)
        if isinstance(value, int | float):
            scaled[name] = share * value
    return replace(costs, **scaled)
