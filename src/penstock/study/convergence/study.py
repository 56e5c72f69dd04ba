"""A whole study in one folder: cases are run or read from the records, then throughputs, tables and
figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.cluster.local import available_cores
from penstock.errors import RunError
from penstock.files.text import one_line
from penstock.measure.profiler import machine_facts
from penstock.profile.profile import Profile
from penstock.store import write_file
from penstock.study.convergence.experiment import Case, Experiment, Group
from penstock.study.convergence.figure import draw_figures
from penstock.study.convergence.records import RecordFile
from penstock.study.convergence.report import page
from penstock.study.convergence.results import Results
from penstock.study.convergence.runner import Failed, Report, run_cases
from penstock.study.convergence.stage_cut import cut_into_stages
from penstock.study.convergence.tasks import study_task
from penstock.study.convergence.throughput import (
    Throughput,
    fastest_flush,
    measure,
    profile_of,
    throughput,
)
from penstock.tracing.traced_chain import chain
from penstock.training.task import make_task

#: Prints a message about the progress.
Say = Callable[[str], None]


@dataclass(frozen=True)
class _Models:
    """The models of the tasks.

    Attributes:
        profiles: by task.
        lengths: layers per stage, by task and depth.
    """

    profiles: Mapping[str, Profile]
    lengths: Mapping[tuple[str, int], Sequence[int]]

    def fastest_flush(self, case: Case) -> Case:
        """Return the case of flush to compare the time of a case with."""
        return fastest_flush(case, self.profiles[case.task], self.lengths[case.task, case.stages])

    def throughput(self, case: Case, measured_s: float | None) -> Throughput:
        """Return the throughput of a case, whose batches take `measured_s` if they were timed."""
        lengths = self.lengths[case.task, case.stages]
        return throughput(case, self.profiles[case.task], lengths, measured_s)


@dataclass(frozen=True)
class Study:
    """An experiment and the folder of its results.

    Attributes:
        experiment: what to run.
        folder: for the records, the profiles and the results.
        jobs: number of cases to run in parallel.
        measured: whether batches are also timed in real processes.
    """

    experiment: Experiment
    folder: Path
    jobs: int
    measured: bool = True

    def run(self, start_cases: Callable[[int], Report], say: Say) -> Results:
        """Run the cases that have no record yet, and write `study.json`, `study.md` and the
        figures.

        Args:
            start_cases: called with the number of cases to run; returns the function to call with
                the result of each.
            say: called with other messages.

        Raises:
            PenstockError: the experiment is impossible, the folder cannot be written, or a process
                was killed.
        """
        cases, refused = self.experiment.cases()
        record_file = RecordFile(self.folder)
        models = _Models(self._profiles(say), self._lengths())
        timed_cases = {case.group: case for case in cases}
        flush_cases = {group: models.fastest_flush(case) for group, case in timed_cases.items()}
        # With numbers of micro-batches that no case of the experiment may have: timed as well.
        timed_cases |= {case.group: case for case in flush_cases.values()}
        pending = sum(case.key not in record_file.records for case in cases)
        if pending < len(cases):
            recorded = len(cases) - pending
            say(f"{recorded} of {len(cases)} cases are in {record_file.path} already")
        failed = run_cases(cases, record_file, self.jobs, start_cases(pending))
        failed_timings = self._measure(timed_cases, record_file, say) if self.measured else []
        throughputs = {
            group: models.throughput(case, record_file.measured.get(group))
            for group, case in timed_cases.items()
        }
        records = record_file.of(cases)
        results = Results(
            self.experiment,
            tuple(records),
            throughputs,
            fastest={group: case.group for group, case in flush_cases.items()},
            refused=tuple(refused),
            failed=tuple((str(entry.case), entry.reason) for entry in (*failed, *failed_timings)),
            machine={
                **machine_facts(torch.device("cpu")),
                "threads": "1",
                "torch": torch.__version__,
            },
            missing=len(cases) - len(records) - len(failed),
        )
        if records:
            self._write(results)
        return results

    def _profiles(self, say: Say) -> dict[str, Profile]:
        """Load or measure the profile of each task's model."""
        profiles = {}
        for task in self.experiment.tasks:
            path = self.folder / f"{task}-profile.json"
            if not path.exists():
                say(f"measuring the layers of {task} …")
            profiles[task] = profile_of(task, path)
        return profiles

    def _measure(
        self, timed_cases: Mapping[Group, Case], record_file: RecordFile, say: Say
    ) -> list[Failed]:
        """Time batches of the cases that have no more ranks than the host has cores, one case after
        the other, and return those that failed.
        """
        cores = available_cores()
        failed = []
        for group, case in timed_cases.items():
            if group in record_file.measured or not 1 < case.programs.ranks <= cores:
                continue
            say(
                f"timing {case.task} {case.rule} S={case.stages} M={case.micro_batches} "
                f"{case.optimizer} in {case.programs.ranks} processes …"
            )
            try:
                record_file.add(measure(case))
            except RunError as error:
                failed.append(Failed(case, one_line(error)))
        return failed

    def _lengths(self) -> dict[tuple[str, int], list[int]]:
        """Cut the models, and return the layers per stage by task and depth."""
        lengths = {}
        for name in self.experiment.tasks:
            task = make_task(study_task(name).settings)
            traced = chain(task.model)
            for stages in self.experiment.depths:
                lengths[name, stages] = cut_into_stages(traced, task.data.train_inputs, stages)
        return lengths

    def _write(self, results: Results) -> None:
        """Write the figures, the results as JSON, and the report."""
        figure_names = draw_figures(results, self.folder)
        write_file(self.folder / "study.json", results.as_json())
        write_file(self.folder / "study.md", page(results, figure_names))
