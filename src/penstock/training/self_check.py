"""The self-check from the command line: one batch of real data through a pipeline on ranks, and
through plain training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.errors import SettingError
from penstock.plan.plan import Plan
from penstock.runtime.compare import Comparison
from penstock.runtime.launch import launch
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.op import Schedule
from penstock.tracing.chain import chain
from penstock.training.config import TrainConfig
from penstock.training.optimizer import optimizer_factory, training_options
from penstock.training.task import make_task


@dataclass(frozen=True)
class SelfCheck:
    """What is to be checked: a model of the zoo on its data, cut as a plan says, or as evenly as
    may be under a schedule.

    `words` are more keywords of `Pipeline`, such as recompute.
    """

    config: TrainConfig
    schedule: Schedule | None = None
    plan: Plan | None = None
    words: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Ranks that it takes."""
        if self.plan is not None:
            return self.plan.ranks
        return 1 if self.schedule is None else self.schedule.ranks

    def run(self, *, threads: bool = False) -> Comparison:
        """Check on real ranks, each a process, or on threads of this one.

        Raises:
            RunError: a rank failed.
            PenstockError: what is asked for cannot be done.
        """
        self._check_stages()
        if threads:
            return check(self, "threads")
        found: list[Comparison] = launch(check, self.ranks, self, "processes")
        return found[0]

    def _check_stages(self) -> None:
        """Before any rank is started: whether the model has a layer for every stage."""
        if self.schedule is not None and self.schedule.stages > (
            layers := len(chain(make_task(self.config).model))
        ):
            raise SettingError(
                f"{self.config.model} has {layers} layers, which make at most as many stages, not {self.schedule.stages}"
            )


def check(asked: SelfCheck, executor: str) -> Comparison:
    """As one rank; the comparison is on rank 0."""
    task = make_task(asked.config)
    words = dict(asked.words)
    if asked.schedule is not None:
        layers, stages = len(chain(task.model)), asked.schedule.stages
        words["balance"] = [layers // stages + (stage < layers % stages) for stage in range(stages)]
        words["schedule"] = asked.schedule
    pipe = Pipeline(
        task.model,
        asked.plan,
        loss=task.loss,
        optimizer=optimizer_factory(asked.config),
        seed=asked.config.seed,
        deadline_s=asked.config.deadline_s,
        executor=executor,
        **words,
        **training_options(asked.config),
    )
    x, y = next(task.epoch(asked.config, 0))
    # A step first: of what is compared then, weights have moved on every rank by its own update.
    pipe.train_batch(x, y)
    found = pipe.compare_with_one_device(x, y)
    pipe.close()
    return found
