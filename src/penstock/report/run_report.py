"""The report of a training run, and that of a plan alone."""

from __future__ import annotations

import shlex
from pathlib import Path

from penstock.files.yaml_values import yaml_text
from penstock.plan.plan import Plan
from penstock.report.document import Code, Facts, Page, Report, Section, Text
from penstock.report.plan_sections import plan_sections, plan_summary
from penstock.report.run_folder import CONFIG, RunFolder, read_run
from penstock.report.run_results import prediction_section, run_difference, timeline_section
from penstock.report.training_curves import training_section
from penstock.units import format_seconds

#: Setting that selects the run; it says nothing about the training.
_SELECTING = ("out", "resume")


def run_report(folder: Path) -> Report:
    """Return the report of a training run that has ended, still trains, or was interrupted.

    Raises:
        FileError: the folder holds no run, or a file is damaged; the message names it.
    """
    run = read_run(folder)
    sections = [prediction_section(run)]
    timelines = timeline_section(run)
    if timelines is not None:
        sections.append(timelines)
    training = training_section(run)
    if training is not None:
        sections.append(training)
    sections += plan_sections(run.plan)
    sections.append(Section("Settings and command", (_settings(run), *_commands(run))))
    sections.append(Section("Machine", (_machine(run),)))
    title = f"{run.settings.get('model', 'model')} on {run.settings.get('data', 'data')}"
    page = Page(
        name="run",
        title=f"Run {folder.resolve().name}",
        sections=tuple(sections),
        command=f"penstock report {shlex.quote(str(folder))}",
        summary=(*_run_summary(run), *plan_summary(run.plan), *_suggestion(run.plan)),
    )
    return Report(f"Training {title}", (page,))


def plan_report(path: Path) -> Report:
    """Return the report of a plan's file.

    Raises:
        FileError: the file is no valid plan.
    """
    plan = Plan.load(path)
    page = Page(
        name="plan",
        title=f"Plan {path.name}",
        sections=tuple(plan_sections(plan)),
        command=f"penstock report {shlex.quote(str(path))}",
        summary=(*plan_summary(plan), *_suggestion(plan)),
    )
    return Report(f"Plan for {plan.cluster}", (page,))


def _suggestion(plan: Plan) -> tuple[str, ...]:
    """Return the most helpful change as a sentence, if one is known."""
    if not plan.remedies:
        return ()
    remedy = plan.remedies[0]
    return (f"Most effective change: {remedy.change} ({format_seconds(remedy.step_s)} a step).",)


def _run_summary(run: RunFolder) -> tuple[str, ...]:
    """Return the outcome of the training, one sentence each."""
    outcome = run.outcome
    if outcome is None:
        last = max(run.metrics.steps, default=0)
        return (f"The run has no outcome yet: it trains still, or was interrupted at step {last}.",)
    duration = f"{outcome.steps:,} steps in {format_seconds(outcome.training_s)}"
    result = f"Loss {outcome.loss:.4g} and test loss {outcome.test_loss:.4g}"
    if outcome.test_accuracy is not None:
        result = f"Test accuracy {outcome.test_accuracy:.2%} and loss {outcome.loss:.4g}"
    step = "A step took" if outcome.synchronous else "A batch in the steady state took"
    step_text = f"{step} {format_seconds(outcome.measured_step_s)}"
    difference = _difference(outcome.measured_step_s, outcome.predicted_step_s)
    sentences = [f"{result} after {duration}.", f"{step_text}, {difference}."]
    large = run_difference(run)
    if large is not None:
        sentences.append(large.reason)
    if outcome.speed_up is not None:
        baseline = "with one thread" if outcome.device == "cpu" else f"on {outcome.device}"
        sentences.append(
            f"That is {outcome.speed_up:.2f} times the speed of plain training in one process "
            f"{baseline}."
        )
    return tuple(sentences)


def _difference(measured_s: float, predicted_s: float) -> str:
    """Return how the measured step differs from the predicted one."""
    if not predicted_s:
        return "of which nothing was predicted"
    change = measured_s / predicted_s - 1
    if abs(change) < 0.005:
        return "as predicted"
    if change >= 1:
        return f"{measured_s / predicted_s:.1f} times as long as predicted"
    return f"{abs(change):.0%} {'more' if change > 0 else 'less'} than predicted"


def _settings(run: RunFolder) -> Facts:
    """Return the settings of a run that are set."""
    items = []
    for name, value in run.settings.items():
        if value is None or value in ({}, []) or name in _SELECTING:
            continue
        text = yaml_text(value) if isinstance(value, dict | list) else str(value)
        items.append((str(name), ", ".join(text.splitlines())))
    return Facts(tuple(items))


def _commands(run: RunFolder) -> tuple[Text | Code, ...]:
    """Return the command that repeats or continues the run."""
    folder = run.settings.get("out") or run.path
    if run.settings.get("resume"):
        return (
            Text(
                "The run was resumed; files such as config-00000100.yaml have the settings before. "
                "This continues it:"
            ),
            Code(f"penstock train {shlex.quote(str(folder))} --resume"),
        )
    config = Path(str(folder)) / CONFIG
    copy = Path(str(folder)).with_name(f"{Path(str(folder)).name}-again")
    return (
        Text("This trains again with the same settings:"),
        Code(f"penstock train {shlex.quote(str(config))} --out {shlex.quote(str(copy))}"),
    )


def _machine(run: RunFolder) -> Facts:
    """Return where the run was measured and trained."""
    items = [(name, value) for name, value in run.profile.machine.items()]
    items.append(("torch", run.profile.torch_version or "unknown"))
    if run.outcome is not None:
        items.append(("trained on", run.outcome.device))
    if run.cluster is not None and run.plan.ranks > 1:
        items.append(("link between two ranks", str(run.cluster.inside)))
    return Facts(tuple(items))
