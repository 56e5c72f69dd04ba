"""Faults of hosts and links at random moments of `penstock train` on several hosts.

    sudo python benchmarks/chaos/hosts.py --moments 20     # as root: it makes network namespaces
    python benchmarks/chaos/hosts.py --summary

README.md lists the faults, and says what is checked after each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from host_run import LOST, NAMED_STEP, HostRun, Hosts, signal_all
from run import losses

from penstock.checkpoint.series import newest_whole, step_folders
from penstock.measure.profiler import machine_facts

HERE = Path(__file__).parent

#: Who starts the ranks, launch after launch.
LAUNCHERS = ("torchrun", "variables", "variables", "variables")

#: Rate of a host's link.
MBIT = 10_000

#: Seconds within which all survivors are to have ended, as docs/security.md says.
PROMISED_S = 10.0

#: Seconds after which a launch counts as hanging.
HANG_S = 45.0

#: Seconds until a launch has begun to train, on a busy machine.
START_S = 150.0

#: Share of faults that hit a launch at any time after its start, and seconds until they do. The
#: others hit after the launch has trained new steps.
EARLY, EARLY_PAUSE_S, PAUSE_S = 0.25, (0.0, 15.0), (0.0, 3.0)

#: Seconds of a short cut, and of a slow phase: less than the five after which a host is lost.
SHORT_S = 2.5

#: Age of a checkpoint from which on a message has to name it, or a later one.
SETTLED_S = 2.0

SETTINGS = (
    *("--model", "mlp", "--data", "digits", "--image", "8", "--channels", "1", "--batch", "32"),
    *("--schedule", "1f1b", "--micro-batches", "4", "--recompute", "never"),
    *("--optimizer", "adamw", "--lr", "0.001", "--profile-repeats", "1"),
    *("--checkpoint-every", "20", "--keep", "2", "--baseline-steps", "0", "--no-self-check"),
)


@dataclass
class Moment:
    """What happened after one fault.

    Attributes:
        fault, launcher: which fault, and who had started the ranks.
        host, hosts: on which host, of how many.
        phase: what the run did: "start", before the ranks had met; "prepare", measuring and
            planning; or "train".
        step: of the newest checkpoint of which the ranks knew when it hit.
        ends: whether the run is to end.
        seconds: until no process was left on the other hosts; None if they did not end. Of a fault
            that the run is to outlive, until it has trained on.
        rank_seconds: until no rank was left there, without their launchers.
        statuses: exit statuses of the launchers on the other hosts.
        named: pairs of a rank and a host that messages on other hosts name as lost.
        named_step: the step of the checkpoint that they name.
        rejoined: whether a host that was stopped or cut off ended as well, when it came back.
        waits: whether a host was lost before its rank had joined, which is named at the deadline of
            300 s (docs/security.md): the launch was ended after `HANG_S`.
        left: processes that had not ended by themselves.
        problem: what is wrong; empty if nothing.
    """

    fault: str
    launcher: str
    host: int
    hosts: int
    phase: str
    step: int
    ends: bool = True
    seconds: float | None = None
    rank_seconds: float | None = None
    statuses: list[int | None] = field(default_factory=list)
    named: list[tuple[int, str]] = field(default_factory=list)
    named_step: int | None = None
    rejoined: bool | None = None
    waits: bool = False
    left: list[str] = field(default_factory=list)
    problem: str = ""


def kill_rank(run: HostRun, host: int) -> bool:
    """Kill the rank of a host."""
    return _signal_rank(run, host, signal.SIGKILL)


def stop_rank(run: HostRun, host: int) -> bool:
    """Stop the rank of a host."""
    return _signal_rank(run, host, signal.SIGSTOP)


def _signal_rank(run: HostRun, host: int, number: int) -> bool:
    """Send a signal to the rank of a host. Returns whether it was there."""
    pid = run.rank(host)
    if pid is not None:
        signal_all([pid], number)
    return pid is not None


def kill_agent(run: HostRun, host: int) -> bool:
    """Kill torchrun on a host."""
    signal_all([run.agent(host)], signal.SIGKILL)
    return True


def freeze_host(run: HostRun, host: int) -> bool:
    """Stop all processes of a host."""
    signal_all(run.processes(host), signal.SIGSTOP)
    return True


def power_off(run: HostRun, host: int) -> bool:
    """Take the power of a host."""
    run.power_off(host)
    return True


def cut_cable(run: HostRun, host: int) -> bool:
    """Pull the cable of a host."""
    run.link(host, up=False)
    return True


def cut_shortly(run: HostRun, host: int) -> bool:
    """Pull the cable of a host for some seconds."""
    run.link(host, up=False)
    time.sleep(SHORT_S)
    run.link(host, up=True)
    return True


def slow_down(run: HostRun, host: int) -> bool:
    """Let a host run for a fifth of the time."""
    end_s = time.monotonic() + SHORT_S
    while time.monotonic() < end_s:
        present = run.processes(host)
        signal_all(present, signal.SIGSTOP)
        time.sleep(0.08)
        signal_all(present, signal.SIGCONT)
        time.sleep(0.02)
    return True


@dataclass(frozen=True)
class Fault:
    """A kind of faults.

    Attributes:
        inject: hits a host; returns whether it could.
        ends: whether the run is to end.
        lost: whether the host itself is lost, so that nothing is expected of it.
        launchers: those with which it is possible.
    """

    inject: Callable[[HostRun, int], bool]
    ends: bool = True
    lost: bool = False
    launchers: Sequence[str] = ("torchrun", "variables")


FAULTS = {
    "kill rank": Fault(kill_rank),
    "stop rank": Fault(stop_rank, lost=True),
    "kill agent": Fault(kill_agent, launchers=("torchrun",)),
    "freeze host": Fault(freeze_host, lost=True),
    "power off": Fault(power_off, lost=True),
    "cut cable": Fault(cut_cable, lost=True),
    "cut cable for 2.5 s": Fault(cut_shortly, ends=False),
    "slow host for 2.5 s": Fault(slow_down, ends=False),
}


def words_of(folder: Path, epochs: int, stages: int) -> list[str]:
    """Return the arguments of the command that begins a run, or resumes it if it has begun."""
    if newest_step(folder):
        return ["train", "--resume", str(folder)]
    shutil.rmtree(folder, ignore_errors=True)
    return [
        "train",
        *SETTINGS,
        "--stages",
        str(stages),
        "--epochs",
        str(epochs),
        "--out",
        str(folder),
    ]


def newest_step(folder: Path) -> int:
    """Return the step of the newest whole checkpoint of a run; 0 without one."""
    saved = newest_whole(step_folders(folder / "checkpoints"))
    return 0 if saved is None else saved.step


def known_step(folder: Path) -> int:
    """Return the step of the newest checkpoint of which all ranks know that it is whole.

    They agree twice a second, after a step.
    """
    folders = step_folders(folder / "checkpoints")
    settled = [path for path in folders if time.time() - path.stat().st_mtime > SETTLED_S]
    saved = newest_whole(settled)
    return 0 if saved is None else saved.step


def last_step(folder: Path) -> int:
    """Return the last step in the metrics of a run; 0 if there is none."""
    try:
        last = (folder / "metrics.jsonl").read_text().rpartition('{"step": ')[2]
    except OSError:
        return 0
    return int(last.partition(",")[0] or 0)


def phase_of(run: HostRun) -> str:
    """Return what a launch does."""
    text = run.text(0)
    if ", simulated" in text:
        return "train"
    return "prepare" if "measuring" in text else "start"


class Round:
    """A run with a fault in each of its launches, until it is over.

    Args:
        hosts: where it runs.
        folder: for the run and its logs.
        epochs: of the run.
        seed: of faults and moments.
    """

    def __init__(self, hosts: Hosts, folder: Path, epochs: int, seed: int) -> None:
        self._hosts, self._folder, self._epochs = hosts, folder, epochs
        self._generator = random.Random(seed)
        self.run_folder = folder / "run"
        self.moments: list[Moment] = []

    @property
    def over(self) -> bool:
        """Whether the run has trained its last step."""
        return (self.run_folder / "weights.safetensors").exists()

    def launch(self, launcher: str, *, faults: bool) -> None:
        """Launch the run, and disturb it until it ends.

        Raises:
            RuntimeError: it failed without a fault.
        """
        logs = self._folder / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir()
        run = HostRun(self._hosts, logs)
        started_step = last_step(self.run_folder)
        run.start(words_of(self.run_folder, self._epochs, len(self._hosts.names)), launcher)
        everywhere = range(len(self._hosts.names))
        ended = False
        try:
            while faults and not ended and self._wait_for_moment(run, started_step):
                moment = self._disturb(run, launcher)
                if moment is not None:
                    self.moments.append(moment)
                    ended = moment.ends or bool(moment.problem)
                    print(json.dumps(asdict(moment)), flush=True)
            if not ended and run.wait(lambda: run.gone(everywhere), START_S + HANG_S) is None:
                raise RuntimeError(f"a launch does not end: {_ends(run, everywhere)}")
        finally:
            run.close()
        statuses = [process.returncode for process in run.launchers]
        if not ended and any(statuses):
            raise RuntimeError(f"a launch failed ({statuses}): {_ends(run, everywhere)}")

    def _wait_for_moment(self, run: HostRun, started_step: int) -> bool:
        """Wait for the moment of the next fault. Returns whether the run is still there."""
        early = self._generator.random() < EARLY and phase_of(run) == "start"
        pause_s = self._generator.uniform(*(EARLY_PAUSE_S if early else PAUSE_S))
        everywhere = range(len(self._hosts.names))

        def begun() -> bool:
            """Whether the run has trained a new step, or is over."""
            return last_step(self.run_folder) > started_step or run.gone(everywhere)

        if not early and run.wait(begun, START_S) is None:
            raise RuntimeError(f"a launch does not begin: {_ends(run, everywhere)}")
        run.wait(lambda: run.gone(everywhere), pause_s)
        return not self.over and not run.gone(everywhere)

    def _disturb(self, run: HostRun, launcher: str) -> Moment | None:
        """Inject a fault, and see what becomes of it. Returns None if it could not be injected."""
        names = [name for name, fault in FAULTS.items() if launcher in fault.launchers]
        name = self._generator.choice(names)
        fault = FAULTS[name]
        hosts = range(len(self._hosts.names))
        victim = self._generator.choice(hosts)
        step = known_step(self.run_folder)
        moment = Moment(name, launcher, victim, len(hosts), phase_of(run), step, fault.ends)
        if not fault.inject(run, victim):
            return None
        if not fault.ends:
            self._check_going_on(run, moment)
            return moment
        others = [host for host in hosts if host != victim or not fault.lost]
        started = time.monotonic()
        if moment.phase != "start":  # else torchrun may not have started a rank yet
            run.wait(lambda: all(run.rank(host) is None for host in others), HANG_S)
        rank_seconds = time.monotonic() - started
        run.wait(lambda: run.gone(others), HANG_S - rank_seconds)
        if run.gone(others):
            moment.seconds = round(time.monotonic() - started, 1)
            early = moment.phase == "start"
            moment.rank_seconds = moment.seconds if early else round(rank_seconds, 1)
        elif moment.phase == "start" and fault.lost:
            moment.waits = True
        if fault.lost and name != "power off" and not moment.waits:
            signal_all(run.processes(victim), signal.SIGCONT)
            moment.rejoined = run.wait(lambda: run.gone(hosts), HANG_S) is not None
        for host, present in run.close().items():
            moment.left += [f"host {host}: {words[:80]}" for words in present.values()]
        if not moment.waits:
            self._check_end(run, moment, others)
        return moment

    def _check_going_on(self, run: HostRun, moment: Moment) -> None:
        """Check that a run has trained on after a fault."""
        step = last_step(self.run_folder)

        def goes_on() -> bool:
            """Whether it has."""
            ended = any(process.poll() is not None for process in run.launchers)
            return self.over or ended or last_step(self.run_folder) > step

        seconds = run.wait(goes_on, START_S)
        moment.seconds = None if seconds is None else round(seconds, 1)
        statuses = [process.poll() for process in run.launchers]
        if seconds is None or any(statuses):
            hosts = range(moment.hosts)
            moment.statuses = statuses
            moment.problem = f"the run has not gone on: {_ends(run, hosts)}"

    def _check_end(self, run: HostRun, moment: Moment, others: Sequence[int]) -> None:
        """Check how a launch has ended on the hosts that are not lost."""
        moment.statuses = [run.launchers[host].returncode for host in others]
        speaking = [host for host in others if host != moment.host]
        texts = {host: run.text(host) for host in speaking}
        named = {
            (int(rank), name) for text in texts.values() for rank, name, _ in LOST.findall(text)
        }
        moment.named = sorted(named)
        steps = {int(step) for text in texts.values() for step in NAMED_STEP.findall(text)}
        moment.named_step = max(steps) if steps else None
        problems = []
        if moment.seconds is None:
            problems.append(f"processes remain after {HANG_S:.0f} s: {moment.left}")
        elif moment.rank_seconds is not None and moment.rank_seconds > PROMISED_S:
            problems.append(f"the ranks ended after {moment.rank_seconds} s")
        # The one that was killed has another status: the agent, or a rank without one.
        statuses = [run.launchers[host].returncode for host in speaking]
        if any(status != 1 for status in statuses):
            problems.append("another exit status than 1")
        if named and named != {(moment.host, f"host-{moment.host}")}:
            problems.append("another rank is named")
        silent = [host for host, text in texts.items() if f"rank {moment.host} on host" not in text]
        if silent:
            problems.append(f"hosts {silent} do not name the rank")
        if moment.phase == "train" and (moment.named_step or 0) < moment.step:
            problems.append(f"step {moment.named_step} is named, and {moment.step} is whole")
        if moment.named_step is not None and moment.named_step > newest_step(self.run_folder):
            problems.append(f"step {moment.named_step} is named, which is not whole")
        if moment.rejoined is False:
            problems.append("the host that came back does not end")
        if problems:
            moment.problem = "; ".join(problems) + f": {_ends(run, range(moment.hosts))}"


def _ends(run: HostRun, hosts: Sequence[int]) -> str:
    """Return the last lines of the output of hosts."""
    return " | ".join(f"host {host}: {run.text(host)[-700:].strip()}" for host in hosts)


def compare(reference: Path, folder: Path) -> str:
    """Compare a run that is over with the undisturbed one. Returns what differs, or nothing."""
    weights = "weights.safetensors"
    differences = []
    if (reference / weights).read_bytes() != (folder / weights).read_bytes():
        differences.append("weights")
    if losses(reference) != losses(folder):
        differences.append("losses")
    return " and ".join(differences)


def reference_run(folder: Path, epochs: int, size: int) -> None:
    """Train without faults, on this host alone."""
    program = [sys.executable, "-m", "penstock", *words_of(folder, epochs, size)]
    command = [*program, "--ranks", str(size)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measure(arguments: argparse.Namespace, content: dict) -> None:
    """Disturb runs until there are enough moments, and add them to the results."""
    count = 0
    # Not a TemporaryDirectory: a forked rank would remove it at its end.
    name = tempfile.mkdtemp(prefix="penstock-chaos-")
    try:
        reference = arguments.reference or Path(name) / "reference"
        if not (reference / "weights.safetensors").exists():
            reference_run(reference, arguments.epochs, arguments.hosts)
        seed = arguments.seed
        while count < arguments.moments:
            folder = Path(name) / f"round-{seed}"
            folder.mkdir()
            with Hosts(arguments.hosts, MBIT) as hosts:
                this_round = Round(hosts, folder, arguments.epochs, seed)
                number, problem = 0, ""
                try:
                    while not this_round.over:
                        enough = count + len(this_round.moments) >= arguments.moments
                        launcher = LAUNCHERS[(seed + number) % len(LAUNCHERS)]
                        this_round.launch(launcher, faults=not enough)
                        number += 1
                except RuntimeError as error:
                    problem = str(error)
                problem = problem or compare(reference, this_round.run_folder)
            count += len(this_round.moments)
            row = {"seed": seed, "launches": number, "differs": problem}
            row["moments"] = [asdict(moment) for moment in this_round.moments]
            content["rounds"].append(row)
            print(f"round {seed}: {number} launches, differs: {problem or 'nothing'}", flush=True)
            arguments.results.write_text(json.dumps(content, indent=1) + "\n")
            seed += 1
    finally:
        shutil.rmtree(name, ignore_errors=True)


def summary(content: dict) -> int:
    """Print a table of all moments. Returns the exit status."""
    rows = [moment for row in content["rounds"] for moment in row["moments"]]
    print("| fault | moments | ranks: median | longest | with launchers: longest | problems |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in FAULTS:
        of_fault = [row for row in rows if row["fault"] == name]
        seconds = [row["seconds"] for row in of_fault if row["seconds"] is not None]
        ranks = [row["rank_seconds"] for row in of_fault if row["rank_seconds"] is not None]
        cells = [
            f"{statistics.median(ranks):.1f} s" if ranks else "",
            f"{max(ranks):.1f} s" if ranks else "",
            f"{max(seconds):.1f} s" if seconds else "",
            str(sum(bool(row["problem"]) for row in of_fault)),
        ]
        print(f"| {name} | {len(of_fault)} | {' | '.join(cells)} |")
    phases = {
        phase: sum(row["phase"] == phase for row in rows) for phase in ("start", "prepare", "train")
    }
    differing = [row["seed"] for row in content["rounds"] if row["differs"]]
    print(
        f"{len(rows)} moments in {len(content['rounds'])} runs: {phases}; runs that differ: {differing}"
    )
    for row in rows:
        if row["problem"]:
            print(f"{row['fault']}, host {row['host']}, {row['phase']}: {row['problem'][:300]}")
    return int(bool(differing) or any(row["problem"] for row in rows))


def main() -> int:
    """Disturb runs, write the results, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=100, help="number of faults")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12, help="length of a run")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--reference", type=Path, help="folder of the undisturbed run, to keep it")
    parser.add_argument("--append", action="store_true", help="add to the results")
    parser.add_argument("--summary", action="store_true", help="print the results alone")
    parser.add_argument("--results", type=Path, default=HERE / "hosts.json")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # removes the hosts
    content: dict = {"rounds": []}
    if arguments.summary or (arguments.append and arguments.results.exists()):
        content = json.loads(arguments.results.read_text())
    if not arguments.summary:
        if os.geteuid() != 0:
            sys.exit("network namespaces need root: sudo python benchmarks/chaos/hosts.py")
        facts = {**machine_facts(torch.device("cpu")), "torch": torch.__version__}
        content["machine"] = facts
        measure(arguments, content)
    return summary(content)


if __name__ == "__main__":
    sys.exit(main())
