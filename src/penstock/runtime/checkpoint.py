"""Checkpoints that know nothing of the cut: every tensor under its parameter's name, so that any other plan can go on.

A folder holds one safetensors file per stage that wrote it and `checkpoint.json`, which is written last and names them: without
it the folder holds no checkpoint, and until it is replaced the one before stays whole. Nothing is executed when one is read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from penstock.errors import FileError, SettingError
from penstock.runtime import state
from penstock.runtime.stage import Stage
from penstock.runtime.state import Placed
from penstock.runtime.world import World
from penstock.store import read_json, write_json
from penstock.transport.payload import TensorForm

SCHEMA = 1
_INDEX = "checkpoint.json"


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint consists of."""

    step: int
    fingerprint: str
    files: tuple[str, ...]
    schema: int = SCHEMA


@dataclass(frozen=True)
class _Facts:
    """Of one parameter: the options of its group, and what its optimizer keeps besides tensors."""

    options: dict[str, Any]
    state: dict[str, Any]


def save(folder: Path, world: World, placed: Placed, step: int) -> None:
    """Write the stages held here; rank 0 completes the checkpoint when all have written, and removes the one before.

    Raises:
        FileError: the folder cannot be written.
        SettingError: an optimizer keeps something that is neither tensor nor plain number.
    """
    # Names are new each time: files of an earlier checkpoint, or of another run, stay what they are until the index is replaced.
    token = int(world.broadcast(torch.tensor(time.time_ns()), 0, TensorForm((), "int64", wants_grad=False)))
    names = [f"step-{step:08d}-stage-{stage:04d}-{token:016x}.safetensors" for stage in range(len(placed.lengths))]

    def write(rank: int) -> None:
        for stage in placed.at_home:
            if placed.home[stage.index] == rank:
                _write(folder / names[stage.index], stage)

    def complete(rank: int) -> None:
        if rank == 0:
            write_json(folder / _INDEX, Checkpoint(step, placed.traced.fingerprint, tuple(names)))
            for old in folder.glob("step-*"):
                if old.name not in names and old.suffix in (".safetensors", ".partial"):
                    old.unlink(missing_ok=True)

    world.run(write)
    world.barrier()
    world.run(complete)
    world.barrier()


def load(folder: Path, placed: Placed) -> int:
    """Fill the stages held here and return the step at which the checkpoint was taken. Gradients are dropped.

    Raises:
        FileError: there is no whole checkpoint in the folder, or it is of another model. Nothing has changed then.
    """
    if not (folder / _INDEX).exists():
        raise FileError(f"{folder} holds no checkpoint: there is no {_INDEX}, which is written when all else is")
    index = read_json(folder / _INDEX, Checkpoint, SCHEMA)
    if index.fingerprint != placed.traced.fingerprint:
        raise FileError(f"{folder} is a checkpoint of another model: its layers and shapes have fingerprint "
                        f"{index.fingerprint}, this model's have {placed.traced.fingerprint}")  # fmt: skip
    tensors: dict[str, Tensor] = {}
    facts: dict[str, _Facts] = {}
    wanted = {f"model/{name}" for stage in placed.local for name in state.own(stage)}
    prefixes = tuple(f"optimizer/{name}/" for stage in placed.local for name in _names(stage).values())
    for name in index.files:
        _read(folder / Path(name).name, wanted, prefixes, tensors, facts)
    weights = {key.removeprefix("model/"): tensor for key, tensor in tensors.items()}
    try:
        state.put(placed.local, weights)
    except SettingError as error:
        raise FileError(f"the checkpoint {folder} does not fit: {error}") from error
    for stage in placed.local:
        stage.update.zero()
        if stage.update.optimizer is not None:
            _restore_optimizer(stage.update.optimizer, _names(stage), tensors, facts)
    return index.step


def _write(target: Path, stage: Stage) -> None:
    """One stage's file, whole or not at all."""
    tensors = {f"model/{name}": tensor.detach().cpu().contiguous().clone() for name, tensor in state.own(stage).items()}
    extra, facts = _optimizer_state(stage)
    partial = target.with_suffix(".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file({**tensors, **extra}, partial, metadata={"optimizer": json.dumps(facts)})
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise FileError(f"cannot write the checkpoint {target.parent}: {getattr(error, 'strerror', None) or error}") from error


def _read(file: Path, wanted: set[str], prefixes: tuple[str, ...], tensors: dict[str, Tensor],
          facts: dict[str, _Facts]) -> None:  # fmt: skip
    """Add to `tensors` those that are wanted, and to `facts` all there are."""
    from pydantic import TypeAdapter  # loaded here, as in the store: most runs begin without a checkpoint

    try:
        with safe_open(file, framework="pt") as content:
            facts.update(TypeAdapter(dict[str, _Facts]).validate_json((content.metadata() or {}).get("optimizer", "{}")))
            tensors.update({key: content.get_tensor(key) for key in content.keys()  # noqa: SIM118 - it is no dict
                            if key in wanted or key.startswith(prefixes)})  # fmt: skip
    except (OSError, SafetensorError, ValueError) as error:
        raise FileError(f"cannot read {file.name} of the checkpoint {file.parent}: {error}") from error


def _names(stage: Stage) -> dict[Tensor, str]:
    """The stage's trainable parameters by their first name."""
    names: dict[Tensor, str] = {}
    for layer in stage.layers:
        for name, parameter in layer.module.named_parameters(layer.name):
            names.setdefault(parameter, name)
    return {parameter: names[parameter] for parameter in stage.update.parameters}


def _optimizer_state(stage: Stage) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by `optimizer/<parameter>/<key>`; by parameter, plain state and the options of its group."""
    optimizer = stage.update.optimizer
    if optimizer is None:
        return {}, {}
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    names = _names(stage)
    for group in optimizer.param_groups:
        options = {key: value.item() if _is_number(value) else value for key, value in group.items() if key != "params"}
        options = {key: value for key, value in options.items() if _plain(value)}
        for parameter in group["params"]:
            name = names[parameter]
            kept: dict[str, Any] = {}
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{name}/{key}"] = value.detach().cpu().contiguous().clone()
                elif _plain(value):
                    kept[key] = value
                else:
                    raise SettingError(f"{type(optimizer).__name__} keeps a {type(value).__name__} as {key!r} of {name}: a "
                                       "checkpoint can hold tensors and plain numbers")  # fmt: skip
            facts[name] = {"options": options, "state": kept}
    return tensors, facts


def _restore_optimizer(optimizer: Optimizer, names: Mapping[Tensor, str], tensors: Mapping[str, Tensor],
                       facts: Mapping[str, _Facts]) -> None:  # fmt: skip
    """Options and state as they were saved; a parameter that had no state then has none."""
    kept: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        kept.setdefault(name.removeprefix("optimizer/"), {})[key] = tensor
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            found = facts.get(names[parameter])
            if found is None:
                continue
            # Lists stand where tuples were; an optimizer reads both alike.
            for key in found.options.keys() & group.keys() - {"params"}:
                group[key] = torch.full_like(group[key], found.options[key]) if _is_number(group[key]) else found.options[key]
            on_device = group.get("capturable") or group.get("fused")
            held: dict[str, Any] = dict(found.state)
            for key, value in kept.get(names[parameter], {}).items():
                # Counters stay on the CPU, where optimizers keep them; everything shaped like the parameter goes with it.
                held[key] = value.to(parameter.device) if value.dim() or on_device else value
            if held:
                optimizer.state[parameter] = held


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
