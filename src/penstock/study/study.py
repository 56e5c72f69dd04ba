"""A whole study: cases run or found in the notebook, paces, tables, figures, one folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.draw.output import write
from penstock.errors import RunError
from penstock.measure.profile import machine_facts
from penstock.profile.profile import Profile
from penstock.study.conduct import Failed, Told, conduct
from penstock.study.cut import cut
from penstock.study.figure import figures
from penstock.study.pace import fastest_flush, measure, pace, profile_of
from penstock.study.question import Case, Group, Question
from penstock.study.record import Notebook
from penstock.study.report import page
from penstock.study.results import Results
from penstock.study.tasks import study_task
from penstock.tracing.chain import chain
from penstock.training.task import make_task

#: Told in words what is going on.
Say = Callable[[str], None]


@dataclass(frozen=True)
class Study:
    """A question with its cases, and where what comes of it is kept.

    Attributes:
        question: what is asked.
        folder: holds the notebook, the profiles, and in the end the results.
        jobs: cases at a time.
        measured: whether batches are timed in real processes too.
    """

    question: Question
    folder: Path
    jobs: int
    measured: bool = True

    def run(self, told: Callable[[int], Told], say: Say) -> Results:
        """Do what is not done yet, and write `study.json`, `study.md` and the figures.

        Args:
            told: from the number of cases to do to who is told of each.
            say: told what goes on besides.

        Raises:
            PenstockError: the question makes no sense, the folder cannot be written, or a process
            was killed.
        """
        cases, refused = self.question.cases()
        notebook = Notebook(self.folder)
        profiles = self._profiles(say)
        lengths = self._lengths()
        one_of = {case.group: case for case in cases}
        quickest = {
            group: fastest_flush(case, profiles[case.task], lengths[case.task, case.stages])
            for group, case in one_of.items()
        }
        one_of |= {case.group: case for case in quickest.values()}
        left = sum(case.key not in notebook.records for case in cases)
        if left < len(cases):
            say(f"{len(cases) - left} of {len(cases)} cases are in {notebook.path} already")
        failed = conduct(cases, notebook, self.jobs, told(left))
        more = self._measure(one_of, notebook, say) if self.measured else []
        paces = {
            group: pace(
                case,
                profiles[case.task],
                lengths[case.task, case.stages],
                notebook.measured.get(group),
            )
            for group, case in one_of.items()
        }
        records = notebook.of(cases)
        fastest = {group: case.group for group, case in quickest.items()}
        results = Results(
            self.question,
            tuple(records),
            paces,
            fastest,
            tuple(refused),
            tuple((str(each.case), each.reason) for each in [*failed, *more]),
            {**machine_facts(torch.device("cpu")), "threads": "1", "torch": torch.__version__},
            len(cases) - len(records) - len(failed),
        )
        if records:
            self._write(results)
        return results

    def _profiles(self, say: Say) -> dict[str, Profile]:
        found = {}
        for task in self.question.tasks:
            path = self.folder / f"{task}-profile.json"
            if not path.exists():
                say(f"measuring the layers of {task} …")
            found[task] = profile_of(task, path)
        return found

    def _measure(self, one_of: Mapping[Group, Case], notebook: Notebook, say: Say) -> list[Failed]:
        """Time what has no more ranks than there are cores, one after the other, when nothing else
        runs.
        """
        cores = len(os.sched_getaffinity(0))
        failed = []
        for group, case in one_of.items():
            if group in notebook.measured or not 1 < case.programs.ranks <= cores:
                continue
            say(
                f"timing {case.task} {case.rule} S={case.stages} M={case.micro_batches} {case.optimizer} in {case.programs.ranks} processes …"
            )
            try:
                notebook.add(measure(case))
            except RunError as error:
                failed.append(Failed(case, " ".join(str(error).split())))
        return failed

    def _lengths(self) -> dict[tuple[str, int], list[int]]:
        """Layers per stage, by task and depth."""
        tasks = {name: make_task(study_task(name).settings) for name in self.question.tasks}
        return {
            (name, stages): cut(chain(task.model), task.data.train_inputs, stages)
            for name, task in tasks.items()
            for stages in self.question.depths
        }

    def _write(self, results: Results) -> None:
        drawn = figures(results, self.folder)
        write(self.folder / "study.json", results.as_json())
        write(self.folder / "study.md", page(results, drawn))
