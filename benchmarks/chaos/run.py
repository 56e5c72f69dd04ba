"""Random faults against `penstock train`, which must end with the weights of an undisturbed run.

    python benchmarks/chaos/run.py --minutes 10              # as root: full disks need a tmpfs

README.md lists the faults and says how to read the result.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from faults import FAULTS, Target, is_mountpoint, tmpfs

from penstock.checkpoint.series import newest_whole, step_folders
from penstock.files.json_values import json_value
from penstock.measure.profiler import machine_facts

HERE = Path(__file__).parent

#: A round that takes this long, whatever happens in it, counts as a hang: at least so many seconds,
#: and so many times as long as the undisturbed run, which other work on the machine slows down too.
ROUND_LIMIT_S, ROUND_LIMIT = 420.0, 25.0

#: Share of faults that hit an attempt at any time, also before its ranks have met. The others wait
#: until the run has got beyond the step at which the last one hit, so that it comes to an end.
EARLY = 0.25

#: Seconds until a fault, from the start of an attempt, or from the first step that is new.
EARLY_PAUSE_S, PAUSE_S = (0.0, 8.0), (0.0, 2.0)

#: Seconds that a rank waits for another. A rank that is stopped for longer ends the attempt.
DEADLINE_S = 8

#: The run: small enough to restart in seconds, with all that a checkpoint has to hold.
SETTINGS = (
    *("--model", "mlp", "--data", "digits", "--image", "8", "--channels", "1", "--batch", "32"),
    *("--ranks", "2", "--schedule", "1f1b", "--micro-batches", "4", "--partition", "8,7"),
    *("--optimizer", "adamw", "--lr", "0.001", "--recompute", "never"),
    *("--checkpoint-every", "40", "--keep", "2", "--max-restarts", "100"),
    *("--baseline-steps", "0", "--deadline-s", str(DEADLINE_S), "--no-self-check"),
)


@dataclass
class Round:
    """One disturbed run.

    Attributes:
        seed: of its faults.
        faults: how often each was injected.
        restarts: attempts that the launcher started after a failure.
        launches: how often the launcher was started: it resumes after it was ended itself.
        seconds: of the round.
        weights_equal, losses_equal: whether weights and losses of all steps are those of the
            undisturbed run, to the bit.
        problem: what else went wrong; empty if nothing.
        messages: the last lines of launches that failed.
    """

    seed: int
    faults: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    launches: int = 0
    seconds: float = 0.0
    weights_equal: bool = False
    losses_equal: bool = False
    problem: str = ""
    messages: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the run ended as the undisturbed one."""
        return self.weights_equal and self.losses_equal and not self.problem


def command(folder: Path, epochs: int, profile: Path | None) -> list[str]:
    """Return the command that begins the run in a folder, or resumes it if it has a checkpoint."""
    program = [sys.executable, "-m", "penstock", "train"]
    if newest_whole(step_folders(folder / "checkpoints")) is not None:
        return [*program, "--resume", str(folder)]
    shutil.rmtree(folder, ignore_errors=True)
    profiled = () if profile is None else ("--profile", str(profile))
    return [*program, *SETTINGS, "--epochs", str(epochs), *profiled, "--out", str(folder)]


def losses(folder: Path) -> list[tuple[int, float]]:
    """Return step and loss of all steps in a run's metrics, in their order."""
    rows = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json_value(line, "metrics.jsonl", finite=False)
        assert isinstance(values, dict)
        if "loss" in values:
            rows.append((values["step"], values["loss"]))
    return rows


