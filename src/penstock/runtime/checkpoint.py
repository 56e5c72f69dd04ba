"""Checkpoints that know nothing of the cut: every tensor under its parameter's name, so that any other plan can go on.

A folder holds one safetensors file per stage that wrote it and `checkpoint.json`, which is written last and names them: without
it the folder holds no checkpoint, and until it is replaced the one before stays whole. Nothing is executed when one is read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import FileError, SettingError
from penstock.optim.stage_weights import StageWeights
from penstock.runtime import state
from penstock.runtime.own_state import (
    Facts,
    names_of,
    optimizer_state,
    restore_optimizer,
    restore_rule,
    rule_state,
)
from penstock.runtime.stage import Stage
from penstock.runtime.state import Placed
from penstock.runtime.world import World
from penstock.store import read_json, write_json
from penstock.transport.payload import TensorForm

T = TypeVar("T")

SCHEMA = 1
_INDEX = "checkpoint.json"


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint consists of."""

    step: int
    fingerprint: str
    files: tuple[str, ...]
    scaler: dict[str, float] | None = None
    schedulers: tuple[str, ...] = ()
    schema: int = SCHEMA


@dataclass(frozen=True)
class Progress:
    """How far a run has come, besides what its stages hold: batches, the scaler's state, and the schedulers' as JSON."""

    step: int
    scaler: Mapping[str, float] | None = None
    schedulers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Versioned:
    """A stage that is held here with what stands behind its weights.

    `copy` says which it is of the copies of the stage that have optimizers of their own, from 0.
    """

    rank: int
    stage: Stage
    weights: StageWeights
    copy: int = 0

    @property
    def prefix(self) -> str:
        """What the names of its own state begin with."""
        return f"copy-{self.copy}/" if self.copy else ""

    def own_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and facts of optimizer and weight rule."""
        tensors, facts = optimizer_state(self.stage, self.prefix)
        return tensors | rule_state(self.stage, self.weights, self.prefix), facts


def save(folder: Path, world: World, placed: Placed, progress: Progress, versioned: Sequence[Versioned] = (),
         copies: int = 1) -> None:  # fmt: skip
    """Write the stages held here; rank 0 completes the checkpoint when all have written, and removes the one before.

    Args:
        folder: where to.
        world: the ranks.
        placed: which holds what.
        progress: how far the run has come.
        versioned: of a stream, the stages held here.
        copies: how many of each stage have optimizers of their own.

    Raises:
        FileError: the folder cannot be written.
        SettingError: an optimizer keeps something that is neither tensor nor plain number.
    """
    # Names are new each time: files of an earlier checkpoint, or of another run, stay what they are until the index is replaced.
    token = int(
        world.broadcast(torch.tensor(time.time_ns()), 0, TensorForm((), "int64", wants_grad=False))
    )
    names = {(stage, copy): f"step-{progress.step:08d}-stage-{stage:04d}{f'-copy-{copy}' if copy else ''}-{token:016x}.safetensors"
             for stage in range(len(placed.lengths)) for copy in range(copies)}  # fmt: skip

    def write(rank: int) -> None:
        of_rank = {(each.stage.index, each.copy): each for each in versioned if each.rank == rank}
        for stage in placed.at_home:
            if placed.home[stage.index] == rank:
                own = of_rank.pop((stage.index, 0), None)
                tensors, facts = optimizer_state(stage, "") if own is None else own.own_state()
                model = {f"model/{name}": tensor.detach().cpu().contiguous().clone()
                         for name, tensor in state.counted(placed, stage).items()}  # fmt: skip
                _write(folder / names[stage.index, 0], model | tensors, facts)
        for place, each in of_rank.items():
            if each.copy:
                _write(folder / names[place], *each.own_state())

    def complete(rank: int) -> None:
        if rank == 0:
            scaler = (
                None
                if progress.scaler is None
                else {name: float(value) for name, value in progress.scaler.items()}
            )
            write_json(folder / _INDEX, Checkpoint(progress.step, placed.traced.fingerprint, tuple(names.values()), scaler,
                                                   progress.schedulers))  # fmt: skip
            for old in folder.glob("step-*"):
                if old.name not in names.values() and old.suffix in (".safetensors", ".partial"):
                    old.unlink(missing_ok=True)

    world.run(write)
    world.barrier()
    world.run(complete)
    world.barrier()


def load(
    folder: Path, placed: Placed, versioned: Callable[[], Sequence[Versioned]] = tuple
) -> Progress:
    """Fill the stages held here and return how far the run had come when the checkpoint was taken. Gradients are dropped.

    Args:
        folder: where `save` wrote.
        placed: which holds what.
        versioned: of a stream, lets the stages held here begin anew from the parameters as they are, and returns them; asked again
            when those are loaded.

    Raises:
        FileError: there is no whole checkpoint in the folder, or it is of another model. Nothing has changed then.
    """
    if not (folder / _INDEX).exists():
        raise FileError(
            f"{folder} holds no checkpoint: there is no {_INDEX}, which is written when all else is"
        )
    index = read_json(folder / _INDEX, Checkpoint, SCHEMA)
    if index.fingerprint != placed.traced.fingerprint:
        raise FileError(f"{folder} is a checkpoint of another model: its layers and shapes have fingerprint "
                        f"{index.fingerprint}, this model's have {placed.traced.fingerprint}")  # fmt: skip
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Facts] = {}
    prefixes = {id(each.stage): each.prefix for each in versioned()}
    wanted = {name for stage in placed.local for name in state.own(stage)}
    parts = {
        f"model/{name}"
        for name in wanted | {placed.traced.aliases.get(name, name) for name in wanted}
    }
    trained = {name for stage in placed.local for name in names_of(stage).values()}
    parts |= {f"{own}{kind}/{name}" for own in {"", *prefixes.values()} for kind in ("optimizer", "weights")
              for name in trained}  # fmt: skip
    for name in index.files:
        _read(folder / Path(name).name, parts, tensors, facts)
    try:
        state.put(placed, _below("model/", tensors))
    except SettingError as error:
        raise FileError(f"the checkpoint {folder} does not fit: {error}") from error
    for stage in placed.local:
        stage.update.zero()
        prefix = prefixes.get(id(stage), "")
        if stage.update.optimizer is not None:
            own = prefix if any(key.startswith(f"{prefix}optimizer/") for key in tensors) else ""
            restore_optimizer(
                stage.update.optimizer,
                names_of(stage),
                _below(f"{own}optimizer/", tensors),
                _below(own, facts),
            )
    for each in versioned():
        restore_rule(each.stage, each.weights, _below(f"{each.prefix}weights/", tensors))
    return Progress(index.step, index.scaler, index.schedulers)


def _below(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    return {
        key.removeprefix(prefix): value for key, value in named.items() if key.startswith(prefix)
    }


def _write(target: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """One file, whole or not at all."""
    partial = target.with_suffix(".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), partial, metadata={"optimizer": json.dumps(facts)})
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise FileError(
            f"cannot write the checkpoint {target.parent}: {getattr(error, 'strerror', None) or error}"
        ) from error


def _read(
    file: Path, parts: Collection[str], tensors: dict[str, Tensor], facts: dict[str, Facts]
) -> None:
    """Add to `tensors` those whose names, or all but the last part of them, are asked for, and rules' numbers; all facts there are."""
    from pydantic import (
        TypeAdapter,
    )  # loaded here, as in the store: most runs begin without a checkpoint

    try:
        with safe_open(file, framework="pt") as content:
            facts.update(
                TypeAdapter(dict[str, Facts]).validate_json(
                    (content.metadata() or {}).get("optimizer", "{}")
                )
            )
            for key in content.keys():  # noqa: SIM118 - it is no dict
                whole = key.rpartition("/")[0]
                if key in parts or whole in parts or whole.endswith("weights"):
                    tensors[key] = content.get_tensor(key)
    except (OSError, SafetensorError, ValueError) as error:
        raise FileError(
            f"cannot read {file.name} of the checkpoint {file.parent}: {error}"
        ) from error
