"""Write the results of a study as tables and sentences, for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.study.convergence.conclusion import Standing
from penstock.study.convergence.experiment import BASELINE, Group
from penstock.study.convergence.results import SHARE, Results
from penstock.study.convergence.tasks import StudyTask, study_task
from penstock.study.statistics import Spread, final_loss
from penstock.text_table import table
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
    "range",
    "to flush",
    "train loss",
    "simulated",
    "measured",
    "speed-up",
    "conclusion",
)
#: Columns that are aligned to the right: all between the rule and the conclusion.
_RIGHT_ALIGNED = range(1, 13)


def rows(results: Results, task: str) -> list[tuple[str, ...]]:
    """Return a table row for each rule and depth of a task."""
    return [_row(results, group) for group in results.of_task(task)]


def _row(results: Results, group: Group) -> tuple[str, ...]:
    """Return the table row of a rule at one depth."""
    metric = study_task(group.task).metric
    conclusion = results.conclusions[group]
    values = conclusion.values
    difference = ""
    if conclusion.difference is not None and group.rule != BASELINE:
        # The number without its unit, which is that of the column `test`.
        difference = metric.difference(0.0, conclusion.difference).split()[0]
    final_losses = [final_loss(run.losses) for run in results.groups[group] if run.losses]
    mean_final_loss = Spread(tuple(final_losses)).mean if final_losses else float("nan")
    ranks, staleness, versions, simulated, measured = _throughput_cells(results, group)
    return (
        rule_name(results, group.optimizer, group.rule),
        str(group.stages),
        str(group.micro_batches),
        ranks,
        staleness,
        versions,
        metric.text(values.mean) if values else "none",
        f"{metric.text(values.low)} to {metric.text(values.high)}" if values else "",
        difference,
        f"{mean_final_loss:.3f}",
        simulated,
        measured,
        _speed_up_cell(results, group),
        _conclusion_cell(results, group),
    )


def rule_name(results: Results, optimizer: str, rule: str) -> str:
    """Return a rule's name, with its optimizer where that is not the experiment's own."""
    return rule if optimizer == results.experiment.optimizer else f"{rule} ({optimizer})"


def _throughput_cells(results: Results, group: Group) -> tuple[str, str, str, str, str]:
    """Return the cells ranks, stale, versions, simulated and measured."""
    throughput = results.throughputs.get(group)
    if throughput is None:
        return "", "", "", "", ""
    staleness = str(max(throughput.staleness))
    if throughput.across:
        staleness += f" ({throughput.across})"
    return (
        str(throughput.ranks),
        staleness,
        str(max(throughput.versions)),
        format_seconds(throughput.simulated_s),
        format_seconds(throughput.measured_s) if throughput.measured_s else "",
    )


def _speed_up_cell(results: Results, group: Group) -> str:
    """Return how many times sooner than flush the group reaches the target loss."""
    speed_up = results.speed_up(group)
    if speed_up:
        return f"{speed_up:.2f} x"
    # Without runs of flush there is nothing to compare with, which is not "never".
    return "never" if results.baseline(group) else ""


def _conclusion_cell(results: Results, group: Group) -> str:
    """Return the conclusion in a few words."""
    conclusion = results.conclusions[group]
    failures = len(conclusion.failures)
    if group.rule == BASELINE and not failures:
        return "the baseline"
    if failures and conclusion.standing in (Standing.NOT_TRAINING, Standing.UNDECIDED):
        return f"{failures} of {len(results.groups[group])} runs failed"
    return str(conclusion.standing.value)


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    marks = ["--:" if column in _RIGHT_ALIGNED else "---" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, marks, *body))


def text(results: Results) -> str:
    """Write the report for a terminal."""
    lines = []
    for task in results.experiment.tasks:
        if results.of_task(task):
            lines.append(_title(results, study_task(task)))
            lines.append(table(HEAD, rows(results, task), right=_RIGHT_ALIGNED))
            lines += results.sentences(task)
            lines.append("")
    return "\n".join([*lines, *_notes(results)])


def page(results: Results, figures: Sequence[str] = ()) -> str:
    """Write the report as a page of Markdown.

    Args:
        results: to report.
        figures: file names of figures in the same folder.
    """
    parts = ["# Which weight rules lose accuracy, and when?"]
    for task in results.experiment.tasks:
        if not results.of_task(task):
            continue
        parts += [f"## {task}", _title(results, study_task(task))]
        parts += [f"![{name}]({name})" for name in figures if name.startswith(f"{task}-")]
        parts += [
            markdown(HEAD, rows(results, task)),
            "\n".join(f"- {line}" for line in results.sentences(task)),
        ]
    parts += ["## How to read this", "\n".join(f"- {line}" for line in _notes(results))]
    return "\n\n".join(parts) + "\n"


def _title(results: Results, task: StudyTask) -> str:
    """Describe what was trained: model, data, batches, learning rates and seeds."""
    settings = task.settings
    groups = results.of_task(task.name)
    batches = results.groups[groups[0]][0].case.batches
    options = ", ".join(f"{name} {value}" for name, value in settings.model_options.items())
    size = f"{settings.tokens} tokens"
    # Tasks on images are judged by accuracy, those on text by their loss.
    if task.metric.higher:
        size = f"{settings.image} x {settings.image} pixels"
    learning_rates = {group.optimizer: results.groups[group][0].case.lr for group in groups}
    rates = []
    for name, lr in learning_rates.items():
        momentum = f" momentum {settings.momentum:g}" if name == "sgd" else ""
        rates.append(f"{name} lr {lr:g}{momentum}")
    return (
        f"{task.name}: {settings.model} ({options}) on {settings.data}, {size}, "
        f"{batches} batches of {settings.batch} samples, "
        f"{', '.join(rates)}, {results.experiment.seeds} seeds"
    )


def _notes(results: Results) -> list[str]:
    """Explain the columns, the conditions of the runs, and what is missing."""
    lines = [*_column_notes(results), f"Schedules: {_schedules_note(results)}."]
    if options := _options_note(results):
        lines.append(f"Options of the rules: {options}.")
    if results.experiment.most_batches:
        lines.append(
            f"Stopped after {results.experiment.most_batches} batches, as a smoke test: "
            "too short to conclude anything about the rules."
        )
    else:
        lines.append(results.significance())
    for refused in results.refused:
        lines.append(
            f"Left out: {refused.rule} at {refused.stages} stages on {refused.task}: "
            f"{refused.reason}"
        )
    lines += [f"Failed: {case}: {reason}" for case, reason in results.failed]
    if results.missing:
        lines.append(f"Not finished: {results.missing} cases have no record yet.")
    machine = ", ".join(f"{name} {value}" for name, value in results.machine.items())
    return [*lines, f"Machine: {machine}."]


def _column_notes(results: Results) -> list[str]:
    """Explain the columns of the table."""
    fastest_flush = dict.fromkeys(
        (group.task, group.stages, group.micro_batches) for group in results.fastest.values()
    )
    fastest = ", ".join(
        f"M={count} for {task} at S={stages}" for task, stages, count in fastest_flush
    )
    return [
        (
            "S: stages. M: micro-batches per batch. A batch has the same samples, in the same "
            "order, for all rules, and so has every update. Stages are cut alike. Learning rates "
            "are those at which flush trains well, and are not tuned for any other rule. Each rule "
            "is compared with flush with the same optimizer, stages and micro-batches, because "
            "batch norm sees one micro-batch at a time."
        ),
        (
            "stale: the most updates by which a gradient is stale, on any stage; versions: the "
            "most weight versions that a stage holds. Both are counted in the programs that ran. "
            "In brackets: the most batches of another virtual worker that are not in the weights "
            "yet."
        ),
        (
            "test: mean over the seeds whose runs trained, after the last batch, with the pipeline "
            "drained; range: their lowest and highest value. train loss: mean of the last tenth of "
            "the batches."
        ),
        (
            "simulated: seconds per batch in the steady state, with one device per rank, from "
            "layer times measured on this machine with one thread; messages take no time. Rules "
            "that run on other numbers of ranks use other numbers of devices."
        ),
        (
            "measured: seconds per batch in real processes on this machine, one thread each, if it "
            "has as many cores as there are ranks."
        ),
        (
            "speed-up: how many times sooner than flush, in simulated time, all runs reach the "
            f"training loss that flush has after {SHARE:.0%} of its batches. The time of flush is "
            f"that at its fastest, {fastest}."
        ),
    ]


def _schedules_note(results: Results) -> str:
    """List the schedule and the changed options of each rule."""
    cases = dict.fromkeys(
        (run.case.rule, run.case.schedule, run.case.options) for run in results.records
    )
    entries = []
    for rule, schedule, options in cases:
        option_texts = [f" with {name} {value:g}" for name, value in options]
        entries.append(f"{rule} by {schedule}{''.join(option_texts)}")
    return ", ".join(entries)


def _options_note(results: Results) -> str:
    """List all options of the rules with their values; empty if no rule has options."""
    entries = []
    for rule, options in dict.fromkeys(
        (run.case.rule, run.case.options) for run in results.records
    ):
        if weight_rule(rule).options:
            values = weight_rule(rule).with_defaults(dict(options))
            option_texts = [f"{name} {value:g}" for name, value in values.items()]
            entries.append(f"{rule}: {', '.join(option_texts)}")
    return "; ".join(dict.fromkeys(entries))
