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
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from faults import Target
from host_run import PORT, HostRun, Hosts
from hosts import MBIT, last_step, newest_step
from run import losses

from penstock.measure.profiler import machine_facts
from penstock.plan.plan import Plan

HERE = Path(__file__).parent

RANKS = 4

#: Seconds for which one change of the run may take.
LIMIT_S = 600.0

#: The run. Its steps take far longer than their messages, so that a plan for four hosts uses all
#: four, and one for three all three.
SETTINGS = (
    *("--model", "mlp", "--model-option", "hidden=384", "--model-option", "layers=13"),
    *("--data", "digits", "--image", "8", "--channels", "1", "--batch", "128"),
    *("--schedule", "1f1b", "--micro-batches", "8", "--recompute", "never"),
    *("--optimizer", "adamw", "--lr", "0.001", "--profile-repeats", "1"),
    *("--checkpoint-every", "20", "--keep", "2", "--baseline-steps", "0", "--no-self-check"),
)

PENSTOCK = [sys.executable, "-m", "penstock"]


@dataclass(frozen=True)
class Segment:
    """A part of a run with one plan.

    Attributes:
        end: its last step; None of the last segment.
        path: the file of its plan.
    """

    end: int | None
    path: Path

    @property
    def plan(self) -> Plan:
        """The plan itself."""
        return Plan.load(self.path)


def wait(what: str, done: Callable[[], bool]) -> float:
    """Wait until something is so, and return the seconds that this took.

    Raises:
        RuntimeError: it is not in time.
    """
    started = time.monotonic()
    print(f"waiting: {what}", flush=True)
    while not done():
        if time.monotonic() - started > LIMIT_S:
            raise RuntimeError(f"{what}: not within {LIMIT_S:.0f} s")
        time.sleep(0.05)
    return time.monotonic() - started


def trained(folder: Path, steps: int) -> Callable[[], bool]:
    """Return whether a run has trained some steps from now."""
    start = last_step(folder)
    return lambda: last_step(folder) >= start + steps and newest_step(folder) > start


def planned_for(folder: Path, ranks: int) -> Callable[[], bool]:
    """Return whether a run's present plan is for a number of ranks.

    The function raises RuntimeError if that plan leaves some of them idle: their loss would be that
    of no stage, and the run would show nothing.
    """

    def done() -> bool:
        """Look at the present plan."""
        path = folder / "plan.json"
        if not path.exists():
            return False
        plan = Plan.load(path)
        if plan.cluster_ranks == ranks and plan.ranks < ranks:
            raise RuntimeError(
                f"the plan for {ranks} ranks uses {plan.ranks} and leaves {ranks - plan.ranks} "
                f"idle: {plan}"
            )
        return plan.cluster_ranks == ranks

    return done


def on_this_host(folder: Path, epochs: int) -> dict[str, float]:
    """Kill one of four ranks, train with three, and resize to four.

    Returns:
        Seconds from the kill, and from the request, until a plan for the new number was there.
    """
    seconds: dict[str, float] = {}
    # One stage per rank, whatever the number of cores: a plan for four ranks that share two cores
    # would use two of them.
    words = ["--ranks", str(RANKS), "--stages", str(RANKS)]
    words += ["--max-restarts", "3", "--min-ranks", str(RANKS - 1)]
    command = [*PENSTOCK, "train", *SETTINGS, *words, "--epochs", str(epochs), "--out", str(folder)]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait("four ranks are planned for", planned_for(folder, RANKS))
        wait("the run begins", trained(folder, 30))
        target = Target(launcher.pid, folder, None)  # type: ignore[arg-type] - nothing is drawn
        os.kill(target.rank_pids()[-1], signal.SIGKILL)
        seconds["to three"] = wait("three ranks train", planned_for(folder, RANKS - 1))
        wait("three ranks train on", trained(folder, 60))
        subprocess.run([*PENSTOCK, "resize", str(folder), str(RANKS)], check=True)
        seconds["to four"] = wait("four ranks train", planned_for(folder, RANKS))
        if launcher.wait(LIMIT_S):
            raise RuntimeError(f"the run failed with status {launcher.returncode}")
    finally:
        launcher.kill()
        launcher.wait()
    return seconds


def on_hosts(folder: Path, epochs: int) -> dict[str, float]:
    """Take the power of one of four hosts, train with three, and start the fourth again.

    Returns:
        Seconds from the loss, and from the start, until a plan for the new number was there.
    """
    seconds: dict[str, float] = {}
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
            wait("four hosts are planned for", planned_for(folder, RANKS))
            wait("the run begins", trained(folder, 30))
            run.power_off(RANKS - 1)
            seconds["to three"] = wait("three hosts train", planned_for(folder, RANKS - 1))
            wait("three hosts train on", trained(folder, 60))
            run.link(RANKS - 1, up=True)
            start(RANKS - 1)
            seconds["to four"] = wait("four hosts train", planned_for(folder, RANKS))
            wait("the end", (folder / "weights.safetensors").exists)
            wait("the end of all", lambda: run.gone(range(RANKS)))
        except RuntimeError as error:
            texts = [f"host {host}: {run.text(host)[-1500:]}" for host in range(RANKS)]
            raise RuntimeError("\n".join([str(error), *texts])) from error
        finally:
            run.close()
    return seconds


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
        # A plan that names its hosts is refused elsewhere; stages and schedule stay as they are.
        path = folder.parent / f"by-hand-{number}.json"
        replace(segment.plan, devices=(), cluster_devices=()).save(path)
        start = (
            ["--resume", str(folder)] if number else [*settings_beside_plan(), "--out", str(folder)]
        )
        words = ["--epochs", str(epochs), "--plan", str(path)]
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
    hosts_flag = "--hosts " if arguments.hosts else ""
    parent = Path(tempfile.mkdtemp(prefix="penstock-elastic-"))
    try:
        folder, reference = parent / "run", parent / "by-hand"
        seconds = (on_hosts if arguments.hosts else on_this_host)(folder, arguments.epochs)
        segments = segments_of(folder)
        by_hand(segments, reference, arguments.epochs)
        steps, differing = [step for step, _ in losses(folder)], compare(folder, reference)
        # A restart without a loss repeats a number.
        ranks = [number for number, _ in groupby(segment.plan.ranks for segment in segments)]
        row = {
            "command": f"python benchmarks/chaos/elastic.py {hosts_flag}--epochs {arguments.epochs}",
            "segments": [
                {"ranks": one.plan.ranks, "stages": one.plan.stages, "to_step": one.end}
                for one in segments
            ],
            "seconds": {name: round(value, 1) for name, value in seconds.items()},
            "steps": len(steps),
            "every_step_once": steps == list(range(1, len(steps) + 1)),
            "steps_that_differ": len(differing),
            "passed": not differing
            and steps == list(range(1, len(steps) + 1))
            and ranks == [RANKS, RANKS - 1, RANKS],
        }
    finally:
        shutil.rmtree(parent, ignore_errors=True)
    content = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    content["machine"] = {**machine_facts(torch.device("cpu")), "torch": torch.__version__}
    content["hosts, torchrun" if arguments.hosts else "one host, penstock train"] = row
    arguments.results.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(row))
    return int(not row["passed"])


if __name__ == "__main__":
    sys.exit(main())
