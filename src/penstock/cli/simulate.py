"""`penstock simulate`: what a schedule would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options
from penstock.cli.options import (
    Batches,
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
    Weights,
)

if TYPE_CHECKING:
    from penstock.event import Timeline

Bandwidth = Annotated[
    str | None,
    typer.Option(
        help="Bytes per second of the links, with --boundary-bytes: 10GB, or per boundary."
    ),
]
Links = Annotated[
    str,
    typer.Option(
        help="duplex: a link each way between two ranks; half-duplex: one for both ways; shared: one for all."
    ),
]

Again = Annotated[
    str | None,
    typer.Option(
        help="With --recompute selective: seconds of the forwards that run again. All, if not given."
    ),
]
KeptBytes = Annotated[
    str | None,
    typer.Option(
        help="With --recompute selective: of the activation bytes, those that are kept. The input, if not given."
    ),
]
AgainBytes = Annotated[
    str | None,
    typer.Option(
        help="With --recompute selective: the most that comes back at once. All, if not given."
    ),
]


def simulate(
    schedule: ScheduleName = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    csv: CsvFile = None,
    option: ScheduleOption = None,
    batches: Batches = None,
    weights: Weights = None,
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
    again: Again = None,
    kept_bytes: KeptBytes = None,
    again_bytes: AgainBytes = None,
    overlap: Annotated[
        bool,
        typer.Option(help="Transfers run beside compute, or a rank stands still while it sends."),
    ] = True,
    recompute: Recompute = "never",
    draw: Annotated[bool, typer.Option("--draw", help="Draw the timeline too.")] = False,
    json: Json = False,
) -> None:
    """Simulate a schedule: makespan, bubble, busy shares, micro-batches in flight, memory. Of one
    that goes on from batch to batch, also what a batch takes once it is full, and which versions of
    the weights it keeps.

    Example: penstock simulate --schedule 1f1b --stages 4 --micro-batches 8 --forward 1 --backward 2
    --json
    """
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
        "pair": pair,
        "evict": evict,
        "transfer": transfer,
        "transfer_back": transfer_back,
        "latency": latency,
        "bandwidth": bandwidth,
        "boundary_bytes": boundary_bytes,
        "activation_bytes": activation_bytes,
        "input_bytes": input_bytes,
        "weight_bytes": weight_bytes,
        "again": again,
        "kept_bytes": kept_bytes,
        "again_bytes": again_bytes,
    }
    costs = options.costs_given(flags, links)
    name = options.for_weights(schedule, csv, weights)
    whole = options.the_schedule(name, stages, micro_batches, csv, option, costs)
    if csv is not None:  # what the catalogue makes is sound
        verify(whole)
    made, rule = options.shown(whole, batches), rule_of(whole, weights)
    costs = with_versions(costs, whole, rule)
    timeline = simulate_schedule(made, costs, overlap=overlap, recompute=recompute)
    stream = options.stream_facts(whole, rule, costs, recompute, overlap)
    if json:
        options.print_json({**options.timeline_facts(timeline), "batches": made.batches, **stream})
        return
    if draw:
        from penstock.draw.draw import draw as draw_timeline

        print(draw_timeline(timeline, width=options.columns(), colour=options.colour()))
        return
    parts = f"{made.micro_batches} micro-batch{'es' * (made.micro_batches != 1)}"
    print(
        f"{made.name}: {made.stages} stages on {made.ranks} ranks, {parts}"
        + (f" a batch, {made.batches} batches shown" if made.stream else "")
    )
    _print_figures(timeline)
    if made.stream:
        _print_stream(stream)


def _print_figures(timeline: Timeline) -> None:
    """The figures, for people."""
    from penstock.units import format_bytes, format_seconds

    whole = timeline.makespan or 1.0
    print(f"makespan        {timeline.makespan:g} s ({format_seconds(timeline.makespan)})")
    print(
        f"bubble ratio    {timeline.bubble_ratio:.2%} of all ranks' time; by stage span {timeline.span_bubble_ratio:.2%}"
    )
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


def _print_stream(facts: dict[str, Any]) -> None:
    """What a stream does in the long run, for people."""
    from penstock.units import format_seconds

    seconds = facts["seconds_per_batch"]
    if seconds is None:
        print("once full       not known: the schedule does not repeat itself from batch to batch")
    else:
        print(
            f"once full       {seconds:g} s a batch ({format_seconds(seconds)}), bubble ratio {facts['steady_bubble_ratio']:.2%}"
        )
    print(f"weights         rule {facts['weights']}, per stage")
    print(f"  staleness     at most {options.row(facts['staleness_max'])} updates")
    more = f", and {facts['more_weights']:g} more of their size" if facts["more_weights"] else ""
    print(f"  versions      {options.row(facts['versions'])}{more}")
