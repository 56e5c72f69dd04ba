"""`penstock plan`: the best pipeline for a profiled model on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options
from penstock.cli.options import Json, MicroBatches, ScheduleName, Stages, Weights, WeightsOption
from penstock.errors import SettingError


def plan(
    profile: Annotated[Path, typer.Argument(help="A profile from `penstock profile`.")],
    cluster: Annotated[str, typer.Option(help="local:N, a preset such as 4xV100-10GbE, or a YAML file.")] = "local:2",
    batch: Annotated[int | None, typer.Option(help="Samples in a batch; by default the profile's.")] = None,
    schedule: ScheduleName = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    recompute: Annotated[str, typer.Option(help="auto, never, except_last or always.")] = "auto",
    memory_limit: Annotated[str | None, typer.Option(help="Bytes that a rank may hold, such as '2 GiB'.")] = None,
    asynchronous: Annotated[bool, typer.Option("--asynchronous", help="Weigh schedules without a flush too.")] = False,
    weights: Weights = None,
    weights_option: WeightsOption = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
    json: Json = False,
) -> None:
    """Find the fastest plan that fits, and say why it won. Layer times are those of the profile.

    Example: penstock plan profile.json --cluster local:4 --batch 128
    """
    from penstock.cluster.cluster import cluster as describe
    from penstock.draw.draw import draw
    from penstock.profile.profile import Profile
    from penstock.search.catalogue import plan as search
    from penstock.simulate.plan_costs import simulate_plan
    from penstock.store import to_json

    if recompute not in ("auto", "never", "except_last", "always"):
        raise SettingError(f"--recompute is auto, never, except_last or always, not {recompute!r}")
    costs, target = Profile.load(profile), describe(cluster)
    found = search(costs, target, batch or costs.batch, schedules=None if schedule is None else [schedule], stages=stages,
                   micro_batches=micro_batches, memory_limit=memory_limit, recompute=recompute,  # type: ignore[arg-type]
                   asynchronous=asynchronous, weights=weights,
                   weights_options=options.numbers_named("weights-option", weights_option))  # fmt: skip
    if out is not None:
        found.save(out)
        typer.echo(f"wrote {out}", err=True)
    if json:
        print(to_json(found))
        return
    print(found)
    print(draw(simulate_plan(found, costs, target), width=options.columns(), colour=options.colour()))
