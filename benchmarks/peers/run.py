"""Penstock beside its peers: the same model, data, cuts and first weights; processes of their own;
steps in turn.

One command prints a table for each cell (step time, ratio to ours with its spread, memory per rank,
share of the bound), and writes results.json and figure.png. README.md says how to read them, and
how peers are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from adapters.catalogue import System, systems
from cells import Cell
from environments import environments, install
from measuring import Bench
from processes import NotInstalled, Nursery, PeerBroke
from report import picture, record, table
from workloads import WORKLOADS

HERE = Path(__file__).parent
STAGES = (2, 4)
#: Without options. Everything is `--full`.
DEFAULT = (
    Cell("mlp", 2, 16),
    Cell("mlp", 4, 16),
    Cell("gpt", 2, 8),
    Cell("gpt", 4, 8),
    Cell("vgg19", 2, 8),
    Cell("vgg19", 4, 8),
)
QUICK = (Cell("mlp", 2, 16), Cell("gpt", 2, 8))


def cells(given: argparse.Namespace) -> list[Cell]:
    """What to compare."""
    named = given.workload or given.stages or given.micro_batches
    if not named and not given.full:
        return list(QUICK if given.quick else DEFAULT)
    return [
        Cell(name, stages, count)
        for name in given.workload or WORKLOADS
        for stages in given.stages or STAGES
        for count in given.micro_batches or WORKLOADS[name].micro_batches
    ]


def chosen(found: dict[str, System], wanted: Sequence[str] | None) -> list[System]:
    """Those asked for, by peer or by name; ours and the bound are always among them."""
    if wanted:
        known = {*found, *(system.peer for system in found.values())}
        unknown = [name for name in wanted if name not in known]
        if unknown:
            sys.exit(
                f"there is no peer {unknown[0]!r}; there are {', '.join(sorted({system.peer for system in found.values()}))}, "
                f"and by single systems: {'; '.join(found)}"
            )
    always = ("penstock 1f1b", "bound")
    return [
        system
        for system in found.values()
        if not wanted or system.name in always or system.peer in wanted or system.name in wanted
    ]


def words() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workload", action="append", choices=list(WORKLOADS), help="may be given several times"
    )
    parser.add_argument(
        "--stages", action="append", type=int, help="numbers of stages, 2 and 4 by default"
    )
    parser.add_argument(
        "--micro-batches", action="append", type=int, help="numbers of micro-batches"
    )
    parser.add_argument(
        "--rounds", type=int, help="5 by default, 3 where a step takes long; 2 and 1 with --quick"
    )
    parser.add_argument(
        "--peers", help="only these, with commas between: names of peers or of systems"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{len(QUICK)} cells, few rounds; writes quick.json, quick.png",
    )
    parser.add_argument(
        "--full", action="store_true", help="all workloads, stages and numbers of micro-batches"
    )
    parser.add_argument(
        "--slower",
        type=float,
        default=1.3,
        metavar="RATIO",
        help="a long step beyond this ratio in a round is not measured in later ones; 0: all are",
    )
    parser.add_argument(
        "--environment",
        action="append",
        default=[],
        metavar="PEER=PATH",
        help="where a peer is installed",
    )
    parser.add_argument(
        "--install",
        action="store_true",
        help="install peers into .environments/, and do nothing else",
    )
    parser.add_argument(
        "--measure-cuts",
        action="store_true",
        help="measure layers anew, even if that has been done here",
    )
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="on a host that is not quiet: steps before all else (SCHED_RR; needs root); other work waits",
    )
    parser.add_argument(
        "--out", type=Path, help="results.json by default; the picture goes beside it"
    )
    parser.add_argument(
        "--draw", action="store_true", help="only print and draw what the results hold"
    )
    return parser


def main() -> None:
    """Compare, print, write."""
    given = words().parse_args()
    found = systems()
    peers = given.peers.split(",") if given.peers else None
    out = given.out or HERE / ("quick.json" if given.quick else "results.json")
    drawn = HERE / "figure.png" if out == HERE / "results.json" else out.with_suffix(".png")
    if given.install:
        install(found, peers or {system.peer for system in found.values()})
        return
    if given.draw:
        shown = json.loads(out.read_text())["cells"]
        print(*map(table, shown), sep="\n\n")
        picture(shown, drawn)
        return
    wanted = cells(given)
    if wrong := [
        cell
        for cell in wanted
        if cell.micro_batches < 1 or WORKLOADS[cell.workload].samples % cell.micro_batches
    ]:
        sys.exit(
            f"{wrong[0]}: micro-batches must divide the batch of {WORKLOADS[wrong[0].workload].samples} samples"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    picked = chosen(found, peers)
    started, known = (
        time.monotonic(),
        environments(given.environment, {system.peer for system in found.values()}),
    )
    logs = HERE / "logs"
    logs.mkdir(exist_ok=True)
    nurseries: dict[str, Nursery] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-peers-") as folder:
        try:
            for system in picked:
                if system.peer not in nurseries:
                    log = logs / f"{system.peer}.txt"
                    log.unlink(missing_ok=True)
                    nurseries[system.peer] = Nursery(system, known.get(system.peer), log)
            results: dict[str, Any] = {
                "machine": {},
                "versions": _versions(nurseries),
                "command": sys.argv[1:],
                "cells": [],
            }
            log = logs / "errors.txt"
            log.unlink(missing_ok=True)
            rounds = (given.rounds,) * 2 if given.rounds else (2, 1) if given.quick else (5, 3)
            bench = Bench(nurseries, rounds, given.slower or None, _say, log, given.realtime)
            _compare(wanted, picked, bench, Path(folder), results, given.measure_cuts, (out, drawn))
        except KeyboardInterrupt:
            print("\nstopped; what was measured is written", file=sys.stderr)
            sys.exit(130)
        finally:
            for nursery in nurseries.values():
                nursery.end()
    print(
        f"\n{(time.monotonic() - started) / 60:.1f} minutes; results in {out}, picture in {drawn}"
    )


def _compare(
    wanted: list[Cell],
    picked: list[System],
    bench: Bench,
    folder: Path,
    results: dict[str, Any],
    anew: bool,
    places: tuple[Path, Path],
) -> None:
    # Measuring loads torch, its threads and its memory into a process that should keep out of the
    # way: another one does it.
    with ProcessPoolExecutor(1) as apart:
        import cuts

        results["machine"] = {
            **apart.submit(cuts.machine).result(),
            "python": platform.python_version(),
        }
        found = {}
        for cell in wanted:
            found[cell] = apart.submit(
                cuts.found,
                cell,
                folder,
                anew and all(cell.workload != done.workload for done in found),
                any(system.name == "penstock auto" for system in picked),
            ).result()
    files = {}
    for name in dict.fromkeys(cell.workload for cell in wanted):
        files[name] = _reference(name, folder)
    for cell in wanted:
        weights, gradients, names = files[cell.workload]
        rows, bound = bench.measure(cell, found[cell], picked, (weights, gradients), names)
        results["cells"].append(record(cell, found[cell], rows, bound))
        _say("")
        print(table(results["cells"][-1]) + "\n", flush=True)
        places[0].write_text(json.dumps(results, indent=1) + "\n")
        picture(results["cells"], places[1])


def _reference(workload: str, folder: Path) -> tuple[Path, Path, set[str]]:
    from rank import reference

    weights, gradients = folder / f"{workload}.weights", folder / f"{workload}.gradients"
    with ProcessPoolExecutor(1) as apart:
        names = apart.submit(reference, weights, gradients, workload).result()
    return weights, gradients, names


def _versions(nurseries: dict[str, Nursery]) -> dict[str, dict[str, str]]:
    versions = {}
    for peer, nursery in nurseries.items():
        try:
            versions[peer] = nursery.ready()
        except (NotInstalled, PeerBroke) as error:
            versions[peer] = {"note": str(error)}
    return versions


def _say(text: str) -> None:
    if sys.stdout.isatty():
        print("\r" + text[:100].ljust(100) + "\r", end="", flush=True)
    elif text and os.environ.get("PEERS_VERBOSE"):
        print(text, flush=True)


if __name__ == "__main__":
    main()
