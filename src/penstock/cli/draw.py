"""`penstock draw`: draw the timeline of a plan, a run, or one or several schedules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.draw_files import refuse_to_replace_plan, timelines_of_file
from penstock.cli.flags import flag_values, options
from penstock.cli.flags.options import (
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
from penstock.errors import SettingError

if TYPE_CHECKING:
    from penstock.event import Timeline
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
        metavar="NAME",
        help="Draw another schedule below, for the same model on the same number of ranks: "
        "with v stages per rank, each costs 1/v. Repeatable.",
    ),
]


def draw(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="PLAN|RUN",
            help="A plan (plan.json) or the folder of a run (runs/NAME) to draw. With the flags of "
            "a schedule this is the output file.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUTPUT",
            help="Output file: .svg, .png, .html, .txt or .json (Perfetto); default: the terminal.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Output file, in place of the argument.")
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Draw a plan with the times that it predicts: the profile that it was made with. "
            "Repeatable, one per kind of device.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="With --profile: the cluster of the plan; default: the one it names."),
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
    """Draw a plan; a run, its measured timeline below the predicted one; or the simulated timeline
    of a schedule with the given costs; with bytes, also the memory of each rank.

    Example: penstock draw plan.json plan.svg --profile profile.json

    Example: penstock draw runs/vgg11_bn-digits timelines.html

    Example: penstock draw --schedule 1f1b --stages 4 --micro-batches 8 --against zb-h1 out.html
    """
    from penstock.draw.draw import draw as draw_timelines

    costs = {
        "forward": forward,
        "backward": backward,
        "input_grad": input_grad,
        "weight_grad": weight_grad,
        "update": update,
        "transfer": transfer,
        "activation_bytes": activation_bytes,
        "weight_bytes": weight_bytes,
    }
    names_schedule = schedule is not None or csv is not None or weights is not None
    files = [path for path in (source, output, out) if path is not None]
    if source is not None and not names_schedule:
        options.refuse_schedule_as_file(source, "draw")
        schedule_flags = {
            "stages": stages,
            "micro_batches": micro_batches,
            "against": against,
            "option": option,
            "batches": batches,
            "recompute": None if recompute == "never" else recompute,
            **costs,
            "forward": None if forward == "1" else forward,
        }
        options.refuse_flags(
            f"describes a schedule, and {source} has its own: leave it out, or name a schedule by "
            "--schedule or --csv",
            **schedule_flags,
        )
        target = _output(files[1:])
        if target == source:
            raise SettingError(f"{target} would be replaced by its drawing: name another output")
        timelines = timelines_of_file(source, profile or [], cluster)
    else:
        if profile or cluster:
            raise SettingError("--profile and --cluster belong to a plan: penstock draw plan.json")
        if not names_schedule:
            raise SettingError(
                "name what to draw: penstock draw plan.json, penstock draw runs/NAME, or "
                "penstock draw --schedule 1f1b --stages 4 --micro-batches 8"
            )
        target = _output(files)
        if target is not None:
            refuse_to_replace_plan(target)
        parsed = flag_values.parse_costs(costs, "duplex")
        name = options.schedule_name_for_weights(schedule, csv, weights)
        first = options.resolve_schedule(name, stages, micro_batches, csv, option, parsed)
        timelines = _schedule_timelines(first, parsed, against or [], weights, batches, recompute)
    if target is None:
        print(draw_timelines(timelines, width=options.columns(), colour=options.colour()))
        return
    draw_timelines(timelines, target)
    typer.echo(f"wrote {target}", err=True)


def _output(words: list[Path]) -> Path | None:
    """Return the output file; None for the terminal.

    Raises:
        SettingError: there are several.
    """
    if len(words) > 1:
        raise SettingError(f"{len(words)} output files: {', '.join(map(str, words))}. Name one")
    return words[0] if words else None


def _schedule_timelines(
    first: Schedule,
    costs: Costs,
    against: list[str],
    weights: str | None,
    batches: int | None,
    recompute: str,
) -> list[Timeline]:
    """Return the simulated timelines of a schedule and of those to draw below it.

    Args:
        first: that the flags name.
        costs: of its stages.
        against: names of the others, for the same model on the same number of ranks.
        weights: weight rule of the first; the others have rules of their own.
        batches: of asynchronous schedules to show.
        recompute: policy.

    Raises:
        ScheduleError: a schedule is unsound.
        SettingError: `batches` is given, and no schedule is asynchronous.
    """
    from penstock.search.schedule_figures import schedule_for_ranks
    from penstock.search.schedules import schedule
    from penstock.simulate.simulate import simulate_schedule
    from penstock.simulate.weight_versions import with_versions
    from penstock.verify.verify import verify
    from penstock.weights.compatibility import rule_of

    schedules: list[tuple[Schedule, str | None]] = [(first, weights)]
    for other_name in against:
        if options.needs_costs(other_name):
            ranks, stage_costs = first.ranks, _costs_for_stages(costs, first.stages, first.ranks)
            other = schedule(other_name, ranks, first.micro_batches, costs=stage_costs)
        else:
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
    return timelines


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
