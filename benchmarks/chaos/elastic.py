"""A run that loses a rank or a host, goes on with fewer, and grows again.

    python benchmarks/chaos/elastic.py                 # on this host, by penstock train
    sudo python benchmarks/chaos/elastic.py --hosts    # hosts as network namespaces, by torchrun

Its losses and weights are compared, to the bit, with those of a run that was stopped and planned anew
by hand at the same steps, with the same plans. README.md has the result.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from faults import Target
from host_run import PORT, HostRun, Hosts
from hosts import MBIT, SETTINGS, last_step, newest_step
from run import losses

from penstock.measure.profiler import machine_facts
from penstock.plan.plan import Plan

HERE = Path(__file__).parent

RANKS = 4

#: Seconds for which one change of the run may take.
LIMIT_S = 400.0

PENSTOCK = [sys.executable, "-m", "penstock"]


@dataclass(frozen=True)
class Segment:
    """A part of a run with one plan.

    Attributes:
        end: its last step; None of the last segment.
        plan: its file.
    """

    end: int | None
    plan: Path

    @property
    def ranks(self) -> int:
        """The number of ranks that its plan is for, with idle ones."""
        return Plan.load(self.plan).cluster_ranks


def wait(what: str, done: Callable[[], bool]) -> None:
    """Wait until something is so.

    Raises:
        RuntimeError: it is not in time.
    """
    started = time.monotonic()
    while not done():
        if time.monotonic() - started > LIMIT_S:
            raise RuntimeError(f"{what}: not within {LIMIT_S:.0f} s")
        time.sleep(0.05)


def trained(folder: Path, steps: int) -> Callable[[], bool]:
    """Return whether a run has trained some steps from now."""
    start = last_step(folder)
    return lambda: last_step(folder) >= start + steps and newest_step(folder) > start


def ranks_of(folder: Path) -> int:
    """Return the number of ranks of a run's present plan; 0 before there is one."""
    try:
        return Plan.load(folder / "plan.json").cluster_ranks
    except Exception:  # noqa: BLE001 - it is being replaced
        return 0


def on_this_host(folder: Path, epochs: int) -> None:
    """Kill one of four ranks, train with three, and resize to four."""
    words = ["--ranks", str(RANKS), "--max-restarts", "3", "--min-ranks", str(RANKS - 1)]
    command = [*PENSTOCK, "train", *SETTINGS, *words, "--epochs", str(epochs), "--out", str(folder)]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait("the run begins", trained(folder, 30))
        target = Target(launcher.pid, folder, None)  # type: ignore[arg-type] - nothing is drawn
        os.kill(target.rank_pids()[-1], signal.SIGKILL)
        wait("three ranks train", lambda: ranks_of(folder) == RANKS - 1)
        wait("three ranks train on", trained(folder, 60))
        subprocess.run([*PENSTOCK, "resize", str(folder), str(RANKS)], check=True)
        wait("four ranks train", lambda: ranks_of(folder) == RANKS)
        if launcher.wait(LIMIT_S):
            raise RuntimeError(f"the run failed with status {launcher.returncode}")
    finally:
        launcher.kill()
        launcher.wait()


