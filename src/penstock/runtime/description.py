"""What a rank is about to run, in words that other ranks can compare with their own."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import zlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.assembly import Assembly
from penstock.runtime.checksum import checksum
from penstock.runtime.differences import META, STALE, Description
from penstock.runtime.setting import Setting
from penstock.runtime.stage_builder import Training
from penstock.runtime.stale import stale_layers
from penstock.tracing.chain import TracedChain
from penstock.tracing.names import parameters_of, prefix_of

#: Options that change where something is kept, and no number.
_PRIVATE_OPTIONS = ("offload",)

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+\b")

#: Values of an optimizer's groups that are tensors of parameters, or change as it runs.
_NOT_OPTIONS = ("params", "param_names")

_DEPTH = 4


def describe_run(
    traced: TracedChain, setting: Setting, training: Training, **further: object
) -> Description:
    """What this rank is about to run.

    Args:
        traced: the model.
        setting: what is run.
        training: how it is trained.
        further: other settings that ranks must share, by name.
    """
    schedule = setting.schedule
    facts = {
        "penstock": _penstock(),
        "torch": _release(torch.__version__),
        "ranks": f"{schedule.ranks} rank{'s' * (schedule.ranks != 1)}",
        "layers": f"{len(traced)} layers",
        "cut": f"stages of {list(setting.lengths)} layers",
        "schedule": f"{schedule.name} with {schedule.stages} stages, {schedule.micro_batches} micro-batches",
        "seed": describe(training.seed),
    }
    for field in dataclasses.fields(setting):
        if field.name not in ("lengths", "schedule"):
            facts[field.name] = describe(getattr(setting, field.name))
    for field in dataclasses.fields(schedule):
        if field.name not in ("name", "options", "programs") and not field.name.startswith("_"):
            facts[f"schedule: {field.name}"] = describe(getattr(schedule, field.name))
    for name in (field.name for field in dataclasses.fields(training)):
        if name not in ("optimizer", "seed", "options"):
            facts[name] = describe(getattr(training, name))
    for field in dataclasses.fields(training.options):
        if field.name not in _PRIVATE_OPTIONS:
            facts[field.name] = describe(getattr(training.options, field.name))
    facts["optimizer"] = "none" if training.optimizer is None else "there is one"
    facts |= {name: describe(value) for name, value in further.items()}
    lists = {
        "layer": [(layer.name, layer.kind) for layer in traced.layers],
        "parameter": [_tensor_row(fact) for fact in traced.description.tensors],
        "module of layer": [
            (layer.name, _module(module))
            for layer, module in zip(traced.layers, traced.modules, strict=True)
        ],
        "program of rank": [
            (str(rank), " ".join(map(str, program)))
            for rank, program in enumerate(schedule.programs)
        ],
    }
    return Description(facts, lists, _weights(traced), _homes(setting))


def describe_optimizers(made: Assembly) -> Description:
    """The optimizers of this rank's stages: type, groups and options. A rank without any has
    nothing to compare.
    """
    facts: dict[str, str] = {}
    for stage in made.stages:
        optimizer = stage.update.optimizer
        if optimizer is None:
            continue
        facts["optimizer"] = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
            for key, value in options.items():
                facts[f"{key} of the optimizer's group {number}"] = describe(value)
    return Description(facts, {}, [], [])


def describe(value: object, depth: int = _DEPTH) -> str:
    """A value in words that are the same in every process that has the same value.

    Functions are described by their names and by the plain defaults of their arguments; of objects
    of unknown kinds only the type counts.
    """
    if isinstance(value, float):
        return repr(float(value))
    if value is None or isinstance(
        value,
        (bool, int, str, complex, bytes, torch.dtype, torch.memory_format, torch.device),
    ):
        return repr(value)
    if depth == 0:
        return type(value).__name__
    below = functools.partial(describe, depth=depth - 1)
    if isinstance(value, Tensor):
        return f"tensor of {tuple(value.shape)}, {value.dtype}, checksum {_hex(checksum(value))}"
    if isinstance(value, nn.Module):
        state = {
            name: checksum(tensor)
            for name, tensor in value.state_dict().items()
            if isinstance(tensor, Tensor)
        }
        text = _ADDRESS.sub("", " ".join(repr(value).split()))
        return text + (f" with values {below(state)}" if state else "")
    if isinstance(value, Mapping):
        rows = sorted(f"{below(key)}: {below(item)}" for key, item in value.items())
        return f"{{{', '.join(rows)}}}"
    if isinstance(value, AbstractSet):
        return f"{{{', '.join(sorted(map(below, value)))}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(below, value))}]"
    if isinstance(value, functools.partial):
        return f"partial({below(value.func)}, {below(value.args)}, {below(value.keywords)})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        rows = [
            f"{field.name}={below(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if not field.name.startswith("_")
        ]
        return f"{type(value).__name__}({', '.join(rows)})"
    return _callable(value, below)


def _callable(value: object, below: Any) -> str:
    if inspect.ismethod(value):
        return f"{type(value.__self__).__name__}.{value.__name__}"
    name = getattr(value, "__qualname__", None)
    if name is None:
        return f"{type(value).__module__}.{type(value).__qualname__}"
    whole = f"{getattr(value, '__module__', None) or ''}.{name}".removeprefix("__main__.")
    # Not what a function holds of its surroundings: a loss that prints on rank 0 alone holds the
    # number of its rank.
    defaults = [item for item in getattr(value, "__defaults__", None) or () if _plain(item)]
    return whole + (f" with {below(defaults)}" if defaults else "")


def _plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str, torch.dtype))


def _penstock() -> str:
    try:
        return _release(version("penstock"))
    except PackageNotFoundError:
        return "not installed"


def _release(text: str) -> str:
    return ".".join(text.split(".")[:2])


def _hex(number: int | None) -> str:
    return "unknown" if number is None else f"{number:08x}"


def _tensor_row(fact: Any) -> tuple[str, str]:
    trained = "trained" if fact.trainable else "not trained"
    return fact.name, f"{fact.shape}, {fact.dtype}, {trained}"


def _module(module: nn.Module) -> str:
    """Class, options and mode of a layer."""
    parts = list(module.modules())
    training = sum(part.training for part in parts)
    mode = "in training mode" if training == len(parts) else "in evaluation mode"
    if 0 < training < len(parts):
        mode = f"with {training} of {len(parts)} modules in training mode"
    # What was cut out of a traced model prints code, in which names may differ from process to
    # process.
    whole = getattr(module, "whole_names", False)
    text = type(module).__name__ if whole else _ADDRESS.sub("", " ".join(repr(module).split()))
    return f"{text} {mode}"


def _homes(setting: Setting) -> list[int]:
    ranks = [holders[0] for holders in setting.schedule.ranks_of_stage]
    return [
        rank for rank, length in zip(ranks, setting.lengths, strict=False) for _ in range(length)
    ]


def _weights(traced: TracedChain) -> list[tuple[str, str]]:
    stale = stale_layers(traced)
    sums: dict[int, str] = {}
    rows = []
    for index, (layer, module) in enumerate(zip(traced.layers, traced.modules, strict=True)):
        prefix = prefix_of(layer.name, module)
        buffers = module.named_buffers(prefix)
        named = sorted([*parameters_of(layer.name, module), *buffers])
        for _, tensor in named:
            if id(tensor) not in sums:
                sums[id(tensor)] = META if tensor.is_meta else _hex(checksum(tensor))
        values = [sums[id(tensor)] for _, tensor in named]
        if index in stale:
            rows.append((layer.name, STALE))
        elif values and set(values) == {META}:
            rows.append((layer.name, META))
        else:
            rows.append((layer.name, _hex(zlib.crc32(" ".join(values).encode()))))
    return rows
