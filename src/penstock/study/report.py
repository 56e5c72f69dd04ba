"""Report: tables and sentences, for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.study.question import BASELINE, Group
from penstock.study.results import SHARE, Results
from penstock.study.statistics import Spread, ends_at
from penstock.study.tasks import StudyTask, study_task
from penstock.study.verdict import Standing
from penstock.units import format_seconds
from penstock.weights.catalogue import weight_rule

HEAD = (
    "rule",
    "S",
    "M",
    "ranks",
    "stale",
    "versions",
    "test",
    "least to most",
    "to flush",
    "train loss",
    "simulated",
    "measured",
    "to its loss",
    "verdict",
)
_LEFT = (0, 13)


def rows(results: Results, task: str) -> list[tuple[str, ...]]:
    """A row for each rule and depth of a task."""
    return [_row(results, group) for group in results.of_task(task)]


def _row(results: Results, group: Group) -> tuple[str, ...]:
    optimizer, rule = group.optimizer, group.rule
    metric, verdict, pace = (
        study_task(group.task).metric,
        results.verdicts[group],
        results.paces.get(group),
    )
    runs = results.groups[group]
    values, ends = (
        verdict.values,
        Spread(tuple(ends_at(run.losses) for run in runs if run.losses) or (float("nan"),)),
    )
    # Their mean says nothing where some have not trained.
    difference = (
        ""
        if verdict.difference is None or rule == BASELINE
        else metric.difference(0.0, verdict.difference).split()[0]
    )
    sooner = results.speed_up(group)
    return (
        rule if optimizer == results.question.optimizer else f"{rule} ({optimizer})",
        str(group.stages),
        str(group.micro_batches),
        str(pace.ranks) if pace else "",
        f"{max(pace.staleness)}{f' ({pace.across})' * bool(pace.across)}" if pace else "",
        str(max(pace.versions)) if pace else "",
        metric.text(values.mean) if values else "none",
        f"{metric.text(values.low)} to {metric.text(values.high)}" if values else "",
        difference,
        f"{ends.mean:.3f}",
        format_seconds(pace.simulated_s) if pace else "",
        format_seconds(pace.measured_s) if pace and pace.measured_s else "",
        f"{sooner:.2f} x" if sooner else "never" if results.baseline(group) else "",
        _verdict(results, group),
    )


def _verdict(results: Results, group: Group) -> str:
    verdict = results.verdicts[group]
    if group.rule == BASELINE and not verdict.failures:
        return "what all are held against"
    if verdict.standing in (Standing.FAILS, Standing.OPEN):
        count = len(verdict.failures)
        return (
            f"{count} of {len(results.groups[group])} runs failed"
            if count
            else str(verdict.standing.value)
        )
    return str(verdict.standing.value)


def aligned(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns of text."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = []
    for row in (head, *body):
        cells = [
            cell.ljust(width) if i in _LEFT else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """The same as a Markdown table."""
    marks = ["---" if i in _LEFT else "--:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, marks, *body))


def text(results: Results) -> str:
    """For a terminal."""
    parts = [
        part
        for task in results.question.tasks
        if results.of_task(task)
        for part in (
            _title(results, study_task(task)),
            aligned(HEAD, rows(results, task)),
            *results.sentences(task),
            "",
        )
    ]
    return "\n".join([*parts, *_explained(results)])


def page(results: Results, figures: Sequence[str] = ()) -> str:
    """As a page of Markdown. `figures` are files beside it."""
    parts = ["# Which weight rules lose accuracy, and when?"]
    for task in results.question.tasks:
        if not results.of_task(task):
            continue
        parts += [f"## {task}", _title(results, study_task(task))]
        parts += [f"![{name}]({name})" for name in figures if name.startswith(f"{task}-")]
        parts += [
            markdown(HEAD, rows(results, task)),
            "\n".join(f"- {line}" for line in results.sentences(task)),
        ]
    parts += ["## How to read this", "\n".join(f"- {line}" for line in _explained(results))]
    return "\n\n".join(parts) + "\n"


def _title(results: Results, task: StudyTask) -> str:
    """What was trained, and for how long."""
    settings, case = task.settings, results.groups[results.of_task(task.name)[0]][0].case
    options = ", ".join(f"{name} {value}" for name, value in settings.model_options.items())
    size = (
        f"{settings.image} x {settings.image} pixels"
        if task.metric.higher
        else f"{settings.tokens} tokens"
    )
    rates = {
        group.optimizer: results.groups[group][0].case.lr for group in results.of_task(task.name)
    }
    said = ", ".join(
        f"{name} lr {lr:g}" + f" momentum {settings.momentum:g}" * (name == "sgd")
        for name, lr in rates.items()
    )
    return (
        f"{task.name}: {settings.model} ({options}) on {settings.data}, {size}, {case.batches} batches of {settings.batch} samples, "
        f"{said}, {results.question.seeds} seeds"
    )


def _explained(results: Results) -> list[str]:
    """What the columns mean, and under what conditions they hold."""
    names = dict.fromkeys(
        (run.case.rule, run.case.schedule, run.case.options) for run in results.records
    )
    used = ", ".join(
        f"{rule} by {family}" + "".join(f" with {name} {value:g}" for name, value in options)
        for rule, family, options in names
    )
    given = dict.fromkeys((run.case.rule, run.case.options) for run in results.records)
    defaults = [
        f"{rule}: "
        + ", ".join(
            f"{name} {value:g}"
            for name, value in weight_rule(rule).with_defaults(dict(options)).items()
        )
        for rule, options in given
        if weight_rule(rule).options
    ]
    parts = dict.fromkeys(
        (group.task, group.stages, group.micro_batches) for group in results.fastest.values()
    )
    fastest = ", ".join(f"M={count} for {task} at S={stages}" for task, stages, count in parts)
    fixed = f"""\
