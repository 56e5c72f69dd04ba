"""Question: which rules, how deep, how often; and the cases that answer it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from penstock.errors import PenstockError, SettingError
from penstock.schedule.op import Schedule
from penstock.search.schedules import schedule
from penstock.study.cut import cut
from penstock.study.tasks import StudyTask, study_task
from penstock.tracing.chain import chain
from penstock.training.data.batches import count_batches
from penstock.training.task import make_task
from penstock.weights import uses
from penstock.weights.catalogue import WEIGHT_RULES, weight_rule
from penstock.weights.choice import rule_of, schedule_for

#: All others are held against it.
BASELINE = "flush"
#: Torch's name of each optimizer that a configuration may name.
OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
#: PipeMare's learning rates come back to the usual ones in the first quarter of the run. Its paper
#: chooses their number by model.
_ANNEALED = 4
#: No more micro-batches are tried than so many for each stage.
_MOST_PER_STAGE = 4

MicroBatches = Literal["least", "stages"]


class Group(NamedTuple):
    """Cases that differ in nothing but their seeds."""

    task: str
    optimizer: str
    rule: str
    stages: int
    micro_batches: int

    @property
    def baseline(self) -> Group:
        """Flush, all else the same: what it learns is what these could learn. Batch norm sees one
        micro-batch at a time, so their number counts, too.
        """
        return self._replace(rule=BASELINE)


@dataclass(frozen=True)
class Case:
    """One run: everything that what is learned depends on. Batches of one task and seed are the
    same in all cases.

    `options` are the weight rule's; `lr` and the samples of a batch are the same for all rules.
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
        """A text that no other case has."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def group(self) -> Group:
        """What cases that differ in their seeds have in common."""
        return Group(self.task, self.optimizer, self.rule, self.stages, self.micro_batches)

    @cached_property
    def programs(self) -> Schedule:
        """The schedule."""
        return schedule(self.schedule, self.stages, self.micro_batches)

    def __str__(self) -> str:
        return f"{self.task} {self.rule} S={self.stages} M={self.micro_batches} {self.optimizer} seed {self.seed}"


@dataclass(frozen=True)
class Refused:
    """A combination that makes no sense, and why."""

    task: str
    rule: str
    stages: int
    reason: str


@dataclass(frozen=True)
class Question:
    """Which rules lose accuracy, and when?

    Attributes:
        tasks, rules, depths: names, names, numbers of stages. Flush is always among the rules.
        seeds: how many, from 0: each has its own initial weights and order of the data, the same
        for all rules. epochs: times through the data; None for the task's own number. optimizer:
        what every rule runs with whose paper does not ask for another. lr_scale: learning rates are
        so many times the task's own. micro_batches: "least": as few as the rule goes with, so that
        gradients are as old as they get, and one for each stage
            where none is old. "stages": one for each stage, or more where the rule wants more.
            Flush is run with every number that another rule has.
        most_batches: stop after so many.
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
        for word, number in (
            ("depth", min(self.depths)),
            ("seeds", self.seeds),
            ("batches", self.most_batches or 1),
        ):
            if number < 1:
                raise SettingError(f"{word} {number}: there is at least 1")
        for word, amount in (("epochs", self.epochs), ("lr-scale", self.lr_scale)):
            if amount is not None and not 0 < amount < float("inf"):
                raise SettingError(f"{word} {amount:g}: it must be above 0")
        if self.optimizer not in OPTIMIZERS:
            raise SettingError(
                f"optimizer is one of {', '.join(OPTIMIZERS)}, not {self.optimizer!r}"
            )
        if self.micro_batches not in ("least", "stages"):
            raise SettingError(f"micro-batches is 'least' or 'stages', not {self.micro_batches!r}")

    def cases(self) -> tuple[list[Case], list[Refused]]:
        """The cases, those of one seed together so that an interrupted study has something whole to
        show; and what is refused.

        Raises:
            SettingError: a model cannot be cut into so many stages.
        """
        found: list[Case] = []
        refused: list[Refused] = []
        for name in self.tasks:
            for case in self._of_task(study_task(name)):
                if isinstance(case, Refused):
                    refused.append(case)
                else:
                    found += [flush_for(case), case]
        return [
            replace(case, seed=seed) for seed in range(self.seeds) for case in dict.fromkeys(found)
        ], refused

    def _of_task(self, task: StudyTask) -> Iterator[Case | Refused]:
        """Those of seed 0, without flush for each."""
        made = make_task(task.config(self.optimizer, 1.0, 0))
        per_epoch = count_batches(len(made.data.train_inputs), task.settings.batch, drop_last=True)
        batches = max(1, round((self.epochs or task.epochs) * per_epoch))
        batches = min(batches, self.most_batches or batches)
        traced = chain(made.model)
        for stages in self.depths:
            cut(traced, made.data.train_inputs, stages)
            for rule in self.rules:
                optimizer = self._optimizer(rule)
                try:
                    parts = self._parts(rule, stages)
                except PenstockError as error:
                    yield Refused(task.name, rule, stages, " ".join(str(error).split()))
                    continue
                options = (
                    {"annealing": float(batches // _ANNEALED)}
                    if "annealing" in weight_rule(rule).options
                    else {}
                )
                yield Case(
                    task.name,
                    rule,
                    schedule_for(rule),
                    stages,
                    parts,
                    optimizer,
                    self.lr_scale * task.lr[optimizer],
                    batches,
                    0,
                    tuple(options.items()),
                )

    def _optimizer(self, rule: str) -> str:
        """The one asked for, if the rule's paper has a formula for it, else the first that it has."""
        allowed = weight_rule(rule).optimizers
        if not allowed or OPTIMIZERS[self.optimizer] in allowed:
            return self.optimizer
        return next(name for name, known in OPTIMIZERS.items() if known in allowed)

    def _parts(self, rule: str, stages: int) -> int:
        """Micro-batches of a batch.

        Raises:
            PenstockError: the rule does not go with any number that was tried.
        """
        refusal: PenstockError | None = None
        for parts in range(
            stages if self.micro_batches == "stages" else 1, max(2, _MOST_PER_STAGE * stages) + 1
        ):
            try:
                ages = _ages(rule, stages, parts)
            except PenstockError as error:
                refusal = refusal or error
                continue
            return parts if max(ages) > 0 else max(parts, stages)
        assert refusal is not None
        raise refusal


def flush_for(case: Case, micro_batches: int | None = None) -> Case:
    """The case of flush that a case is held against; or that with another number of micro-batches."""
    return replace(
        case,
        rule=BASELINE,
        schedule=schedule_for(BASELINE),
        options=(),
        micro_batches=micro_batches or case.micro_batches,
    )


def _ages(rule: str, stages: int, micro_batches: int) -> list[int]:
    """Per stage, the most updates that a gradient is old, if the rule goes with so many
    micro-batches.
    """
    made = schedule(schedule_for(rule), stages, micro_batches)
    return [max(ages, default=0) for ages in uses.staleness(made, rule_of(made, rule))]


def all_rules() -> tuple[str, ...]:
    """The names of all weight rules, flush first."""
    return (BASELINE, *(name for name in WEIGHT_RULES.entries() if name != BASELINE))
