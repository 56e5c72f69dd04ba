"""`penstock train`: profile, plan and train a model, and compare with the prediction."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.flags import options
from penstock.cli.flags.train_flags import settings_of_flags, with_flags
from penstock.errors import FileError, RunStopped, SettingError
from penstock.standard_error import write_line
from penstock.text_table import row, table
from penstock.transport.addresses import use_address
from penstock.transport.slurm import started_by_srun
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.report.outcome import Outcome
    from penstock.training.config import TrainConfig
    from penstock.training.job import Prepared
    from penstock.training.loop.rank_result import RankResult
    from penstock.training.measurement import Say


def train(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="YAML file of settings, which flags override. With --resume also the run's folder."
        ),
    ] = None,
    *,
    bind: options.Bind = None,
    json: options.Json = False,
    **flags: Any,
) -> None:
    """Train a model through a pipeline: profile, plan, draw and train it, and compare the measured
    time and memory with the prediction. Alone it uses this machine; started by torchrun or srun,
    all of their ranks, on one host or several. A file of settings that names
    package.module:function runs that code: train only with files that you trust.

    Example: penstock train --model vgg11_bn --data digits --stages 2 --schedule 1f1b
    --micro-batches 4 --epochs 3

    Example: penstock train --model my_model:make_model --data my_data:load --loss mse_loss

    Example: penstock train --model hf:gpt2/config.json --plan plan.json
    """
    changes = settings_of_flags(flags)
    if bind is not None:
        use_address(bind)
    if "RANK" in os.environ or started_by_srun(os.environ):
        _run_launched(lambda: _load_settings(config, changes), json)
        return
    settings, changed = _load_settings(config, changes)
    with _ending_on_sigterm():
        _run(settings, changed, json)


with_flags(train)


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does, so that ranks and temporary files go with it.

    Training itself saves first, see `training.restarts`. SIGUSR1 asks for a checkpoint, and is
    ignored while there is nothing to save.
    """

    def end(number: int, frame: object) -> None:
        """Handle SIGTERM."""
        del frame
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminate = signal.signal(signal.SIGTERM, end)
    # It asks ranks to save, and would end a launcher that has none yet.
    save = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, terminate)
        signal.signal(signal.SIGUSR1, save)


def _run(settings: TrainConfig, changed: list[str], json: bool) -> None:
    """Train with these settings and print the plan, the timelines and the comparison.

    Args:
        settings: of the run.
        changed: names of a resumed run's settings that have new values.
        json: print the outcome as JSON, and all messages on standard error.
    """
    from penstock.training.job import prepare
    from penstock.training.restarts import train_with_restarts

    say = _printer(json)
    _show_changes(settings, changed, say)
    prepared = prepare(settings, say)
    with prepared.lock:
        _show_plan(prepared, say, json)
        try:
            prepared, results = train_with_restarts(prepared, say)
        except RunStopped as stop:
            say(str(stop))
            raise typer.Exit(128 + signal.SIGTERM) from stop
        _finish(prepared, results, say, json)


def _run_launched(load: Callable[[], tuple[TrainConfig, list[str]]], json: bool) -> None:
    """Train as one of the ranks that torchrun or srun has started; rank 0 prints.

    Args:
        load: loads the settings, see `_load_settings`; called on rank 0.
        json: as for `_run`.

    Raises:
        PenstockError: the run failed; only on the rank that is to say so.
    """
    import torch.distributed as dist

    from penstock.training import hosts

    say = _printer(json)

    def load_and_show() -> TrainConfig:
        """Load the settings, and print those of a resumed run that have changed."""
        settings, changed = load()
        _show_changes(settings, changed, say)
        return settings

    try:
        run = hosts.prepare_on_hosts(hosts.share_config(load_and_show), say)
        if run.prepared is not None:
            _show_plan(run.prepared, say, json)
        results = hosts.train_on_hosts(run, quiet=dist.get_rank() != 0)
    except hosts.FailedOnRank0 as error:
        raise typer.Exit(1) from error
    if results[0].stopped:
        if run.prepared is not None:
            say(str(RunStopped(str(run.folder), results[0].steps, "SIGTERM")))
        raise typer.Exit(128 + signal.SIGTERM)
    if run.prepared is not None:
        _finish(run.prepared, results, say, json)
    # The others wait: torchrun ends a job some time after its first process has ended.
    dist.barrier()


def _printer(json: bool) -> Say:
    """Return a function that prints messages, on standard error if JSON is printed."""

    def say(text: str) -> None:
        """Print a message."""
        write_line(text, sys.stderr if json else sys.stdout)

    return say


