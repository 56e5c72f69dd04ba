"""`penstock simulate`: what a schedule would cost."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli import options
from penstock.cli.options import Boundary, CsvFile, Json, MicroBatches, Recompute, ScheduleName, Seconds, Stages


def simulate(
    schedule: ScheduleName = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    csv: CsvFile = None,
    forward: Seconds = "1",
    backward: Seconds = None,
    input_grad: Seconds = None,
    weight_grad: Seconds = None,
    update: Seconds = None,
    transfer: Boundary = None,
    overlap: Annotated[bool, typer.Option(help="Transfers run beside compute, or a rank stands still while it sends.")] = True,
    recompute: Recompute = "never",
    draw: Annotated[bool, typer.Option("--draw", help="Draw the timeline too.")] = False,
    json: Json = False,
) -> None:
    """Simulate a schedule: makespan, bubble, busy shares, micro-batches in flight.

    Example: penstock simulate --schedule 1f1b --stages 4 --micro-batches 8 --forward 1 --backward 2 --json
    """
    from penstock.simulate.simulate import simulate_schedule
    from penstock.units import format_seconds
    from penstock.verify.verify import verify

    made = options.the_schedule(schedule, stages, micro_batches, csv)
    verify(made)
    costs = options.the_costs(forward, backward, input_grad, weight_grad, update, transfer)
    timeline = simulate_schedule(made, costs, overlap=overlap, recompute=recompute)
    if json:
        options.print_json(options.timeline_facts(timeline))
        return
    if draw:
        from penstock.draw.draw import draw as draw_timeline

        print(draw_timeline(timeline, width=options.columns(), colour=options.colour()))
        return
    print(f"{made.name}: {made.stages} stages on {made.ranks} ranks, {made.micro_batches} micro-batches")
    print(f"makespan        {timeline.makespan:g} s ({format_seconds(timeline.makespan)})")
    print(f"bubble ratio    {timeline.bubble_ratio:.2%} of all ranks' time; by stage span {timeline.span_bubble_ratio:.2%}")
    print(f"busy per rank   {' '.join(f'{seconds / timeline.makespan:.0%}' for seconds in timeline.busy)}")
    print(f"peak in flight  {' '.join(map(str, timeline.peak_in_flight))}")
