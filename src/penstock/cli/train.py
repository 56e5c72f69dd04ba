"""`penstock train`: measure, plan, train, and compare with the prediction."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options
from penstock.errors import SettingError
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.training.config import TrainConfig
    from penstock.training.job import Outcome


def train(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A YAML file; flags change what it says. With --resume, or the run's folder."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model of the zoo.")] = None,
    data: Annotated[
        str | None, typer.Option(help="digits, cifar100:PATH, text[:PATH] or reversed[:PATH].")
    ] = None,
    image: Annotated[int | None, typer.Option(help="Pixels a side.")] = None,
    channels: Annotated[int | None, typer.Option(help="Channels of an image.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    model_option: Annotated[
        list[str] | None,
        typer.Option(help="An option of the model, such as layers=6; again for more."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Processes; by default one per stage, or per core.")
    ] = None,
    stages: Annotated[
        str | None, typer.Option(help="Number of stages, or cores; else the planner's choice.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="See `penstock schedules`; else the planner's choice.")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Parts of a batch; else the planner's choice.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="A method, type:REGEX, or layers per stage: 5,6,4.")
    ] = None,
    recompute: Annotated[
        str | None, typer.Option(help="auto, never, except_last, always or selective.")
    ] = None,
    weights: options.Weights = None,
    weights_option: options.WeightsOption = None,
    asynchronous: Annotated[
        bool | None,
        typer.Option(
            "--asynchronous", help="Let the planner choose schedules without a flush too."
        ),
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Bytes that a rank may hold, such as '2 GiB'.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Samples in a batch.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Times through the data.")] = None,
    limit_steps: Annotated[int | None, typer.Option(help="Stop after so many steps.")] = None,
    target_accuracy: Annotated[
        float | None, typer.Option(help="Stop after the epoch that reaches it.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Of sgd.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay.")] = None,
    clip_grad_norm: Annotated[
        float | None, typer.Option(help="How long the gradients of all stages may be together.")
    ] = None,
    autocast: Annotated[
        str | None, typer.Option(help="Mixed precision: bfloat16, or float16 with a scaled loss.")
    ] = None,
    accumulate: Annotated[int | None, typer.Option(help="Batches for each step.")] = None,
    compile: Annotated[  # noqa: A002
        bool | None, typer.Option("--compile", help="torch.compile for every stage.")
    ] = None,
    device: options.Device = None,
    seed: Annotated[
        int | None, typer.Option(help="Of weights, dropout and the order of the data.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="The run's folder; by default a new one in runs/.")
    ] = None,
    resume: Annotated[
        bool | None,
        typer.Option(
            "--resume",
            help="Go on with the run in --out from its checkpoint, with its own settings and those said here.",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="When to write one: epoch, end or never.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="A profile to use instead of measuring.")
    ] = None,
    profile_repeats: Annotated[int | None, typer.Option(help="Timed runs of each layer.")] = None,
    baseline_steps: Annotated[
        int | None, typer.Option(help="Steps of plain training to compare with; 0: none.")
    ] = None,
    deadline_s: Annotated[
        float | None, typer.Option(help="Seconds that a rank waits for another.")
    ] = None,
    self_check: Annotated[
        bool | None,
        typer.Option(
            "--self-check/--no-self-check",
            help="Hold a new run's first batch against plain training, in micro-batches and undivided, and refuse to train where "
            "they differ; on by default. Costs about four steps of plain training in one process.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Train a model through a pipeline on this machine: measured, planned, drawn, and compared with
    the prediction.

    Example: penstock train --model vgg11_bn --data digits --stages 2 --schedule 1f1b
    --micro-batches 4 --epochs 3
    """
    flags = {
        name: value
        for name, value in locals().items()
        if name not in ("config", "json", "model_option", "weights_option")
    }
    changes = {name: value for name, value in flags.items() if value is not None}
    if stages is not None and stages.isdigit():
        changes["stages"] = int(stages)
    if model_option:
        changes["model_options"] = options.named_values("model-option", model_option)
    if weights_option:
        changes["weights_options"] = options.numbers_named("weights-option", weights_option)
    if "RANK" in os.environ:
        raise SettingError(
            "penstock train starts its own ranks: call it without torchrun. For several hosts, write a script "
            "with ps.Pipeline and start that with torchrun"
        )
    settings, changed = _settings(config, changes)
    from penstock.draw.compare import draw_pair
    from penstock.draw.draw import draw
    from penstock.training.job import prepare, run

    width, colour = options.columns(), options.colour()

    def say(text: str) -> None:
        print(text, file=sys.stderr if json else sys.stdout, flush=True)

    if changed:
        say(f"going on with {settings.out} with other settings: {', '.join(changed)}")
    prepared = prepare(settings, say)
    say(str(prepared.plan))
    say(draw(prepared.predicted, width=width, colour=colour and not json))
    outcome, measured = run(prepared, say, quiet=False)
    if json:
        from dataclasses import asdict

        options.print_json({**asdict(outcome), "speed_up": outcome.speed_up})
        return
    say(draw_pair(prepared.predicted, measured, width=width, colour=colour))
    say(options.table(("", "predicted", "measured"), _held_against_each_other(outcome)))
    say(
        f"{outcome.steps} steps, loss {outcome.loss:.4f}, test accuracy {outcome.test_accuracy:.2%}"
    )
    if outcome.one_thread_step_s is not None:
        plain = "with one thread" if outcome.device == "cpu" else f"on {outcome.device}"
        say(
            f"{outcome.speed_up:.2f} times as fast as one process {plain} "
            f"({format_seconds(outcome.one_thread_step_s)} a step, median of {settings.baseline_steps})"
        )
    say(f"everything is in {outcome.folder}")


