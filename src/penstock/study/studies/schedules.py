"""`penstock study schedules`: every schedule and weight rule, trained for real on one model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.ranks.processes.launch import launch
from penstock.report.document import (
    Chart,
    Column,
    Page,
    Report,
    Section,
    Series,
    Table,
    Text,
    Value,
)
from penstock.runtime.pipeline import Pipeline
from penstock.search.schedule_figures import schedule_for_ranks
from penstock.search.schedules import schedules
from penstock.study.catalogue import register
from penstock.study.cell import Cell, options
from penstock.study.convergence.experiment import OPTIMIZERS
from penstock.study.convergence.stage_cut import cut_into_stages
from penstock.study.convergence.train_case import stream
from penstock.study.intervals import mean_interval
from penstock.study.records import Outcome, Record
from penstock.study.settings import Settings
from penstock.study.statistics import final_loss
from penstock.study.tables import by_group, peaks_of, reason_of, runs_that_ended, step_seconds
from penstock.tracing.traced_chain import chain
from penstock.training.config import TrainConfig
from penstock.training.optimizer import optimizer_factory
from penstock.training.task import make_task
from penstock.weights.catalogue import WEIGHT_RULES, weight_rule
from penstock.weights.compatibility import rule_of, schedule_for
from penstock.weights.weight_uses import readings

STUDY = "schedules"
#: Ranks, micro-batches and batches of a run.
_SIZES = {"small": (2, 4, 24), "full": (4, 8, 600)}
#: Learning rates at which flush trains well, see `convergence.tasks`.
_LEARNING_RATES = {"sgd": 0.03, "adam": 0.002}


def measure(cell: Cell, folder: Path) -> Outcome:
    """Train the cell's model under its schedule and weight rule, one process per rank.

    Raises:
        PenstockError: the schedule or the rule does not support these numbers, or a rank failed.
    """
    del folder
    programs = schedule_for_ranks(cell.schedule, cell.stages, cell.micro_batches)
    seconds, losses, peaks = launch(_train_rank, programs.ranks, cell, threads=1)[0]
    return Outcome(seconds, losses, peaks, extra={"stages": programs.stages})


Trained = tuple[tuple[float, ...], tuple[float, ...], tuple[int, ...]]


def _train_rank(cell: Cell) -> Trained:
    """Train in one rank; return seconds and losses of the batches, and peak bytes by rank."""
    torch.set_num_threads(1)
    programs = schedule_for_ranks(cell.schedule, cell.stages, cell.micro_batches)
    optimizer = str(cell.option("optimizer"))
    config = TrainConfig(
        model=cell.model,
        model_options=dict(cell.model_options),
        data=cell.data,
        tokens=32,
        batch=cell.batch,
        optimizer=optimizer,  # type: ignore[arg-type]  # a Literal
        lr=_LEARNING_RATES[optimizer],
        seed=cell.repetition,
    )
    task = make_task(config)
    traced = chain(task.model)
    pipe = Pipeline(
        traced,
        loss=task.loss,
        optimizer=optimizer_factory(config),
        balance=cut_into_stages(traced, task.data.train_inputs, programs.stages),
        schedule=programs,
        weights=cell.weights,
        seed=cell.repetition,
        device="cpu",
        on_nonfinite="warn",  # a run that diverges is a result
    )
    losses: list[Tensor | float] = []
    times = [time.perf_counter()]
    for loss in pipe.train(stream(task, config, cell.steps)):
        losses.append(loss)
        times.append(time.perf_counter())
    seconds = tuple(end - start for start, end in pairwise(times))
    peaks = pipe.timeline().peak_memory or ()
    return seconds, tuple(float(loss) for loss in losses), tuple(peaks)


@register(
    STUDY,
    about="What do all schedules and weight rules cost and learn, in real runs of one model?",
    measure=measure,
    limit_s=90.0,
)
class Schedules:
    """Every schedule with its own weight rule, and every weight rule with its usual schedule."""

    def cells(self, settings: Settings) -> list[Cell]:
        """Return a cell per schedule and weight rule."""
        pairs = [(name, facts.weights) for name, facts in schedules().items() if _trains(name)]
        pairs += [(schedule_for(name), name) for name in WEIGHT_RULES.entries()]
        ranks, micro_batches, steps = _SIZES[settings.scale]
        cells = []
        for repetition in range(settings.repeat(1, 3)):
            for schedule, weights in dict.fromkeys(pairs):
                cells.append(
                    Cell(
                        STUDY,
                        "penstock",
                        schedule,
                        weights,
                        stages=ranks,
                        micro_batches=_micro_batches(schedule, weights, ranks, micro_batches),
                        model="gpt",
                        model_options=options(layers=8, width=32, heads=4),
                        data=settings.data or "text",
                        batch=16,
                        steps=steps,
                        repetition=repetition,
                        options=options(optimizer=_optimizer(weights)),
                    )
                )
        return cells

    def report(self, settings: Settings, records: Sequence[Record]) -> Report:
        """Return a table of synchronous and one of asynchronous schedules."""
        groups = by_group(records)
        synchronous = {cell: group for cell, group in groups.items() if cell.weights == "flush"}
        asynchronous = {cell: group for cell, group in groups.items() if cell.weights != "flush"}
        sections = (
            Section("Synchronous schedules", (Text(_EQUAL), _table("synchronous", synchronous))),
            Section(
                "Asynchronous schedules",
                (Text(_OTHER), _table("asynchronous", asynchronous), _chart(asynchronous)),
            ),
        )
        command = f"penstock study {STUDY} --scale {settings.scale}"
        title = "Schedules and weight rules in real runs"
        summary = _summary(synchronous, asynchronous)
        return Report(title, (Page(STUDY, title, sections, command, summary),))


_EQUAL = (
    "All of these train to the same weights, within rounding: their losses agree, and only their "
    "time and memory differ."
)
_OTHER = "These update weights by other rules, so that losses differ as well."


def _trains(name: str) -> bool:
    """Whether a schedule is made from numbers alone and trains any model."""
    facts = schedules()[name]
    return not facts.needs_costs and not facts.causal


def _micro_batches(schedule: str, weights: str, ranks: int, micro_batches: int) -> int:
    """Return the number of micro-batches, or 1 if the weight rule supports only that."""
    programs = schedule_for_ranks(schedule, ranks, micro_batches)
    try:
        readings(programs, rule_of(programs, weights))
    except PenstockError:
        return 1
    return micro_batches


def _optimizer(weights: str) -> str:
    """Return SGD if a weight rule supports it, else Adam."""
    supported = weight_rule(weights).optimizers
    return "sgd" if not supported or OPTIMIZERS["sgd"] in supported else "adam"


_COLUMNS = (
    Column("schedule"),
    Column("weight rule"),
    Column("S", "number", 0, "stages"),
    Column("batch", "seconds", about="median over batches, mean over repetitions"),
    Column("±", "seconds", about="half of the 95 % interval over repetitions"),
    Column("to the fastest", "number", 2),
    Column("loss", "number", 3, "mean of the last tenth of the batches and over repetitions"),
    Column("optimizer"),
    Column("peak of a rank", "bytes", about="activations, weights and optimizer state"),
    Column("note"),
)
Groups = dict[Cell, list[Record]]


def _loss(group: Sequence[Record]) -> float | None:
    """Return the final loss, averaged over repetitions; None without any."""
    losses = [final_loss(record.outcome.losses) for record in runs_that_ended(group)]
    return statistics.fmean(losses) if losses else None


def _table(name: str, groups: Groups) -> Table:
    """Return a row per schedule and rule, the fastest first."""
    means = {
        cell: statistics.fmean(step_seconds(group))
        for cell, group in groups.items()
        if step_seconds(group)
    }
    fastest = min(means.values(), default=0.0)
    rows = []
    for cell in sorted(groups, key=lambda cell: means.get(cell, float("inf"))):
        rows.append(_row(cell, groups[cell], fastest))
    return Table(name, f"{name} schedules", _COLUMNS, tuple(rows), "", ("records.jsonl",))


def _row(cell: Cell, group: Sequence[Record], fastest: float) -> tuple[Value, ...]:
    """Return the row of a schedule with a rule."""
    interval = mean_interval(step_seconds(group))
    stages = next((record.outcome.extra["stages"] for record in group if record.ok), None)
    return (
        cell.schedule,
        cell.weights,
        stages,
        interval.mean if interval else None,
        interval.half_width if interval else None,
        interval.mean / fastest if interval and fastest else None,
        _loss(group),
        str(cell.option("optimizer")),
        max(peaks_of(group), default=None),
        reason_of(group),
    )


def _chart(groups: Groups) -> Chart:
    """Return each asynchronous schedule as a point: time of a batch against loss."""
    series = []
    for cell, group in groups.items():
        loss = _loss(group)
        if loss is not None:
            label = f"{cell.schedule}, {cell.weights}"
            series.append(Series(label, (statistics.fmean(step_seconds(group)),), (loss,)))
    return Chart(
        "asynchronous-chart",
        "Time of a batch against loss",
        "seconds a batch",
        "training loss",
        tuple(series),
        "scatter",
    )


def _summary(synchronous: Groups, asynchronous: Groups) -> tuple[str, ...]:
    """Return the range of losses of synchronous schedules, and the fastest schedule of each
    kind.
    """
    sentences = []
    losses = [loss for group in synchronous.values() if (loss := _loss(group)) is not None]
    if losses:
        spread = max(losses) - min(losses)
        sentences.append(
            f"The losses of {len(losses)} synchronous schedules lie within {spread:.1e} of each "
            "other."
        )
    for kind, groups in (("synchronous", synchronous), ("asynchronous", asynchronous)):
        means = {
            cell: statistics.fmean(step_seconds(group))
            for cell, group in groups.items()
            if step_seconds(group)
        }
        if means:
            best = min(means, key=lambda cell: means[cell])
            sentences.append(f"Fastest {kind} schedule here: {best.schedule} with {best.weights}.")
    return tuple(sentences)
