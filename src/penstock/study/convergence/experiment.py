"""Settings of a convergence experiment, and the cases that it consists of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from penstock.errors import PenstockError, SettingError
from penstock.files.text import one_line
from penstock.schedule.op import Schedule
from penstock.search.schedules import schedule
from penstock.study.convergence.stage_cut import cut_into_stages
from penstock.study.convergence.tasks import StudyTask, study_task
from penstock.study.settings import MOST_REPETITIONS
from penstock.tracing.traced_chain import chain
from penstock.training.data.batches import count_batches
from penstock.training.task import make_task
from penstock.weights import weight_uses as uses
from penstock.weights.catalogue import WEIGHT_RULES, weight_rule
from penstock.weights.compatibility import rule_of, schedule_for

#: Rule with which all others are compared.
BASELINE = "flush"
#: Torch's name of each optimizer that a configuration may name.
OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
#: PipeMare's learning rates return to the usual ones in the first quarter of the run. Its paper
#: chooses the number of steps by model.
_ANNEALING_DIVISOR = 4
#: Most micro-batches per stage that are tried for a rule.
_MOST_PER_STAGE = 4

MicroBatches = Literal["least", "stages"]


class Group(NamedTuple):
    """What cases that differ only in their seeds have in common."""

    task: str
    optimizer: str
    rule: str
    stages: int
    micro_batches: int

    @property
    def method(self) -> tuple[str, str]:
        """Optimizer and rule."""
        return self.optimizer, self.rule

    @property
    def baseline(self) -> Group:
        """The group of flush with all else equal, to compare with.

        The number of micro-batches is equal as well, because batch norm sees one micro-batch at a
        time.
        """
        return self._replace(rule=BASELINE)


@dataclass(frozen=True)
class Case:
    """One run: all settings that determine what it learns.

    The batches of one task and seed are the same in all cases. `options` are the weight rule's;
    `lr` and the samples of a batch are the same for all rules.
    """

    task: str
    rule: str
    schedule: str
    stages: int
    micro_batches: int
    optimizer: str
    lr: float
    batches: int
    seed: int
    options: tuple[tuple[str, float], ...] = ()

    @property
    def key(self) -> str:
        """A text that identifies the case."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def group(self) -> Group:
        """The group of the case: all but its seed."""
        return Group(self.task, self.optimizer, self.rule, self.stages, self.micro_batches)

    @cached_property
    def programs(self) -> Schedule:
        """The schedule with its programs."""
        return schedule(self.schedule, self.stages, self.micro_batches)

    def __str__(self) -> str:
        return f"{self.task} {self.rule} S={self.stages} M={self.micro_batches} {self.optimizer} seed {self.seed}"


@dataclass(frozen=True)
class Refused:
    """An impossible combination of task, rule and depth, and the reason."""

    task: str
    rule: str
    stages: int
    reason: str


