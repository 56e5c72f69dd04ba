"""Self-check from the command line: run one batch of real data through a pipeline on ranks, and
through plain training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.errors import SettingError
from penstock.plan.plan import Plan
from penstock.ranks.processes.launch import launch
from penstock.runtime.comparison.one_device_comparison import Comparison
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.op import Schedule
from penstock.training.config import TrainConfig
from penstock.training.optimizer import pipeline_options
from penstock.training.task import make_task


@dataclass(frozen=True)
class SelfCheck:
    """A pipeline to check: a model on its data, cut as a plan says, or evenly under a schedule.

    `pipeline_options` are further keyword arguments of `Pipeline`, such as recompute.
    """

    config: TrainConfig
    schedule: Schedule | None = None
    plan: Plan | None = None
    pipeline_options: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Number of ranks of the pipeline."""
        if self.plan is not None:
            return self.plan.ranks
        return 1 if self.schedule is None else self.schedule.ranks

    def run(self, *, threads: bool = False) -> Comparison:
        """Run the check on real ranks, each a process, or on threads of this process.

        Raises:
            RunError: a rank failed.
            PenstockError: the settings are invalid.
        """
        self._check_stages()
        if threads:
            return check(self, "threads")
        comparisons: list[Comparison] = launch(check, self.ranks, self, "processes")
        return comparisons[0]

    def _check_stages(self) -> None:
        """Refuse more stages than the model has layers, before any rank is started."""
        if self.schedule is None:
            return
        layers = len(make_task(self.config).chain)
        if self.schedule.stages > layers:
            raise SettingError(
                f"{self.config.model} has {layers} layers, which make at most as many stages, not "
                f"{self.schedule.stages}"
            )


def check(setup: SelfCheck, executor: str) -> Comparison:
    """Run the check as one rank; rank 0 returns the comparison."""
    config = setup.config
    task = make_task(config)
    options = dict(setup.pipeline_options)
    if setup.schedule is not None:
        layers, stages = len(task.chain), setup.schedule.stages
        options["balance"] = [
            layers // stages + (stage < layers % stages) for stage in range(stages)
        ]
        options["schedule"] = setup.schedule
    pipe = Pipeline(
        task.chain,
        setup.plan,
        loss=task.loss,
        executor=executor,
        **options,
        **pipeline_options(config),
    )
    x, y = next(task.epoch(config, 0))
    # One step is trained first, so that the comparison also covers weights after an update on
    # every rank.
    pipe.train_batch(x, y)
    comparison = pipe.compare_with_one_device(x, y)
    pipe.close()
    return comparison
