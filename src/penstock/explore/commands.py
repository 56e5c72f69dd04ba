"""The commands that reproduce on the command line what the page shows."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from penstock.explore.evaluate import Panel, Result
from penstock.explore.quantities import seconds_text
from penstock.explore.state import State
from penstock.units import format_bytes

#: Fields of `Costs` in seconds and in bytes, whose flags have their names.
_SECONDS = ("forward", "backward", "input_grad", "weight_grad", "update", "latency")
_BYTES = ("activation_bytes", "weight_bytes", "boundary_bytes", "bandwidth")
#: Layers and samples of the model of `penstock train`, at least.
_MIN_LAYERS, _MIN_BATCH = 2, 32


@dataclass(frozen=True)
class Command:
    """A command with what it does.

    Attributes:
        about: what it does, and what it leaves out.
        text: to paste into a shell.
    """

    about: str
    text: str


def commands(state: State, panel: Panel) -> tuple[Command, ...]:
    """Return the commands of a panel; none if its schedule does not support the numbers."""
    if panel.result is None:
        return ()
    simulate = Command("The same figures.", simulate_command(state, panel, panel.result))
    train = Command(_train_about(state, panel), train_command(state, panel.result))
    return (simulate, train)


def simulate_command(state: State, panel: Panel, result: Result) -> str:
    """Return the command that simulates the schedule with the costs of its stages."""
    schedule = result.whole
    words = ["penstock", "simulate", "--schedule", schedule.name]
    words += ["--stages", str(schedule.stages)]
    words += ["--micro-batches", str(state.micro_batches)]
    for name, value in panel.options:
        words += ["--option", f"{name}={_option_text(value)}"]
    if state.replicas != (1,):
        values = state.replicas if len(state.replicas) > 1 else state.replicas[0]
        words += ["--option", f"replicas={_option_text(values)}"]
    if schedule.stream is not None:
        words += ["--batches", str(state.batches)]
    words += _cost_words(result)
    if state.links != "duplex":
        words += ["--links", state.links]
    if not state.overlap:
        words.append("--no-overlap")
    if state.recompute != "never":
        words += ["--recompute", state.recompute]
    return shlex.join(words)


def _cost_words(result: Result) -> list[str]:
    """Return the flags of the costs; one number where all stages have the same."""
    words = []
    for name in (*_SECONDS, *_BYTES):
        values = getattr(result.costs, name)
        # Costs has defaults for the others. A pipeline of one stage has no boundaries.
        if not isinstance(values, tuple) or not values:
            continue
        texts = [seconds_text(v) if name in _SECONDS else f"{v:.0f}" for v in values]
        text = texts[0] if len(set(texts)) == 1 else ",".join(texts)
        words += [f"--{name.replace('_', '-')}", text]
    return words


def _option_text(value: object) -> str:
    """Write the value of a schedule's option as YAML, as `--option` reads it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value)


def train_command(state: State, result: Result) -> str:
    """Return a command that trains a model with this schedule on as many processes."""
    schedule = result.whole
    words = ["penstock", "train", "--model", "gpt", "--data", "text"]
    layers = max(_MIN_LAYERS, schedule.stages)
    words += ["--model-option", f"layers={layers}"]
    words += ["--batch", str(_batch(state.micro_batches))]
    words += ["--stages", str(schedule.stages), "--ranks", str(schedule.ranks)]
    words += ["--schedule", schedule.name, "--micro-batches", str(state.micro_batches)]
    words += ["--recompute", state.recompute]
    if state.memory_limit is not None:
        words += ["--memory-limit", str(state.memory_limit)]
    return shlex.join(words)


def _batch(micro_batches: int) -> int:
    """Return a number of samples that all micro-batches have equally many of."""
    return micro_batches * max(1, -(-_MIN_BATCH // micro_batches))


def _train_about(state: State, panel: Panel) -> str:
    """Return what the training command does, and what it leaves out."""
    text = (
        "Trains a small GPT with this schedule on this machine, and compares the measured time and "
        "memory with the prediction. Costs are measured, not those of this page"
    )
    left_out = []
    if panel.options:
        left_out.append("the options of the schedule")
    if state.replicas != (1,):
        left_out.append("the number of replicas")
    if left_out:
        text += f"; the planner chooses {' and '.join(left_out)}"
    if state.memory_limit is not None:
        text += f". It stays below {format_bytes(state.memory_limit)} per rank, or says why not"
    return f"{text}."
