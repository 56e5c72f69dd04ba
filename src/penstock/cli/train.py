"""`penstock train`: profile, plan and train a model, and compare with the prediction."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options
from penstock.cli.train_flags import settings_of_flags, with_flags
from penstock.errors import SettingError
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.training.config import TrainConfig
    from penstock.training.job import Outcome


def train(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="YAML file of settings, which flags override. With --resume also the run's folder."
        ),
    ] = None,
    *,
    json: options.Json = False,
    **flags: Any,
) -> None:
    """Train a model through a pipeline on this machine: profile, plan, draw and train it, and
    compare the measured time and memory with the prediction.

    Example: penstock train --model vgg11_bn --data digits --stages 2 --schedule 1f1b
    --micro-batches 4 --epochs 3
    """
    if "RANK" in os.environ:
        raise SettingError(
            "penstock train starts its own ranks: call it without torchrun. For several hosts, "
            "write a script with ps.Pipeline and start that with torchrun"
        )
    settings, changed = _load_settings(config, settings_of_flags(flags))
    _run(settings, changed, json)


with_flags(train)


def _run(settings: TrainConfig, changed: list[str], json: bool) -> None:
    """Train with these settings and print the plan, the timelines and the comparison.

    Args:
        settings: of the run.
        changed: names of a resumed run's settings that have new values.
        json: print the outcome as JSON, and all messages on standard error.
    """
    from penstock.draw.compare import draw_pair
    from penstock.draw.draw import draw
    from penstock.training.job import prepare, run

    width, colour = options.columns(), options.colour()

    def say(text: str) -> None:
        """Print a message."""
        print(text, file=sys.stderr if json else sys.stdout, flush=True)

    if changed:
        say(f"resuming {settings.out} with changed settings: {', '.join(changed)}")
    prepared = prepare(settings, say)
    say(str(prepared.plan))
    say(draw(prepared.predicted, width=width, colour=colour and not json))
    outcome, measured = run(prepared, say, quiet=False)
    if json:
        from dataclasses import asdict

        options.print_json({**asdict(outcome), "speed_up": outcome.speed_up})
        return
    say(draw_pair(prepared.predicted, measured, width=width, colour=colour))
    say(options.table(("", "predicted", "measured"), _comparison_rows(outcome)))
    say(
        f"{outcome.steps} steps, loss {outcome.loss:.4f}, test accuracy {outcome.test_accuracy:.2%}"
    )
    if outcome.one_thread_step_s is not None:
        baseline = "with one thread" if outcome.device == "cpu" else f"on {outcome.device}"
        baseline_step = format_seconds(outcome.one_thread_step_s)
        say(
            f"{outcome.speed_up:.2f} times as fast as one process {baseline} "
            f"({baseline_step} a step, median of {settings.baseline_steps})"
        )
    say(f"results are in {outcome.folder}")


def _load_settings(config: Path | None, changes: dict[str, Any]) -> tuple[TrainConfig, list[str]]:
    """Load the settings of a new or a resumed run.

    Args:
        config: YAML file, or with --resume the run's folder.
        changes: settings from flags, which override the file.

    Returns:
        The settings; and for a resumed run the names of those that have new values.

    Raises:
        SettingError: a setting is wrong, or `config` is a folder without --resume.
        FileError: a file cannot be read.
    """
    from penstock.training.config import load, read_settings
    from penstock.training.resume import resume_settings

    is_folder = config is not None and config.is_dir()
    resume = bool(changes.get("resume"))
    if not resume and config is not None and not is_folder:
        resume = read_settings(config).get("resume") is True
    if resume:
        return resume_settings(config, changes)
    if is_folder:
        raise SettingError(
            f"{config} is a folder: add --resume to resume the run in it; "
            "a new run takes a YAML file"
        )
    return load(config, changes), []


def _comparison_rows(outcome: Outcome) -> list[tuple[str, str, str]]:
    """Return the rows of the table of predicted and measured values."""
    asynchronous = not outcome.synchronous
    rows = [
        (
            "batch, steady state" if asynchronous else "step",
            format_seconds(outcome.predicted_step_s),
            format_seconds(outcome.measured_step_s),
        ),
        (
            "bubble ratio",
            f"{outcome.predicted_bubble_ratio:.1%}",
            f"{outcome.measured_bubble_ratio:.1%}",
        ),
    ]
    rows += _memory_rows(outcome)
    if asynchronous:
        predicted = options.row(outcome.predicted_weight_versions)
        measured = options.row(outcome.measured_weight_versions)
        rows.append(("weight versions by stage", predicted, measured))
    return rows


def _memory_rows(outcome: Outcome) -> list[tuple[str, str, str]]:
    """Return the table's memory rows: one per rank, one for a process that all ranks share, one per
    GPU.
    """
    tensor_peaks = outcome.measured_peak_memory
    process_peaks = outcome.measured_peak_rss
    process_per_rank = len(process_peaks) == len(outcome.predicted_peak_memory)
    rows = []
    for rank, predicted in enumerate(outcome.predicted_peak_memory):
        parts = [] if tensor_peaks is None else [format_bytes(tensor_peaks[rank])]
        if process_per_rank:
            parts.append(f"{format_bytes(process_peaks[rank])} (whole process)")
        rows.append((f"memory of rank {rank}", format_bytes(predicted), " of ".join(parts)))
    if not process_per_rank:
        rows.append(("memory of the process", "", format_bytes(process_peaks[0])))
    for number, peak in enumerate(outcome.measured_peak_allocated or ()):
        rows.append((f"allocated on GPU {number}", "", format_bytes(peak)))
    return rows
