"""`penstock draw`: a picture of a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options
from penstock.cli.options import Boundary, CsvFile, MicroBatches, Recompute, ScheduleName, Seconds, Stages


def draw(
    out: Annotated[Path | None, typer.Argument(help="Where to: .svg, .html, .txt or .json (Perfetto). Without: here.")] = None,
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
    recompute: Recompute = "never",
) -> None:
    """Draw a schedule as it runs with given times.

    Example: penstock draw --schedule 1f1b --stages 4 --micro-batches 8 out.svg
    """
    from penstock.draw.draw import draw as draw_timeline
    from penstock.simulate.simulate import simulate_schedule
    from penstock.verify.verify import verify

    made = options.the_schedule(schedule, stages, micro_batches, csv)
    verify(made)
    costs = options.the_costs(forward, backward, input_grad, weight_grad, update, transfer)
    timeline = simulate_schedule(made, costs, recompute=recompute)
    if out is None:
        print(draw_timeline(timeline, width=options.columns(), colour=options.colour()))
        return
    draw_timeline(timeline, out)
    typer.echo(f"wrote {out}", err=True)
