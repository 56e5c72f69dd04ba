"""`penstock plan`: the best pipeline for a profiled model on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options
from penstock.cli.options import Json, MicroBatches, ScheduleName, Stages, Weights, WeightsOption
from penstock.errors import SettingError

if TYPE_CHECKING:
    from penstock.profile.paced import Profiles
    from penstock.search.compare import Compared


def plan(
    profile: Annotated[
        list[Path],
        typer.Argument(
            help="A profile from `penstock profile`; of a mixed cluster one for every kind of device."
        ),
    ],
    cluster: Annotated[
        str, typer.Option(help="local:N, a preset such as 4xV100-10GbE, or a YAML file.")
    ] = "local:2",
    batch: Annotated[
        int | None, typer.Option(help="Samples in a batch; by default the profile's.")
    ] = None,
    planner: Annotated[
        str, typer.Option(help="auto, or one of the literature's: pipedream, dapple, bapipe, …")
    ] = "auto",
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Ask every planner, and score all by the same simulator."),
    ] = False,
    schedule: ScheduleName = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    max_replicas: Annotated[
        int | None, typer.Option(help="Most copies of a stage; 1 for none.")
    ] = None,
    recompute: Annotated[
        str, typer.Option(help="auto, never, except_last, always, or selective: some layers.")
    ] = "auto",
    memory_limit: Annotated[
        str | None, typer.Option(help="Bytes that a rank may hold, such as '2 GiB'.")
    ] = None,
    asynchronous: Annotated[
        bool, typer.Option("--asynchronous", help="Weigh schedules without a flush too.")
    ] = False,
    weights: Weights = None,
    weights_option: WeightsOption = None,
    budget: Annotated[
        float, typer.Option(help="Seconds after which the search ends with the best so far.")
    ] = 10.0,
    out: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
    json: Json = False,
) -> None:
    """Find the fastest plan that fits, and say why it won. Layer times are those of the profile.

    Example: penstock plan profile.json --cluster local:4 --batch 128
    """
    from penstock.cluster.cluster import cluster as describe
    from penstock.draw.draw import draw
    from penstock.search.catalogue import PLANNERS
    from penstock.search.catalogue import plan as search
    from penstock.search.compare import compare as ask_all
    from penstock.simulate.plan_costs import simulate_plan
    from penstock.store import to_json

    if compare and planner != "auto":
        raise SettingError(f"--compare asks every planner: leave out --planner {planner}")
    if recompute not in ("auto", "never", "except_last", "always", "selective"):
        raise SettingError(
            f"--recompute is auto, never, except_last, always or selective, not {recompute!r}"
        )
    PLANNERS.find(planner)
    costs, samples = _profiles(profile)
    target = describe(cluster)
    asked: dict[str, Any] = {
        "schedules": None if schedule is None else [schedule],
        "stages": stages,
        "micro_batches": micro_batches,
        "max_replicas": max_replicas,
        "memory_limit": memory_limit,
        "recompute": recompute,
        "asynchronous": asynchronous,
        "weights": weights,
        "weights_options": options.numbers_named("weights-option", weights_option),
        "budget_s": budget,
    }
    size = samples if batch is None else batch
    every = ask_all(costs, target, size, **asked) if compare else ()
    found = _best(every) if compare else search(costs, target, size, planner=planner, **asked)
    if out is not None:
        found.save(out)
        typer.echo(f"wrote {out}", err=True)
    if json:
        print(to_json(list(every)) if compare else to_json(found))
        return
    if compare:
        print(_table(every))
        print()
    print(found)
    print(
        draw(simulate_plan(found, costs, target), width=options.columns(), colour=options.colour())
    )


def _profiles(paths: list[Path]) -> tuple[Profiles, int]:
    """One profile, or several by the name of their device; and the samples of the first one's
    batch.
    """
    from penstock.profile.profile import Profile

    found = [Profile.load(path) for path in paths]
    if len(found) == 1:
        return found[0], found[0].batch
    nameless = [str(path) for path, each in zip(paths, found, strict=True) if not each.device]
    if nameless:
        raise SettingError(
            f"{nameless[0]} does not say which device it is of: profile that model anew, or give one profile alone"
        )
    names = [each.device for each in found]
    if len(set(names)) < len(names):
        raise SettingError(f"two of the profiles are of the same device: {', '.join(names)}")
    return dict(zip(names, found, strict=True)), found[0].batch


def _best(every: tuple[Compared, ...]) -> Any:
    """The plan of the fastest.

    Raises:
        PlanError: no planner has one.
    """
    from penstock.errors import PlanError

    if every[0].plan is None:
        reason = next((each.refusal for each in every if each.planner == "auto"), every[0].refusal)
        raise PlanError(f"no planner has a plan. auto says: {reason}")
    return every[0].plan


def _table(every: tuple[Compared, ...]) -> str:
    """A row for each planner."""
    from penstock.units import format_bytes, format_seconds

    best = every[0].step_s
    rows = []
    for each in every:
        made = each.plan
        if made is None:
            rows.append(
                (
                    each.planner,
                    *("",) * 8,
                    format_seconds(each.seconds),
                    each.refusal.splitlines()[0],
                )
            )
            continue
        own = made.candidates[0]
        copies = (
            str(own.replicas) if isinstance(own.replicas, int) else ",".join(map(str, own.replicas))
        )
        rows.append(
            (
                each.planner,
                made.schedule_name,
                str(made.stages),
                copies,
                str(made.micro_batches),
                made.recompute,
                format_seconds(made.predicted.step_s),
                f"{made.predicted.step_s / best:.2f}x" if best else "",
                format_bytes(max(made.predicted.peak_memory)),
                format_seconds(each.seconds),
                own.why if made.objective is None else f"{own.why}; {made.objective}",
            )
        )
    head = (
        "planner",
        "schedule",
        "stages",
        "copies",
        "M",
        "recompute",
        "step",
        "",
        "peak memory",
        "planned in",
        "bound by; own objective",
    )
    return options.table(head, rows)
