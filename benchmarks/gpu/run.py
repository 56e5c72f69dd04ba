"""What Penstock does on one GPU: tests, figures, and predictions beside measurements, out of one
command.

This process never starts CUDA. Each section runs in a process of its own, with a time limit; a
crash, a hang, an exhausted memory or a missing API costs that section and no other. results.json is
written after each of them.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from kit import machine
from kit.expected import compare
from kit.results import Results, Row, SectionResult
from kit.runner import Interrupted, ask, play
from kit.section import Section
from kit.summary import summary

import penstock.runtime.pipeline

HERE = Path(__file__).parent
#: Seconds within which a trivial kernel has to come back after a section.
SICK_S = 20.0
#: Exit statuses, as those of Penstock's own commands.
PASSED, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Entry:
    """A section: it begins only with `least_s` seconds left, and is killed after `limit_s`."""

    name: str
    least_s: float
    limit_s: float


#: By worth: what comes last is what a run that is short of time goes without.
SECTIONS = (
    Entry("facts", 5, 45),
    Entry("smoke", 20, 60),
    Entry("tests", 60, 120),
    Entry("one_gpu", 60, 100),
    Entry("graphs", 40, 60),
    Entry("profile", 40, 70),
    Entry("fidelity", 30, 80),
    Entry("memory", 20, 40),
    Entry("offload", 20, 40),
    Entry("processes", 20, 50),
    Entry("nccl", 5, 20),
    Entry("timeline", 5, 15),
)
#: With small sizes a section takes seconds, on a busy machine of two cores up to half a minute;
#: what takes longer hangs.
SMOKE_LEAST_S, SMOKE_LIMIT_S = 0, 180


def options(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--only", action="append", default=[], help="sections, by comma")
    parser.add_argument("--skip", action="append", default=[], help="sections, by comma")
    parser.add_argument("--limit", type=float, default=530.0, help="seconds for everything")
    parser.add_argument("--section-limit", type=float, help="seconds for each section")
    parser.add_argument("--smoke", action="store_true", help="small sizes, on the CPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--sections-from", type=Path, help="a folder of other sections")
    arguments = parser.parse_args(words)
    arguments.only = _names(arguments.only)
    arguments.skip = _names(arguments.skip)
    return arguments


def _names(words: list[str]) -> list[str]:
    return [name.strip().replace("-", "_") for word in words for name in word.split(",") if name]


def chosen(arguments: argparse.Namespace) -> list[tuple[Entry, Path]]:
    """The sections to run, with their files.

    Raises:
        ValueError: a name is not that of a section.
    """
    folder = HERE / "sections"
    entries = list(SECTIONS)
    if arguments.sections_from is not None:
        folder = arguments.sections_from
        files = sorted(folder.glob("[!_]*.py"))
        entries = [Entry(file.stem, 0, SMOKE_LIMIT_S) for file in files]
    known_names = [entry.name for entry in entries]
    unknown = sorted({*arguments.only, *arguments.skip} - set(known_names))
    if unknown:
        raise ValueError(
            f"no section called {', '.join(unknown)}; there are {', '.join(known_names)}"
        )
    selected = [entry for entry in entries if not arguments.only or entry.name in arguments.only]
    return [
        (entry, folder / f"{entry.name}.py")
        for entry in selected
        if entry.name not in arguments.skip
    ]


@dataclass
class Run:
    """A run from its first section to its last."""

    arguments: argparse.Namespace
    results: Results
    scratch: Path
    device: torch.device
    started: float

    def sections(self, entries: list[tuple[Entry, Path]]) -> None:
        """Run all of them in turn.

        Raises:
            KeyboardInterrupt: Ctrl-C; what there is has been written.
        """
        for number, (entry, file) in enumerate(entries):
            try:
                self._section(entry, file)
            except Interrupted as interruption:
                self.results.sections.append(interruption.result)
                self._skip(entries[number + 1 :], "interrupted")
                raise KeyboardInterrupt from interruption
            self.write()
            if self._sick():
                self.results.ended = f"ended: the device did not answer after {entry.name}"
                self._skip(entries[number + 1 :], "the device does not answer")
                return
        self.results.ended = "complete"

    def _section(self, entry: Entry, file: Path) -> None:
        least_s, limit_s = entry.least_s, entry.limit_s
        if self.arguments.smoke:
            least_s, limit_s = SMOKE_LEAST_S, SMOKE_LIMIT_S
        if self.arguments.section_limit is not None:
            limit_s = self.arguments.section_limit
        left_s = self.arguments.limit - (time.monotonic() - self.started)
        if left_s <= least_s:
            self._skip([(entry, file)], "out of time")
            return
        print(f"{entry.name} ... {left_s:.0f} s left", flush=True)
        section = Section(
            name=entry.name,
            device=self.device,
            smoke=self.arguments.smoke,
            out=self.arguments.out,
            rows_file=self.scratch / f"{entry.name}.jsonl",
            limit_s=min(limit_s, left_s),
            earlier={done.name: done.rows for done in self.results.sections},
        )
        before = self._conditions()
        result = play(file, section, self.scratch / f"{entry.name}.log")
        result.conditions = {"before": before, "after": self._conditions()}
        self.results.sections.append(result)
        print(f"{entry.name}: {result.status}, {result.seconds:.1f} s", flush=True)

    def _skip(self, entries: list[tuple[Entry, Path]], reason: str) -> None:
        for entry, _ in entries:
            self.results.sections.append(SectionResult(entry.name, "skipped", error=reason))

    def _conditions(self) -> dict[str, str]:
        """Clocks, power and temperature of the card."""
        return machine.query(machine.CONDITIONS) if self.device.type == "cuda" else {}

    def _sick(self) -> bool:
        """Whether a trivial kernel does not come back."""
        if self.device.type != "cuda":
            return False
        return ask(machine.answers, self.scratch, "sick", SICK_S) is not True

    def write(self) -> None:
        """Write results.json and summary.txt as things stand."""
        self.results.seconds = round(time.monotonic() - self.started, 1)
        gpu = self.results.machine.get("gpu") if self.device.type == "cuda" else None
        self.results.expected = compare(self.results.sections, gpu)
        self.results.write(self.arguments.out / "results.json")
        (self.arguments.out / "summary.txt").write_text(summary(self.results), encoding="utf-8")


def main(words: list[str] | None = None) -> int:
    """Run the sections; returns the exit status.

    0: every section that was begun passed. 1: one did not. 2: the words are off, or there is no
    GPU. 130: Ctrl-C.
    """
    started = time.monotonic()
    # What ends a run by force at its limit gets what there is, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments = options(words)
    try:
        entries = chosen(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return USAGE
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder:
        scratch = Path(folder)
        facts = ask(machine.machine, scratch, "machine", 60.0)
        machine_facts: Row = facts if isinstance(facts, dict) else {}
        device = _device(arguments, machine_facts)
        if device is None:
            print(
                "there is no CUDA device here, and this benchmark is of GPUs:"
                " --smoke runs it with small sizes on the CPU",
                file=sys.stderr,
            )
            return USAGE
        if arguments.sections_from is None:
            # The first optimizer imports it, for seconds: once here, not in every section.
            importlib.import_module("torch._dynamo")
        results = Results(
            machine.commit(), str(device), arguments.smoke, arguments.limit, machine_facts
        )
        run = Run(arguments, results, scratch, device, started)
        return _finish(run, entries)


def _device(arguments: argparse.Namespace, machine_facts: Row) -> torch.device | None:
    """Where sections compute; None where a GPU is wanted and there is none."""
    if arguments.device == "cpu" or (arguments.smoke and arguments.device == "auto"):
        return torch.device("cpu")
    return torch.device("cuda", 0) if machine_facts.get("gpu") else None


def _finish(run: Run, entries: list[tuple[Entry, Path]]) -> int:
    status = PASSED
    try:
        run.sections(entries)
    except KeyboardInterrupt:
        run.results.ended = "interrupted"
        status = INTERRUPTED
    run.write()
    print((run.arguments.out / "summary.txt").read_text(encoding="utf-8"), flush=True)
    bad = ("failed", "timeout", "crashed")
    sick = run.results.ended.startswith("ended")
    if status == PASSED and (sick or any(part.status in bad for part in run.results.sections)):
        return FAILED
    return status


if __name__ == "__main__":
    assert (
        penstock.runtime.pipeline
    )  # loaded before sections are forked, so that none loads it again
    sys.exit(main())
