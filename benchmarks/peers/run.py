"""Penstock beside its peers: the same model, data, cuts and first weights; processes of their own;
steps in turn.

One command prints a table for each cell (step time, ratio to ours with its spread, memory per rank,
share of the bound), and writes results.json and figure.png. README.md says how to read them, and
how peers are installed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
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


def cells(arguments: argparse.Namespace) -> list[Cell]:
    """Return the cells to compare, from the command line."""
    named = arguments.workload or arguments.stages or arguments.micro_batches
    if not named and not arguments.full:
        return list(QUICK if arguments.quick else DEFAULT)
    selected = []
    for name in arguments.workload or WORKLOADS:
        micro_batch_counts = arguments.micro_batches or WORKLOADS[name].micro_batches
        for stages, count in itertools.product(arguments.stages or STAGES, micro_batch_counts):
            selected.append(Cell(name, stages, count))
    return selected


def chosen(available: dict[str, System], names: Sequence[str] | None) -> list[System]:
    """Return the systems selected by peer or by name; ours and the bound are always included."""
    if not names:
        return list(available.values())
    peers = {system.peer for system in available.values()}
    unknown = [name for name in names if name not in available and name not in peers]
    if unknown:
        sys.exit(
            f"there is no peer {unknown[0]!r}; there are {', '.join(sorted(peers))}, "
            f"and by single systems: {'; '.join(available)}"
        )
    selected_names = {"penstock 1f1b", "bound", *names}
    return [
        system
        for system in available.values()
        if system.name in selected_names or system.peer in names
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
    arguments = words().parse_args()
    available = systems()
    peers = arguments.peers.split(",") if arguments.peers else None
    out = arguments.out or HERE / ("quick.json" if arguments.quick else "results.json")
    drawn = HERE / "figure.png" if out == HERE / "results.json" else out.with_suffix(".png")
    if arguments.install:
        install(available, peers or {system.peer for system in available.values()})
        return
    if arguments.draw:
        previous_cells = json.loads(out.read_text())["cells"]
        print(*map(table, previous_cells), sep="\n\n")
        picture(previous_cells, drawn)
        return
    selected_cells = cells(arguments)
    _check_cells(selected_cells)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    picked = chosen(available, peers)
    started = time.monotonic()
    all_peers = {system.peer for system in available.values()}
    folders = environments(arguments.environment, all_peers)
    logs = HERE / "logs"
    logs.mkdir(exist_ok=True)
    nurseries: dict[str, Nursery] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-peers-") as folder:
        try:
            _start_nurseries(nurseries, picked, folders, logs)
            results: dict[str, Any] = {
                "machine": {},
                "versions": _versions(nurseries),
                "command": sys.argv[1:],
                "cells": [],
            }
            log = logs / "errors.txt"
            log.unlink(missing_ok=True)
            rounds = (
                (arguments.rounds,) * 2
                if arguments.rounds
                else (2, 1)
                if arguments.quick
                else (5, 3)
            )
            bench = Bench(
                nurseries, rounds, arguments.slower or None, _say, log, arguments.realtime
            )
            _compare(
                selected_cells,
                picked,
                bench,
                Path(folder),
                results,
                arguments.measure_cuts,
                (out, drawn),
            )
        except KeyboardInterrupt:
            print("\nstopped; what was measured is written", file=sys.stderr)
            sys.exit(130)
        finally:
            for nursery in nurseries.values():
                nursery.end()
    print(
        f"\n{(time.monotonic() - started) / 60:.1f} minutes; results in {out}, picture in {drawn}"
    )


def _check_cells(selected_cells: Sequence[Cell]) -> None:
    """Exit if a number of micro-batches does not divide the batch."""
    for cell in selected_cells:
        samples = WORKLOADS[cell.workload].samples
        if cell.micro_batches < 1 or samples % cell.micro_batches:
            sys.exit(f"{cell}: micro-batches must divide the batch of {samples} samples")


def _start_nurseries(
    nurseries: dict[str, Nursery],
    systems: Sequence[System],
    folders: Mapping[str, Path],
    logs: Path,
) -> None:
    """Start the process of every peer, with an empty log; `nurseries` gets them by peer."""
    for system in systems:
        if system.peer not in nurseries:
            log = logs / f"{system.peer}.txt"
            log.unlink(missing_ok=True)
            nurseries[system.peer] = Nursery(system, folders.get(system.peer), log)


def _compare(
    selected_cells: list[Cell],
    picked: list[System],
    bench: Bench,
    folder: Path,
    results: dict[str, Any],
    anew: bool,
    places: tuple[Path, Path],
) -> None:
    # Measuring loads torch, its threads and its memory into a process that should keep out of the
    # way: another one does it.
    with ProcessPoolExecutor(1) as executor:
        import cuts

        results["machine"] = {
            **executor.submit(cuts.machine).result(),
            "python": platform.python_version(),
        }
        cuts_of_cell = {}
        for cell in selected_cells:
            cuts_of_cell[cell] = executor.submit(
                cuts.found,
                cell,
                folder,
                anew and all(cell.workload != done.workload for done in cuts_of_cell),
                any(system.name == "penstock auto" for system in picked),
            ).result()
    files = {}
    for name in dict.fromkeys(cell.workload for cell in selected_cells):
        files[name] = _reference(name, folder)
    for cell in selected_cells:
        weights, gradients, names = files[cell.workload]
        rows, bound = bench.measure(cell, cuts_of_cell[cell], picked, (weights, gradients), names)
        results["cells"].append(record(cell, cuts_of_cell[cell], rows, bound))
        _say("")
        print(table(results["cells"][-1]) + "\n", flush=True)
        places[0].write_text(json.dumps(results, indent=1) + "\n")
        picture(results["cells"], places[1])


def _reference(workload: str, folder: Path) -> tuple[Path, Path, set[str]]:
    from rank import reference

    weights, gradients = folder / f"{workload}.weights", folder / f"{workload}.gradients"
    with ProcessPoolExecutor(1) as executor:
        names = executor.submit(reference, weights, gradients, workload).result()
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
