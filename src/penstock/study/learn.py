"""Learn: train one case through its pipeline and test what it has learned."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator

from torch import Tensor

from penstock.runtime.pipeline import Pipeline
from penstock.study.cut import cut
from penstock.study.question import Case
from penstock.study.record import Record
from penstock.study.tasks import study_task
from penstock.tracing.chain import chain
from penstock.training.config import TrainConfig
from penstock.training.data.batches import batches
from penstock.training.optimizer import optimizer_factory
from penstock.training.task import Task, make_task
from penstock.training.testing import test

#: A loss above this comes back no more.
_RUNAWAY = 1e3


def pipeline(case: Case, executor: str) -> tuple[Pipeline, Task, TrainConfig]:
    """The pipeline of a case, what it trains, and the run's settings."""
    config = study_task(case.task).config(case.optimizer, case.lr, case.seed)
    task = make_task(config)
    traced = chain(task.model)
    pipe = Pipeline(
        traced,
        loss=task.loss,
        optimizer=optimizer_factory(config),
        balance=cut(traced, task.data.train_inputs, case.stages),
        schedule=case.programs,
        weights=case.rule,
        weights_options=dict(case.options),
        seed=case.seed,
        executor=executor,
        device="cpu",
    )
    return pipe, task, config


def stream(task: Task, config: TrainConfig, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """So many batches, all of the same size, epoch after epoch; the same for all cases of one seed."""
    data = task.data
    epochs = (
        batches(
            data.train_inputs,
            data.train_targets,
            config.batch,
            seed=config.seed,
            epoch=epoch,
            drop_last=True,
        )
        for epoch in itertools.count()
    )
    return itertools.islice(itertools.chain.from_iterable(epochs), count)


def learn(case: Case) -> Record:
    """Train and test. What a rule makes of the weights does not depend on where the stages run, so
    here they share this process.

    Raises:
        PenstockError: the case cannot be run, or a stage failed.
    """
    pipe, task, config = pipeline(case, "threads")
    losses: list[float] = []
    given_up: str | None = None
    started = time.perf_counter()
    try:
        for found in pipe.train(stream(task, config, case.batches)):
            number = float(found.detach())
            if not number <= _RUNAWAY:
                word = f"{number:.2g}" if math.isfinite(number) else "no number"
                given_up = f"loss {word} at batch {len(losses)}"
                break
            losses.append(number)
        seconds = time.perf_counter() - started
        loss, right = (None, None) if given_up else test(pipe, task, 8 * config.batch)
        return Record(case, tuple(losses), loss, right, given_up, round(seconds, 2))
    finally:
        pipe.close()
