"""`penstock plan`: search the best pipeline for a profiled model on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.flags import flag_values, options
from penstock.cli.flags.model_flags import ModelFlags, with_model_flags
from penstock.cli.flags.options import (
    Json,
    MicroBatches,
    ScheduleName,
    Stages,
    Weights,
    WeightsOption,
)
from penstock.errors import SettingError
from penstock.text_table import table

if TYPE_CHECKING:
    from penstock.plan.plan import Plan
    from penstock.search.compare import PlannerResult


@with_model_flags()
def plan(
    profile: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROFILE|MODEL",
            help="A profile from `penstock profile`; for a mixed cluster, one per kind of device. "
            "Or a model, as for --model, which is profiled first.",
        ),
    ] = None,
    *,
    flags: ModelFlags,
    cluster: Annotated[
        str, typer.Option(help="local:N, a preset such as 4xV100-10GbE, or a YAML file.")
    ] = "local:2",
    batch: Annotated[
        int | None, typer.Option(help="Samples per batch; default: the profile's, or 64.")
    ] = None,
    planner: Annotated[
        str,
        typer.Option(
            help="auto, or a published planner: pipedream, dapple, bapipe, …; see "
            "`penstock list planners`.",
            autocompletion=options.complete_planners,
        ),
    ] = "auto",
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Run every planner and score all with one simulator."),
    ] = False,
    schedule: ScheduleName = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    max_replicas: Annotated[
        int | None, typer.Option(help="Most replicas of a stage; 1: no data parallelism.")
    ] = None,
    recompute: Annotated[
        str,
        typer.Option(
            help="Recompute policy: auto, never, except_last, always, or selective (some layers)."
        ),
    ] = "auto",
    memory_limit: Annotated[
        str | None, typer.Option(help="Memory limit per rank, such as '2 GiB'.")
    ] = None,
    asynchronous: Annotated[
        bool, typer.Option("--asynchronous", help="Search schedules without a flush as well.")
    ] = False,
    weights: Weights = None,
    weights_option: WeightsOption = None,
    budget: Annotated[
        float,
        typer.Option(
            help="Work of the search, as seconds of one core that is not busy: its evaluations follow from it."
        ),
    ] = 10.0,
    time_limit: Annotated[
        float | None, typer.Option(help="Hard limit on the seconds of the search; default 600.")
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(help="Devices that share a layer; default: every width of the profile."),
    ] = None,
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel",
            help="Whether they share what lies between as well.",
        ),
    ] = None,
    zero: Annotated[
        str, typer.Option(help="Level of ZeRO among replicas: 0, 1, 2, 3, or auto for all.")
    ] = "0",
    out: Annotated[Path | None, typer.Option(help="Write the plan to this JSON file.")] = None,
    json: Json = False,
) -> None:
    """Search the fastest plan that fits into memory, and compare it with the other candidates.
    Layer times are those of the profile. A model is profiled first: measured on this machine for a
    cluster local:N, estimated for the devices of any other cluster.

    Example: penstock plan profile.json --cluster local:4 --batch 128

    Example: penstock plan my_model:make_model --data my_data:load --cluster local:4 --out plan.json
    """
    from penstock.cli.profiles.plan_profiles import load_or_make_profiles
    from penstock.cluster.cluster import cluster as describe
    from penstock.draw.draw import draw
    from penstock.schedule.recompute import Recompute
    from penstock.search.catalogue import PLANNERS
    from penstock.search.catalogue import plan as search
    from penstock.search.compare import compare as run_all_planners
    from penstock.simulate.plan_costs import simulate_plan
    from penstock.store import check_writable, to_json

    if compare and planner != "auto":
        raise SettingError(f"--compare runs every planner: leave out --planner {planner}")
    if recompute not in ("auto", *Recompute):
        raise SettingError(
            f"--recompute must be auto, never, except_last, always or selective, not {recompute!r}"
        )
    PLANNERS.find(planner)
    if out is not None:
        check_writable(out)  # before the measurement and the search
    target = describe(cluster)
    costs, samples = load_or_make_profiles(profile or [], flags, cluster, batch)
    constraints: dict[str, Any] = {
        "schedules": None if schedule is None else [schedule],
        "stages": stages,
        "micro_batches": micro_batches,
        "max_replicas": max_replicas,
        "memory_limit": memory_limit,
        "recompute": recompute,
        "asynchronous": asynchronous,
        "weights": weights,
        "weights_options": flag_values.named_numbers("weights-option", weights_option),
        "budget_s": budget,
        "time_limit_s": time_limit,
        "tensor_parallel": tensor_parallel,
        "sequence_parallel": sequence_parallel,
        "zero": _zero_level(zero),
    }
    comparison: tuple[PlannerResult, ...] = ()
    if compare:
        comparison = run_all_planners(costs, target, samples, **constraints)
        best = _best_plan(comparison)
    else:
        best = search(costs, target, samples, planner=planner, **constraints)
    if out is not None:
        best.save(out)
        typer.echo(f"wrote {out}", err=True)
    if json:
        print(to_json(list(comparison)) if compare else to_json(best))
        return
    if compare:
        print(_comparison_table(comparison))
        print()
    print(best)
    timeline = simulate_plan(best, costs, target)
    print(draw(timeline, width=options.columns(), colour=options.colour()))


def _zero_level(text: str) -> int | None:
    """Return the level of ZeRO of a flag; None for all.

    Raises:
        SettingError: there is no such level.
    """
    if text not in ("auto", "0", "1", "2", "3"):
        raise SettingError(f"--zero must be 0, 1, 2, 3 or auto, not {text!r}")
    return None if text == "auto" else int(text)


def _best_plan(comparison: tuple[PlannerResult, ...]) -> Plan:
    """Return the plan of the first, fastest planner.

    Raises:
        PlanError: no planner has a plan.
    """
    from penstock.errors import PlanError

    best = comparison[0]
    if best.plan is None:
        refusals = {result.planner: result.refusal for result in comparison}
        reason = refusals.get("auto", best.refusal)
        raise PlanError(f"no planner has a plan. auto says: {reason}")
    return best.plan


def _comparison_table(comparison: tuple[PlannerResult, ...]) -> str:
    """Write the table of `--compare`, a row per planner."""
    from penstock.units import format_seconds

    best_step_s = comparison[0].step_s
    rows: list[tuple[str, ...]] = []
    for result in comparison:
        planned_in = format_seconds(result.seconds)
        if result.plan is None:
            refusal = result.refusal.splitlines()[0]
            rows.append((result.planner, *("",) * 8, planned_in, refusal))
        else:
            rows.append(_planner_row(result.planner, result.plan, best_step_s, planned_in))
    head = (
        "planner",
        "schedule",
        "stages",
        "replicas",
        "M",
        "recompute",
        "step",
        "",
        "peak memory",
        "planned in",
        "bound by; own objective",
    )
    return table(head, rows)


def _planner_row(planner: str, plan: Plan, best_step_s: float, planned_in: str) -> tuple[str, ...]:
    """Return the table row of a planner that has a plan."""
    from penstock.units import format_bytes, format_seconds

    candidate = plan.candidates[0]
    replicas = candidate.replicas
    step_s = plan.predicted.step_s
    remarks = candidate.why
    if plan.objective is not None:
        remarks = f"{remarks}; {plan.objective}"
    return (
        planner,
        plan.schedule_name,
        str(plan.stages),
        str(replicas) if isinstance(replicas, int) else ",".join(map(str, replicas)),
        str(plan.micro_batches),
        plan.recompute,
        format_seconds(step_s),
        f"{step_s / best_step_s:.2f}x" if best_step_s else "",
        format_bytes(max(plan.predicted.peak_memory)),
        planned_in,
        remarks,
    )
