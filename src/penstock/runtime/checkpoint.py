"""Checkpoints that know nothing of the cut: every tensor under its parameter's name, so that any other plan can go on.

A folder holds one safetensors file per stage that wrote it and `checkpoint.json`, which is written last: without it the folder
holds no checkpoint. Nothing is executed when one is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import FileError, SettingError
from penstock.runtime import state
from penstock.runtime.stage import Stage
from penstock.runtime.world import World
from penstock.store import read_json, write_json

SCHEMA = 1
_INDEX = "checkpoint.json"


@dataclass(frozen=True)
class CheckpointIndex:
    """What a checkpoint consists of."""

    step: int
    fingerprint: str
    files: tuple[str, ...]
    schema: int = SCHEMA


def save(folder: Path, world: World, stages: Sequence[Stage], step: int, fingerprint: str) -> None:
    """Write the stages held here; rank 0 completes the checkpoint when all have written.

    Raises:
        FileError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stage in stages:
            tensors = {f"model/{name}": tensor.detach().cpu().contiguous().clone() for name, tensor in state.own(stage).items()}
            extra, facts = _optimizer_state(stage)
            target = folder / _file(step, stage.index)
            partial = target.with_suffix(".partial")
            save_file({**tensors, **extra}, partial, metadata={"optimizer": json.dumps(facts)})
            partial.rename(target)
    except OSError as error:
        raise FileError(f"cannot write the checkpoint {folder}: {error.strerror or error}") from error
    world.barrier()
    if 0 in world.local_ranks:
        kept = sorted(path.name for path in folder.glob(f"{_file(step, 0).split('-stage')[0]}-stage-*.safetensors"))
        write_json(folder / _INDEX, CheckpointIndex(step, fingerprint, tuple(kept)))
        for old in folder.glob("step-*.safetensors"):
            if old.name not in kept:
                old.unlink(missing_ok=True)
    world.barrier()


def load(folder: Path, stages: Sequence[Stage], fingerprint: str) -> int:
    """Fill the stages held here and return the step at which the checkpoint was taken.

    Raises:
        FileError: there is no whole checkpoint in the folder, or it is of another model.
    """
    index = read_json(folder / _INDEX, CheckpointIndex, SCHEMA)
    if index.fingerprint != fingerprint:
        raise FileError(f"{folder} is a checkpoint of another model: its layers and shapes have fingerprint "
                        f"{index.fingerprint}, this model's have {fingerprint}")  # fmt: skip
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    wanted = {f"model/{name}" for stage in stages for name in state.own(stage)}
    prefixes = tuple(f"optimizer/{name}/" for stage in stages for name in _names(stage).values())
    for name in index.files:
        try:
            with safe_open(folder / Path(name).name, framework="pt") as file:
                facts.update(json.loads(file.metadata()["optimizer"]))
                tensors.update({key: file.get_tensor(key) for key in file.keys()  # noqa: SIM118 - it is no dict
                                if key in wanted or key.startswith(prefixes)})  # fmt: skip
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise FileError(f"cannot read {name} of the checkpoint {folder}: {error}") from error
    for stage in stages:
        try:
            state.put(stage, {key.removeprefix("model/"): tensor for key, tensor in tensors.items()})
        except SettingError as error:
            raise FileError(f"the checkpoint {folder} does not fit: {error}") from error
        _restore_optimizer(stage, tensors, facts)
    return index.step


def _file(step: int, stage: int) -> str:
    return f"step-{step:08d}-stage-{stage:04d}.safetensors"


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
        options = {key: value for key, value in group.items() if key != "params" and _plain(value)}
        for parameter in group["params"]:
            held = optimizer.state.get(parameter, {})
            name = names[parameter]
            tensors.update({f"optimizer/{name}/{key}": value.detach().cpu().contiguous().clone()
                            for key, value in held.items() if isinstance(value, Tensor)})  # fmt: skip
            facts[name] = {"options": options, "state": {key: value for key, value in held.items() if _plain(value)}}
    return tensors, facts


def _restore_optimizer(stage: Stage, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    optimizer = stage.update.optimizer
    if optimizer is None:
        return
    names = _names(stage)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found = facts.get(names[parameter])
            if found is None:
                continue
            # Lists stand where tuples were; an optimizer reads both alike.
            group.update({key: value for key, value in found["options"].items() if key in group})
            prefix = f"optimizer/{names[parameter]}/"
            held: dict[str, Any] = dict(found["state"])
            for key in _with_prefix(tensors, prefix):
                value = tensors[key]
                # Counters stay on the CPU, where optimizers keep them; everything shaped like the parameter goes with it.
                held[key.removeprefix(prefix)] = value.to(parameter.device) if value.shape == parameter.shape else value
            if held:
                optimizer.state[parameter] = held


def _with_prefix(names: Iterable[str], prefix: str) -> list[str]:
    return [name for name in names if name.startswith(prefix)]


def _plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
