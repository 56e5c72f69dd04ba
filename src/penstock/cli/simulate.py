"""`penstock simulate`: simulate a schedule and print its time and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.flags import flag_values, options
from penstock.cli.flags.options import (
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
from penstock.text_table import row

if TYPE_CHECKING:
    from penstock.event import Timeline

Bandwidth = Annotated[
    str | None,
    typer.Option(
        help="Bytes per second of the links, with --boundary-bytes: 10GB, or one value per boundary."
    ),
]
Links = Annotated[
    str,
    typer.Option(
        help="duplex: one link per direction between two ranks; half-duplex: one for both "
        "directions; shared: one for all ranks."
    ),
]

RecomputeSeconds = Annotated[
    str | None,
    typer.Option(
        help="With --recompute selective: seconds of the recomputed forwards; default: all forwards."
    ),
]
SavedBytes = Annotated[
    str | None,
    typer.Option(
        help="With --recompute selective: activation bytes saved for the backward; "
        "default: the stage's input."
    ),
]
RecomputePeakBytes = Annotated[
    str | None,
    typer.Option(
        help="With --recompute selective: largest number of bytes recomputed at once; default: all."
    ),
]

Deprecated = Annotated[str | None, typer.Option(hidden=True)]

#: Old names of options, with the new ones.
_RENAMED = {
    "pair": "forward_backward",
    "evict": "offload",
    "again": "recompute_seconds",
    "kept_bytes": "saved_bytes",
    "again_bytes": "recompute_peak_bytes",
}


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
    forward_backward: Seconds = None,
    offload: Seconds = None,
    transfer: Boundary = None,
    transfer_back: Boundary = None,
    latency: Boundary = None,
    bandwidth: Bandwidth = None,
    boundary_bytes: Bytes = None,
    links: Links = "duplex",
    activation_bytes: Bytes = None,
    input_bytes: Bytes = None,
    weight_bytes: Bytes = None,
    recompute_seconds: RecomputeSeconds = None,
    saved_bytes: SavedBytes = None,
    recompute_peak_bytes: RecomputePeakBytes = None,
    pair: Deprecated = None,
    evict: Deprecated = None,
    again: Deprecated = None,
    kept_bytes: Deprecated = None,
    again_bytes: Deprecated = None,
    overlap: Annotated[
        bool,
        typer.Option(help="Overlap transfers with compute, or block the rank while it sends."),
    ] = True,
    recompute: Recompute = "never",
    draw: Annotated[
        bool, typer.Option("--draw", help="Draw the timeline instead of printing figures.")
    ] = False,
    json: Json = False,
) -> None:
    """Simulate a schedule: makespan, bubble ratio, busy time, micro-batches in flight, memory. For
    an asynchronous schedule, also the steady-state time per batch and the weight versions it keeps.

    Example: penstock simulate --schedule 1f1b --stages 4 --micro-batches 8 --forward 1 --backward 2
    --json
    """
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
        "forward_backward": forward_backward,
        "offload": offload,
        "transfer": transfer,
        "transfer_back": transfer_back,
        "latency": latency,
        "bandwidth": bandwidth,
        "boundary_bytes": boundary_bytes,
        "activation_bytes": activation_bytes,
        "input_bytes": input_bytes,
        "weight_bytes": weight_bytes,
        "recompute_seconds": recompute_seconds,
        "saved_bytes": saved_bytes,
        "recompute_peak_bytes": recompute_peak_bytes,
    }
    old_flags = {
        "pair": pair,
        "evict": evict,
        "again": again,
        "kept_bytes": kept_bytes,
        "again_bytes": again_bytes,
    }
    costs = flag_values.parse_costs(options.with_current_flags(flags, old_flags, _RENAMED), links)
    name = options.schedule_name_for_weights(schedule, csv, weights)
    whole = options.resolve_schedule(name, stages, micro_batches, csv, option, costs)
    if csv is not None:  # schedules of the catalogue are sound by construction
        verify(whole)
    simulated = options.with_batches(whole, batches)
    # Weight versions and the steady state are those of the whole schedule: one cut to --batches
    # may end before the pipeline is full.
    rule = rule_of(whole, weights)
    costs = with_versions(costs, whole, rule)
    timeline = simulate_schedule(simulated, costs, overlap=overlap, recompute=recompute)
    stream = options.stream_facts(whole, rule, costs, recompute, overlap)
    if json:
        facts = options.timeline_facts(timeline)
        options.print_json({**facts, "batches": simulated.batches, **stream})
        return
    if draw:
        from penstock.draw.draw import draw as draw_timeline

        print(draw_timeline(timeline, width=options.columns(), colour=options.colour()))
        return
    print(options.schedule_summary(simulated, ": "))
    _print_figures(timeline)
    if simulated.stream:
        _print_stream(stream)


def _print_figures(timeline: Timeline) -> None:
    """Print the figures of a simulated timeline."""
    from penstock.draw.facts import busy_shares
    from penstock.units import format_bytes, format_seconds

    print(f"makespan        {timeline.makespan:g} s ({format_seconds(timeline.makespan)})")
    print(
        f"bubble ratio    {timeline.bubble_ratio:.2%} of all ranks' time; "
        f"by stage span {timeline.span_bubble_ratio:.2%}"
    )
    print(f"busy per rank   {row(f'{share:.0%}' for share in busy_shares(timeline))}")
    print(f"peak in flight  {row(timeline.peak_in_flight)}")
    if timeline.peak_on_rank != timeline.peak_in_flight:
        print(f"  on each rank  {row(timeline.peak_on_rank)}")
    if timeline.peak_memory is not None and timeline.memory_holders is not None:
        print(f"peak memory     {row(map(format_bytes, timeline.peak_memory), ', ')}")
        highest = max(range(timeline.ranks), key=timeline.peak_memory.__getitem__)
        holders = timeline.memory_holders[highest]
        largest_first = sorted(holders.items(), key=lambda item: -item[1])
        parts = [f"{name} {format_bytes(count)}" for name, count in largest_first if count]
        print(f"  of rank {highest}     {' + '.join(parts)}")


def _print_stream(facts: dict[str, Any]) -> None:
    """Print the steady state and the weight versions of an asynchronous schedule."""
    from penstock.units import format_seconds

    seconds = facts["seconds_per_batch"]
    if seconds is None:
        print("steady state    unknown: the schedule is not periodic")
    else:
        print(
            f"steady state    {seconds:g} s per batch ({format_seconds(seconds)}), "
            f"bubble ratio {facts['steady_bubble_ratio']:.2%}"
        )
    print(f"weights         rule {facts['weights']}, per stage")
    print(f"  staleness     at most {row(facts['staleness_max'])} updates")
    extra = facts["more_weights"]
    extra_text = f", plus extra state of {extra:g} times the weights" if extra else ""
    print(f"  versions      {row(facts['versions'])}{extra_text}")