def on_hosts(folder: Path, epochs: int) -> None:
    """Take the power of one of four hosts, train with three, and start the fourth again."""
    words = ["train", *SETTINGS, "--epochs", str(epochs), "--out", str(folder)]
    with Hosts(RANKS, MBIT) as hosts:
        run = HostRun(hosts, folder.parent)

        def start(host: int) -> None:
            """Start torchrun on a host."""
            program = [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", f"{RANKS - 1}:{RANKS}", "--nproc-per-node", "1"),
                *("--rdzv-backend", "c10d", "--rdzv-id", "elastic", "--max-restarts", "5"),
                *(
                    "--rdzv-endpoint",
                    f"{hosts.addresses[0]}:{PORT}",
                    "--rdzv-conf",
                    "last_call_timeout=15",
                ),
                *("--local-addr", hosts.addresses[host], "--no-python", *PENSTOCK, *words),
            ]
            # A host that joins torchrun 2.13 later waits for an address otherwise.
            variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            run.launchers[host:] = [run.start_program(host, program, variables)]

        try:
            for host in range(RANKS):
                start(host)
            wait("the run begins", trained(folder, 30))
            run.power_off(RANKS - 1)
            wait("three hosts train", lambda: ranks_of(folder) == RANKS - 1)
            wait("three hosts train on", trained(folder, 60))
            run.link(RANKS - 1, up=True)
            start(RANKS - 1)
            wait("four hosts train", lambda: ranks_of(folder) == RANKS)
            wait("the end", (folder / "weights.safetensors").exists)
            wait("the end of all", lambda: run.gone(range(RANKS)))
        except RuntimeError as error:
            texts = [f"host {host}: {run.text(host)[-1500:]}" for host in range(RANKS)]
            raise RuntimeError("\n".join([str(error), *texts])) from error
        finally:
            run.close()


def segments_of(folder: Path) -> list[Segment]:
    """Return the parts of a run, from the plans that it has left."""
    segments = []
    for path in sorted(folder.glob("plan-*.json")):
        segments.append(Segment(int(path.stem.partition("-")[2]), path))
    return [*segments, Segment(None, folder / "plan.json")]


def settings_beside_plan() -> list[str]:
    """Return the settings of the run without those that a plan contains."""
    pairs = list(zip(SETTINGS[:-1:2], SETTINGS[1::2], strict=True))
    assert SETTINGS[-1] == "--no-self-check"
    planned = ("--schedule", "--micro-batches", "--recompute")
    words = [word for pair in pairs if pair[0] not in planned for word in pair]
    return [*words, SETTINGS[-1]]


def by_hand(segments: list[Segment], folder: Path, epochs: int) -> None:
    """Train with the same plans, stopped and started again at the same steps, on this host."""
    for number, segment in enumerate(segments):
        start = (
            ["--resume", str(folder)] if number else [*settings_beside_plan(), "--out", str(folder)]
        )
        words = ["--epochs", str(epochs), "--plan", str(segment.plan)]
        if segment.end is not None:
            words += ["--limit-steps", str(segment.end)]
        command = [*PENSTOCK, "train", *start, *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def compare(folder: Path, reference: Path) -> list[int]:
    """Return the steps whose losses differ; all of them if the weights do."""
    rows, expected = losses(folder), losses(reference)
    weights = "weights.safetensors"
    if (folder / weights).read_bytes() != (reference / weights).read_bytes():
        return [step for step, _ in rows]
    return [step for step, loss in rows if dict(expected).get(step) != loss]


def main() -> int:
    """Run, compare, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", action="store_true", help="hosts as network namespaces")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--results", type=Path, default=HERE / "elastic.json")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # removes the hosts
    if arguments.hosts and os.geteuid() != 0:
        sys.exit("network namespaces need root: sudo python benchmarks/chaos/elastic.py --hosts")
    parent = Path(tempfile.mkdtemp(prefix="penstock-elastic-"))
    try:
        folder, reference = parent / "run", parent / "by-hand"
        (on_hosts if arguments.hosts else on_this_host)(folder, arguments.epochs)
        segments = segments_of(folder)
        by_hand(segments, reference, arguments.epochs)
        differing = compare(folder, reference)
        row = {
            "segments": [{"ranks": one.ranks, "to_step": one.end} for one in segments],
            "steps": len(losses(folder)),
            "every_step_once": [step for step, _ in losses(folder)]
            == list(range(1, len(losses(folder)) + 1)),
            "steps_that_differ": len(differing),
        }
    finally:
        shutil.rmtree(parent, ignore_errors=True)
    content = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    content["machine"] = {**machine_facts(torch.device("cpu")), "torch": torch.__version__}
    content["hosts, torchrun" if arguments.hosts else "one host, penstock train"] = row
    arguments.results.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(row))
    return int(bool(differing) or not row["every_step_once"])


if __name__ == "__main__":
    sys.exit(main())