S: stages. M: micro-batches of a batch. A batch has the same samples, in the same order, whatever the rule; so has every update. Stages \
are cut alike. Learning rates are those at which flush trains well, and are not tuned for any other rule. Each rule is held against flush \
with the same optimizer, stages and micro-batches: batch norm sees one micro-batch at a time.
stale: the most updates by which a gradient is old, on any stage; versions: the most versions of its weights that a stage keeps. Both \
are counted in the programs that ran. In brackets: the most batches of another virtual worker that are not in the weights yet.
test: the mean over the seeds whose runs trained, after the last batch, the pipeline drained. train loss: the mean of the last tenth of \
the batches.
simulated: seconds per batch in the steady state, with a device for each rank, from the layers' times measured here on one thread; \
messages take no time. Rules that run on other numbers of ranks use other numbers of devices.
measured: seconds per batch in real processes here, one thread each, where there are as many cores as ranks.
to its loss: how many times sooner than flush, in simulated time, every run comes to the training loss that flush has after {SHARE:.0%} of \
its batches. Flush's time is that at its fastest, {fastest}."""
    lines = [*fixed.splitlines(), f"Schedules: {used}."]
    lines += [f"Options of the rules: {'; '.join(dict.fromkeys(defaults))}."] * bool(defaults)
    short = results.question.most_batches
    lines += [
        f"Stopped after {short} batches to see that everything works: this says nothing of the rules."
        if short
        else results.luck()
    ]
    lines += [
        f"Left out: {each.rule} at {each.stages} stages on {each.task}: {each.reason}"
        for each in results.refused
    ]
    lines += [f"Failed: {case}: {reason}" for case, reason in results.failed]
    lines += (
        [f"Not finished: {results.missing} cases have no record yet."] if results.missing else []
    )
    machine = ", ".join(f"{name} {value}" for name, value in results.machine.items())
    return [*lines, f"Machine: {machine}."]
