"""`penstock simulate`: what a schedule would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import options
from penstock.cli.options import (
    Boundary,
    Bytes,
    CsvFile,
    Json,
    MicroBatches,
    Recompute,
    ScheduleName,
    ScheduleOption,
    Seconds,
    Stages,
)

if TYPE_CHECKING:
    from penstock.event import Timeline

Bandwidth = Annotated[
    str | None, typer.Option(help="Bytes per second of the links, with --boundary-bytes: 10GB, or per boundary.")
]
Links = Annotated[
    str, typer.Option(help="duplex: a link each way between two ranks; half-duplex: one for both ways; shared: one for all.")
]


def simulate(
    schedule: ScheduleName = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    csv: CsvFile = None,
    option: ScheduleOption = None,
    forward: Seconds = "1",
    backward: Seconds = None,
    input_grad: Seconds = None,
    weight_grad: Seconds = None,
    update: Seconds = None,
    pair: Seconds = None,
    evict: Seconds = None,
    transfer: Boundary = None,
    transfer_back: Boundary = None,
    latency: Boundary = None,
    bandwidth: Bandwidth = None,
    boundary_bytes: Bytes = None,
    links: Links = "duplex",
    activation_bytes: Bytes = None,
    input_bytes: Bytes = None,
    weight_bytes: Bytes = None,
    overlap: Annotated[bool, typer.Option(help="Transfers run beside compute, or a rank stands still while it sends.")] = True,
    recompute: Recompute = "never",
    draw: Annotated[bool, typer.Option("--draw", help="Draw the timeline too.")] = False,
    json: Json = False,
) -> None:
    """Simulate a schedule: makespan, bubble, busy shares, micro-batches in flight, memory.

    Example: penstock simulate --schedule 1f1b --stages 4 --micro-batches 8 --forward 1 --backward 2 --json
    """
    from penstock.simulate.simulate import simulate_schedule
    from penstock.verify.verify import verify

    flags = {"forward": forward, "backward": backward, "input_grad": input_grad, "weight_grad": weight_grad, "update": update,
             "pair": pair, "evict": evict, "transfer": transfer, "transfer_back": transfer_back, "latency": latency,
             "bandwidth": bandwidth, "boundary_bytes": boundary_bytes, "activation_bytes": activation_bytes,
             "input_bytes": input_bytes, "weight_bytes": weight_bytes}  # fmt: skip
    costs = options.costs_given(flags, links)
    made = options.the_schedule(schedule, stages, micro_batches, csv, option, costs)
    if csv is not None:  # what the catalogue makes is sound
        verify(made)
    timeline = simulate_schedule(made, costs, overlap=overlap, recompute=recompute)
    if json:
        options.print_json(options.timeline_facts(timeline))
        return
    if draw:
        from penstock.draw.draw import draw as draw_timeline

        print(draw_timeline(timeline, width=options.columns(), colour=options.colour()))
        return
    print(f"{made.name}: {made.stages} stages on {made.ranks} ranks, {made.micro_batches} micro-batches")
    _print_figures(timeline)


def _print_figures(timeline: Timeline) -> None:
    """The figures, for people."""
    from penstock.units import format_bytes, format_seconds

    whole = timeline.makespan or 1.0
    print(f"makespan        {timeline.makespan:g} s ({format_seconds(timeline.makespan)})")
    print(f"bubble ratio    {timeline.bubble_ratio:.2%} of all ranks' time; by stage span {timeline.span_bubble_ratio:.2%}")
    print(f"busy per rank   {options.row([f'{seconds / whole:.0%}' for seconds in timeline.busy])}")
    print(f"peak in flight  {options.row(timeline.peak_in_flight)}")
    if timeline.peak_on_rank != timeline.peak_in_flight:
        print(f"  on each rank  {options.row(timeline.peak_on_rank)}")
    if timeline.peak_memory is not None and timeline.memory_holders is not None:
        print(f"peak memory     {options.row(map(format_bytes, timeline.peak_memory), ', ')}")
        fullest = max(range(timeline.ranks), key=timeline.peak_memory.__getitem__)
        held = sorted(timeline.memory_holders[fullest].items(), key=lambda item: -item[1])
        words = " + ".join(f"{name} {format_bytes(count)}" for name, count in held if count)
        print(f"  of rank {fullest}     {words}")