def _show_changes(settings: TrainConfig, changed: list[str], say: Say) -> None:
    """Print the settings of a resumed run that have new values."""
    if changed:
        say(f"resuming {settings.out} with changed settings: {', '.join(changed)}")


def _show_plan(prepared: Prepared, say: Say, json: bool) -> None:
    """Print the plan and its timeline."""
    from penstock.draw.draw import draw

    say(str(prepared.plan))
    say(draw(prepared.predicted, width=options.columns(), colour=options.colour() and not json))


def _finish(prepared: Prepared, results: list[RankResult], say: Say, json: bool) -> None:
    """Write the outcome and the report of a run, and print the comparison with its prediction."""
    from penstock.draw.draw import draw
    from penstock.report.run_results import outcome_difference
    from penstock.training.job import conclude

    settings, width, colour = prepared.config, options.columns(), options.colour()
    outcome, measured = conclude(prepared, results, say)
    report_line = _write_report(prepared.folder)
    if json:
        from dataclasses import asdict

        say(report_line)
        options.print_json({**asdict(outcome), "speed_up": outcome.speed_up})
        return
    say(draw([prepared.predicted, measured], width=width, colour=colour))
    say(table(("", "predicted", "measured"), _comparison_rows(outcome)))
    difference = outcome_difference(outcome, prepared.profile, (prepared.predicted, measured))
    if difference is not None:
        say(str(difference))
    tested = f"test loss {outcome.test_loss:.4f}"
    if outcome.test_accuracy is not None:
        tested = f"test accuracy {outcome.test_accuracy:.2%}"
    say(f"{outcome.steps} steps, loss {outcome.loss:.4f}, {tested}")
    if outcome.one_thread_step_s is not None:
        baseline = "with one thread" if outcome.device == "cpu" else f"on {outcome.device}"
        baseline_step = format_seconds(outcome.one_thread_step_s)
        say(
            f"{outcome.speed_up:.2f} times as fast as one process {baseline} "
            f"({baseline_step} a step, median of {settings.baseline_steps})"
        )
    say(f"results are in {outcome.folder}")
    say(report_line)


def _write_report(folder: Path) -> str:
    """Write the report of a run that has ended, and return a line on it.

    The training is complete: no error of its report may make the command fail.
    """
    from penstock.report.html import write_html
    from penstock.report.run_report import run_report

    path = folder / "report.html"
    try:
        write_html(run_report(folder), path)
    except Exception as error:  # noqa: BLE001 - a report is not worth a finished training
        reason = str(error).partition("\n")[0]
        return f"warning: there is no report of this run: {reason or type(error).__name__}"
    return f"report: {path}"


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
    from penstock.training.config import read_settings

    is_folder = config is not None and config.is_dir()
    resume = bool(changes.get("resume"))
    if not resume and config is not None and not is_folder:
        resume = read_settings(config).get("resume") is True
    if resume:
        if config is not None and not config.exists():
            raise FileError(
                f"{config} does not exist: --resume needs the folder of a run, such as runs/NAME"
            )
        # Imported here, since it loads torch: a mistake in a new run's file is reported before.
        from penstock.training.resume import resume_settings

        return resume_settings(config, changes)
    if is_folder:
        raise SettingError(
            f"{config} is a folder: add --resume to resume the run in it; "
            "a new run takes a YAML file"
        )
    # Like `resume_settings`, this loads torch.
    from penstock.training.sources.user_settings import load_settings

    return load_settings(config, changes), []


def _comparison_rows(outcome: Outcome) -> list[tuple[str, str, str]]:
    """Return the rows of the table of predicted and measured values."""
    asynchronous = not outcome.synchronous
    rows = [
        (
            "batch, steady state" if asynchronous else "step",
            format_seconds(outcome.predicted_step_s),
            format_seconds(outcome.measured_step_s),
        ),
        *_quartile_rows(outcome),
        (
            "bubble ratio",
            f"{outcome.predicted_bubble_ratio:.1%}",
            f"{outcome.measured_bubble_ratio:.1%}",
        ),
    ]
    rows += _memory_rows(outcome)
    if asynchronous:
        predicted = row(outcome.predicted_weight_versions)
        measured = row(outcome.measured_weight_versions)
        rows.append(("weight versions by stage", predicted, measured))
    return rows


def _quartile_rows(outcome: Outcome) -> list[tuple[str, str, str]]:
    """Return the table's row with the quartiles of the step, if they are known."""
    quartiles = (outcome.predicted_step_quartiles_s, outcome.measured_step_quartiles_s)
    texts = []
    for pair in quartiles:
        texts.append("" if pair is None else " to ".join(map(format_seconds, pair)))
    predicted, measured = texts
    return [("quartiles of the step", predicted, measured)] if measured else []


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
