"""`penstock study`: run experiments over many runs and report their conclusions."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.flags.options import Json
from penstock.cli.studies import study_convergence, study_grid
from penstock.errors import SettingError

#: Word in place of a study's name: install other libraries.
INSTALL = "install"


def study(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A study's name, or a YAML file with a grid of cells; `install` installs other "
            "libraries. Without it: the list of studies."
        ),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Argument(metavar="LIBRARY", help="With `install`: libraries; default: all."),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="small: minutes on two cores; full: the paper's sizes.")
    ] = "small",
    data: Annotated[
        str | None, typer.Option(help="Data set, such as digits or cifar100:PATH.")
    ] = None,
    repetitions: Annotated[
        int | None, typer.Option(help="Runs per cell, with seeds 0, 1, ...; default: the study's.")
    ] = None,
    only: Annotated[str, typer.Option(help="Run only cells whose text contains this.")] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the results; cells that it already has are not run again."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Cells to run in parallel; default: 1, of convergence one per core."),
    ] = None,
    limit_s: Annotated[
        float | None, typer.Option(help="Time limit of a cell; default: the study's.")
    ] = None,
    retry: Annotated[
        bool, typer.Option("--retry", help="Run cells again that failed or were missing.")
    ] = False,
    realtime: Annotated[
        bool,
        typer.Option(
            "--realtime",
            help="libraries: run its processes before all others of the host, if the host is busy; "
            "needs root.",
        ),
    ] = False,
    environment: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH", help="Folder that a library is installed in. Repeatable."
        ),
    ] = None,
    list_cells: Annotated[
        bool, typer.Option("--list", help="List the cells of the study, or all studies.")
    ] = False,
    json: Json = False,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="convergence: digits (VGG-11), gpt (characters), or both; default: both.",
        ),
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            help="convergence: weight rules, such as stash,none; default: all. flush always runs.",
        ),
    ] = None,
    depths: Annotated[
        str | None,
        typer.Option(help="convergence: numbers of stages; default: 2,4,8."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="convergence: runs per case, with seeds 0, 1, ...; default: 3.",
        ),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            help="convergence: passes through the data, may be a fraction; default: the task's "
            "own.",
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="convergence: sgd, adam or adamw; a rule whose paper has no formula for it uses "
            "another; default: sgd.",
        ),
    ] = None,
    lr_scale: Annotated[
        float | None,
        typer.Option(
            help="convergence: factor applied to the task's learning rate; default: 1.",
        ),
    ] = None,
    micro_batches: Annotated[
        str | None,
        typer.Option(
            help="convergence: least, the fewest that a rule supports, for the most stale "
            "gradients; or stages, one per stage. Default: least.",
        ),
    ] = None,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            help="convergence: also time batches in real processes; default: unless --quick.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="convergence: smoke test, a few batches of every case.",
        ),
    ] = False,
) -> None:
    """Run a study: a grid of experiments, each in fresh processes, and a report on them.

    Each cell is recorded when it ends: after an interrupt, the same command continues.

    Examples: penstock study paper --scale small; penstock study install torchgpipe;
    penstock study convergence --tasks digits --rules stash,none --depths 2,8
    """
    if jobs is not None and jobs < 1:
        raise SettingError(f"--jobs {jobs}: must be at least 1")
    own_flags = study_convergence.Flags(
        tasks, rules, depths, seeds, epochs, optimizer, lr_scale, micro_batches, measure, quick
    )
    flags = study_grid.Flags(
        scale,
        data,
        repetitions,
        only,
        out,
        jobs or 1,
        limit_s,
        retry,
        realtime,
        tuple(environment or ()),
    )
    if name == study_convergence.NAME:
        flags.refuse_all(study_convergence.NAME)
        if list_cells:
            study_convergence.print_cases(own_flags, json=json)
        else:
            study_convergence.run(own_flags, out, jobs, json=json)
        return
    own_flags.refuse_all()
    if peers and name != INSTALL:
        raise SettingError(f"unexpected {peers[0]!r}: a study takes one name or file")
    if name is None:
        study_grid.print_studies(json=json)
        return
    if name == INSTALL:
        study_grid.install_peers(peers or [])
        return
    if list_cells:
        study_grid.print_cells(name, flags, json=json)
        return
    # Ended by SIGTERM as by Ctrl-C: all processes end, and the records stay.
    terminate = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        study_grid.run(name, flags, json=json)
    finally:
        signal.signal(signal.SIGTERM, terminate)
