"""Train one case of a study through its pipeline, and test it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator

from torch import Tensor

from penstock.runtime.pipeline import Pipeline
from penstock.study.convergence.experiment import Case
from penstock.study.convergence.records import Record
from penstock.study.convergence.stage_cut import cut_into_stages
from penstock.study.convergence.tasks import study_task
from penstock.tracing.traced_chain import chain
from penstock.training.config import TrainConfig
from penstock.training.data.batches import batches
from penstock.training.evaluation import test
from penstock.training.optimizer import optimizer_factory
from penstock.training.task import Task, make_task

#: A run with a loss above this is given up as diverged.
_DIVERGED_LOSS = 1e3


def pipeline(case: Case, executor: str) -> tuple[Pipeline, Task, TrainConfig]:
    """Make the pipeline of a case, with its task and the run's settings.

    Args:
        case: to train.
        executor: of `Pipeline`: "threads" or "processes".
    """
    config = study_task(case.task).config(case.optimizer, case.lr, case.seed)
    task = make_task(config)
    traced = chain(task.model)
    pipe = Pipeline(
        traced,
        loss=task.loss,
        optimizer=optimizer_factory(config),
        balance=cut_into_stages(traced, task.data.train_inputs, case.stages),
        schedule=case.programs,
        weights=case.rule,
        weights_options=dict(case.options),
        seed=case.seed,
        executor=executor,
        device="cpu",
        on_nonfinite="warn",  # a run that diverges is a result
    )
    return pipe, task, config


def stream(task: Task, config: TrainConfig, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `count` batches of equal size, epoch after epoch; the same for all cases of one
    seed.
    """
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


def train_case(case: Case) -> Record:
    """Train a case and test it.

    The stages share this process: where they run does not change the weights.

    Raises:
        PenstockError: the case cannot be run, or a stage failed.
    """
    pipe, task, config = pipeline(case, "threads")
    losses: list[float] = []
    given_up: str | None = None
    started = time.perf_counter()
    try:
        for batch_loss in pipe.train(stream(task, config, case.batches)):
            loss = float(batch_loss.detach())
            if not loss <= _DIVERGED_LOSS:  # written so that NaN counts as diverged
                loss_text = f"{loss:.2g}" if math.isfinite(loss) else "no number"
                given_up = f"loss {loss_text} at batch {len(losses)}"
                break
            losses.append(loss)
        seconds = round(time.perf_counter() - started, 2)
        if given_up:
            return Record(case, tuple(losses), None, None, given_up, seconds)
        test_loss, test_accuracy = test(pipe, task, 8 * config.batch)
        return Record(case, tuple(losses), test_loss, test_accuracy, None, seconds)
    finally:
        pipe.close()