@dataclass(frozen=True)
class Experiment:
    """Settings of the experiment "which weight rules lose accuracy, and when?".

    Attributes:
        tasks: names of study tasks.
        rules: names of weight rules; empty: all. Flush always runs as well, with every number of
            micro-batches that another rule has.
        depths: numbers of stages.
        seeds: number of seeds, from 0. Each has its own initial weights and order of the data, the
            same for all rules.
        epochs: passes through the data; None: the task's own number.
        optimizer: for all rules whose paper has a formula for it; others use another.
        lr_scale: factor applied to the task's learning rates.
        micro_batches: "least": the fewest that the rule supports, where gradients are most stale;
            one per stage if none is stale. "stages": one per stage, or more if the rule needs more.
        most_batches: stop each run after this many batches.
    """

    tasks: tuple[str, ...] = ("digits", "gpt")
    rules: tuple[str, ...] = ()
    depths: tuple[int, ...] = (2, 4, 8)
    seeds: int = 3
    epochs: float | None = None
    optimizer: str = "sgd"
    lr_scale: float = 1.0
    micro_batches: MicroBatches = "least"
    most_batches: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(dict.fromkeys(self.rules)) or all_rules())
        object.__setattr__(self, "depths", tuple(dict.fromkeys(self.depths)))
        for name in self.tasks:
            study_task(name)
        for name in self.rules:
            weight_rule(name)
        if not self.tasks or not self.depths:
            raise SettingError("a study needs at least one task and one depth")
        self._check_numbers()
        if self.optimizer not in OPTIMIZERS:
            raise SettingError(
                f"optimizer must be one of {', '.join(OPTIMIZERS)}, not {self.optimizer!r}"
            )
        if self.micro_batches not in ("least", "stages"):
            raise SettingError(
                f"micro-batches must be 'least' or 'stages', not {self.micro_batches!r}"
            )

    def _check_numbers(self) -> None:
        """Raise SettingError if a count is out of range or a factor is not positive and finite."""
        counts = {
            "depth": min(self.depths),
            "seeds": self.seeds,
            "batches": self.most_batches or 1,
        }
        for name, count in counts.items():
            if count < 1:
                raise SettingError(f"{name} {count}: must be at least 1")
        if self.seeds > MOST_REPETITIONS:
            raise SettingError(f"seeds {self.seeds}: must be at most {MOST_REPETITIONS:,}")
        for name, factor in (("epochs", self.epochs), ("lr-scale", self.lr_scale)):
            if factor is not None and not 0 < factor < float("inf"):
                raise SettingError(f"{name} {factor:g}: must be above 0")

    def cases(self) -> tuple[list[Case], list[Refused]]:
        """List all cases, and the combinations that are impossible.

        Cases of one seed are adjacent, so that an interrupted study has complete seeds.

        Raises:
            SettingError: a model has fewer layers than stages.
        """
        cases: list[Case] = []
        refused: list[Refused] = []
        for name in self.tasks:
            for case in self._cases_of_task(study_task(name)):
                if isinstance(case, Refused):
                    refused.append(case)
                else:
                    cases += [flush_case(case), case]
        distinct_cases = list(dict.fromkeys(cases))
        seeded_cases = [
            replace(case, seed=seed) for seed in range(self.seeds) for case in distinct_cases
        ]
        return seeded_cases, refused

    def _cases_of_task(self, task: StudyTask) -> Iterator[Case | Refused]:
        """Yield the cases of a task with seed 0, without the runs of flush to compare with."""
        train_task = make_task(task.config(self.optimizer, 1.0, 0))
        inputs = train_task.data.train_inputs
        per_epoch = count_batches(len(inputs), task.settings.batch, drop_last=True)
        batches = max(1, round((self.epochs or task.epochs) * per_epoch))
        batches = min(batches, self.most_batches or batches)
        traced = chain(train_task.model)
        for stages in self.depths:
            cut_into_stages(traced, inputs, stages)  # raises SettingError if it cannot be cut
            for rule in self.rules:
                try:
                    micro_batches = self._micro_batches_for(rule, stages)
                except PenstockError as error:
                    yield Refused(task.name, rule, stages, one_line(error))
                    continue
                optimizer = self._optimizer_for(rule)
                options: tuple[tuple[str, float], ...] = ()
                if "annealing" in weight_rule(rule).options:
                    options = (("annealing", float(batches // _ANNEALING_DIVISOR)),)
                yield Case(
                    task.name,
                    rule,
                    schedule_for(rule),
                    stages,
                    micro_batches,
                    optimizer,
                    self.lr_scale * task.lr[optimizer],
                    batches,
                    0,
                    options,
                )

    def _optimizer_for(self, rule: str) -> str:
        """Return the experiment's optimizer if the rule supports it, else the first supported
        one.
        """
        supported = weight_rule(rule).optimizers
        if not supported or OPTIMIZERS[self.optimizer] in supported:
            return self.optimizer
        return next(name for name, torch_name in OPTIMIZERS.items() if torch_name in supported)

    def _micro_batches_for(self, rule: str, stages: int) -> int:
        """Choose the number of micro-batches per batch for a rule.

        Raises:
            PenstockError: the rule supports none of the numbers that are tried.
        """
        fewest = stages if self.micro_batches == "stages" else 1
        most = max(2, _MOST_PER_STAGE * stages)
        first_error: PenstockError | None = None
        for micro_batches in range(fewest, most + 1):
            try:
                staleness = _staleness(rule, stages, micro_batches)
            except PenstockError as error:
                first_error = first_error or error
                continue
            return micro_batches if max(staleness) > 0 else max(micro_batches, stages)
        assert first_error is not None
        raise first_error


def flush_case(case: Case, micro_batches: int | None = None) -> Case:
    """Return the case of flush to compare a case with; with another number of micro-batches if one
    is given.
    """
    return replace(
        case,
        rule=BASELINE,
        schedule=schedule_for(BASELINE),
        options=(),
        micro_batches=micro_batches or case.micro_batches,
    )


def _staleness(rule: str, stages: int, micro_batches: int) -> list[int]:
    """Return per stage the most updates by which a gradient is stale.

    Raises:
        PenstockError: the rule does not support this number of micro-batches.
    """
    programs = schedule(schedule_for(rule), stages, micro_batches)
    return [max(ages, default=0) for ages in uses.readings(programs, rule_of(programs, rule)).ages]


def all_rules() -> tuple[str, ...]:
    """Return the names of all weight rules, flush first."""
    return (BASELINE, *(name for name in WEIGHT_RULES.entries() if name != BASELINE))