def undisturbed(folder: Path, epochs: int) -> float:
    """Train without faults, and return the seconds that this took."""
    started = time.monotonic()
    subprocess.run(command(folder, epochs, None), check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def disturbed(reference: Path, disk: Path, epochs: int, seed: int, limit_s: float) -> Round:
    """Train with random faults until the run is over.

    Args:
        reference: folder of the undisturbed run.
        disk: a file system of its own, which faults may fill; or a plain folder.
        epochs: of the run.
        seed: of the faults.
        limit_s: seconds that the round may take.
    """
    result, generator = Round(seed), random.Random(seed)
    folder, log = disk / "run", disk.parent / f"log-{seed}"
    faults = {name: fault for name, fault in FAULTS.items() if name != "full disk"}
    if is_mountpoint(disk):
        faults = FAULTS
    started = time.monotonic()
    while not (folder / "weights.safetensors").exists():
        result.launches += 1
        with log.open("ab") as output:
            launcher = subprocess.Popen(
                command(folder, epochs, reference / "profile.json"), stdout=output, stderr=output
            )
        target = Target(launcher.pid, disk, generator)
        try:
            while launcher.poll() is None and time.monotonic() - started < limit_s:
                if _wait_for_fault(target, launcher, folder, started + limit_s):
                    name = generator.choice(sorted(faults))
                    result.faults[name] = result.faults.get(name, 0) + faults[name](target)
        finally:
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGKILL)
                launcher.wait()
                result.problem = f"not over after {limit_s:.0f} s: {_last_line(log)}"
        if result.problem:
            break
        if launcher.returncode not in (0, -signal.SIGKILL, 128 + signal.SIGTERM):
            result.messages.append(_last_line(log).replace(str(folder), "RUN"))
        if survivors := target.survivors():
            result.problem = f"ranks outlive their launcher: {survivors}"
            break
    result.seconds = round(time.monotonic() - started, 1)
    if not result.problem:
        _compare(result, reference, folder)
    return result


def _wait_for_fault(
    target: Target, launcher: subprocess.Popen[bytes], folder: Path, deadline_s: float
) -> bool:
    """Wait until it is time for the next fault.

    Args:
        target: the run.
        launcher: its launcher, whose end ends the wait.
        folder: of the run.
        deadline_s: monotonic time at which the wait ends.

    Returns:
        Whether there are ranks for a fault.
    """
    early = target.generator.random() < EARLY
    pause_s = target.generator.uniform(*(EARLY_PAUSE_S if early else PAUSE_S))
    step, since = _last_step(folder), None
    while launcher.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.05)
        if since is None and target.rank_pids() and (early or _last_step(folder) > step):
            since = time.monotonic()
        if since is not None and time.monotonic() - since >= pause_s:
            return bool(target.rank_pids())
    return False


def _last_step(folder: Path) -> int:
    """Return the last step in the metrics of a run; 0 if there is none."""
    try:
        last = (folder / "metrics.jsonl").read_text().rpartition('{"step": ')[2]
    except OSError:
        return 0
    return int(last.partition(",")[0] or 0)


def _last_line(log: Path) -> str:
    """Return the last line of a log, which is the error of a command that failed."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][-400:] if lines else ""


def _compare(result: Round, reference: Path, folder: Path) -> None:
    """Compare a run that is over with the undisturbed one."""
    weights = "weights.safetensors"
    result.weights_equal = (reference / weights).read_bytes() == (folder / weights).read_bytes()
    result.losses_equal = losses(reference) == losses(folder)
    log = folder / "restarts.jsonl"
    result.restarts = len(log.read_text().splitlines()) if log.exists() else 0


def main() -> int:
    """Run rounds for some minutes, print a line each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--epochs", type=int, default=40, help="length of the run")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    arguments = parser.parse_args()
    started = time.monotonic()
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as name:
        reference = Path(name) / "reference"
        undisturbed_s = undisturbed(reference, arguments.epochs)
        limit_s = max(ROUND_LIMIT_S, ROUND_LIMIT * undisturbed_s)
        print(f"undisturbed: {len(losses(reference))} steps, {undisturbed_s:.1f} s", flush=True)
        while not rounds or time.monotonic() - started < 60.0 * arguments.minutes:
            with tmpfs(Path(name) / f"disk-{len(rounds)}") as disk:
                seed = arguments.seed + len(rounds)
                result = disturbed(reference, disk, arguments.epochs, seed, limit_s)
            rounds.append(result)
            print(json.dumps(asdict(result)), flush=True)
    facts = {
        "machine": {**machine_facts(torch.device("cpu")), "torch": torch.__version__},
        "command": f"python benchmarks/chaos/run.py --minutes {arguments.minutes:g} "
        f"--epochs {arguments.epochs} --seed {arguments.seed}",
        "undisturbed_s": round(undisturbed_s, 1),
        "rounds_passed": sum(result.passed for result in rounds),
        "faults": sum((Counter(result.faults) for result in rounds), Counter()),
        "rounds": [asdict(result) for result in rounds],
    }
    arguments.results.write_text(json.dumps(facts, indent=1) + "\n")
    failed = [result.seed for result in rounds if not result.passed]
    print(f"{len(rounds) - len(failed)} of {len(rounds)} rounds passed; failed seeds: {failed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