def _settings(config: Path | None, changes: dict[str, Any]) -> tuple[TrainConfig, list[str]]:
    """What to do; of a run that goes on, also which of its settings are other ones now."""
    from penstock.training.config import load, read_settings
    from penstock.training.resume import resume_settings

    folder = config is not None and config.is_dir()
    if changes.get("resume") or (
        config is not None and not folder and read_settings(config).get("resume") is True
    ):
        return resume_settings(config, changes)
    if folder:
        raise SettingError(
            f"{config} is a folder: to go on with the run in it, add --resume; a new run takes a YAML file"
        )
    return load(config, changes), []


def _held_against_each_other(outcome: Outcome) -> list[tuple[str, str, str]]:
    """What was predicted beside what was measured, in words."""
    stream = not outcome.synchronous
    steps = format_seconds(outcome.predicted_step_s), format_seconds(outcome.measured_step_s)
    rows = [
        ("a batch, once full" if stream else "step", *steps),
        (
            "bubble ratio",
            f"{outcome.predicted_bubble_ratio:.1%}",
            f"{outcome.measured_bubble_ratio:.1%}",
        ),
    ]
    rows += _memory_rows(outcome)
    if stream:
        kept = outcome.predicted_weight_versions, outcome.measured_weight_versions
        rows.append(("weight versions by stage", options.row(kept[0]), options.row(kept[1])))
    return rows


def _memory_rows(outcome: Outcome) -> list[tuple[str, str, str]]:
    """Memory by rank; of ranks that share a process, what the process has in a row of its own."""
    sums, processes = outcome.measured_peak_memory, outcome.measured_peak_rss
    several = len(processes) == len(outcome.predicted_peak_memory)
    rows = []
    for rank, expected in enumerate(outcome.predicted_peak_memory):
        parts = [] if sums is None else [format_bytes(sums[rank])]
        if several:
            parts.append(f"{format_bytes(processes[rank])} (whole process)")
        rows.append((f"memory of rank {rank}", format_bytes(expected), " of ".join(parts)))
    if not several:
        rows.append(("memory of the process", "", format_bytes(processes[0])))
    for number, peak in enumerate(outcome.measured_peak_allocated or ()):
        rows.append((f"allocated on card {number}", "", format_bytes(peak)))
    return rows
