"""Describe what a rank is about to run, as text that ranks can compare."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from penstock.modules.state_names import parameters_of, prefix_of
from penstock.option import options_of
from penstock.ranks.checksum import checksum
from penstock.ranks.settings.run_config import RunConfig
from penstock.ranks.settings.setting_differences import META, STALE, Description
from penstock.runtime.assembly import Assembly
from penstock.runtime.stale_guard import stale_layers
from penstock.stage.stage_builder import Training
from penstock.tracing.traced_chain import TracedChain
from penstock.units import format_count

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+\b")

#: Entries of an optimizer's groups that are parameters or their names, not options.
_NOT_OPTIONS = ("params", "param_names")

#: Levels of nested values that are described.
_DEPTH = 4

#: Types that `repr` describes the same way in all processes.
_REPR_TYPES = (bool, int, str, complex, bytes, torch.dtype, torch.memory_format, torch.device)


def describe_run(
    traced: TracedChain, setting: RunConfig, training: Training, **further: object
) -> Description:
    """Describe what this rank is about to run.

    Args:
        traced: the model.
        setting: the configuration of the run.
        training: how the model is trained.
        further: further settings that all ranks must share, by name.
    """
    schedule = setting.schedule
    facts = _describe_settings(traced, setting, training)
    facts |= {name: describe(value) for name, value in further.items()}
    lists = {
        "layer": [(layer.name, layer.kind) for layer in traced.layers],
        "parameter": [_describe_parameter(tensor) for tensor in traced.description.tensors],
        "module of layer": [
            (layer.name, _describe_module(module))
            for layer, module in zip(traced.layers, traced.modules, strict=True)
        ],
        "program of rank": [
            (str(rank), " ".join(map(str, program)))
            for rank, program in enumerate(schedule.programs)
        ],
    }
    return Description(facts, lists, _describe_weights(traced), _home_ranks(setting))


def _describe_settings(
    traced: TracedChain, setting: RunConfig, training: Training
) -> dict[str, str]:
    """Describe versions, schedule and options, by name."""
    schedule = setting.schedule
    facts = {
        "penstock": _penstock_version(),
        "torch": _minor_version(torch.__version__),
        "ranks": format_count(schedule.ranks, "rank"),
        "layers": f"{len(traced)} layers",
        "cut": f"stages of {list(setting.lengths)} layers",
        "schedule": (
            f"{schedule.name} with {schedule.stages} stages, {schedule.micro_batches} micro-batches"
        ),
        "weights": describe(setting.rule.name),
        "seed": describe(training.seed),
    }
    for field in dataclasses.fields(setting):
        if field.name not in ("lengths", "schedule", "rule", "planned_busy_s"):
            facts[field.name] = describe(getattr(setting, field.name))
    for field in dataclasses.fields(schedule):
        if field.name not in ("name", "options", "programs") and not field.name.startswith("_"):
            facts[f"schedule: {field.name}"] = describe(getattr(schedule, field.name))
    for name in (field.name for field in dataclasses.fields(training)):
        if name not in ("optimizer", "seed", "options", "parallelism"):
            facts[name] = describe(getattr(training, name))
    for option_field, option_facts in options_of(training.options):
        if not option_facts.private:
            facts[option_field.name] = describe(getattr(training.options, option_field.name))
    # `describe_optimizers` compares types and options, once the stages have their optimizers.
    facts["optimizer"] = "none" if training.optimizer is None else "there is one"
    return facts


def describe_optimizers(assembly: Assembly) -> Description:
    """Describe the optimizers of the local stages: type, groups and options.

    The description of a rank without optimizers is empty.
    """
    facts: dict[str, str] = {}
    for stage in assembly.stages:
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
    """Describe a value by a text that is the same in every process that has the same value.

    Functions are described by their names and by simple defaults of their arguments, objects of
    unknown types by their type.

    Args:
        value: the value.
        depth: levels of nested values to describe.
    """
    if isinstance(value, float):
        # NumPy floats are floats, and their repr names the type.
        return repr(float(value))
    if value is None or isinstance(value, _REPR_TYPES):
        return repr(value)
    if depth == 0:
        return type(value).__name__
    describe_nested = functools.partial(describe, depth=depth - 1)
    if isinstance(value, Tensor):
        return f"tensor of {tuple(value.shape)}, {value.dtype}, checksum {_hex(checksum(value))}"
    if isinstance(value, nn.Module):
        return _describe_module_values(value, describe_nested)
    if isinstance(value, (Mapping, AbstractSet, Sequence)):
        return _describe_collection(value, describe_nested)
    if isinstance(value, functools.partial):
        parts = map(describe_nested, (value.func, value.args, value.keywords))
        return f"partial({', '.join(parts)})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        rows = [
            f"{field.name}={describe_nested(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if not field.name.startswith("_")
        ]
        return f"{type(value).__name__}({', '.join(rows)})"
    return _describe_callable(value, describe_nested)


def _describe_collection(value: object, describe_nested: Callable[[object], str]) -> str:
    """Describe a mapping, set or sequence by its items, sorted unless it is a sequence."""
    if isinstance(value, Mapping):
        rows = [f"{describe_nested(key)}: {describe_nested(item)}" for key, item in value.items()]
        return f"{{{', '.join(sorted(rows))}}}"
    if isinstance(value, AbstractSet):
        return f"{{{', '.join(sorted(map(describe_nested, value)))}}}"
    assert isinstance(value, Sequence)
    return f"[{', '.join(map(describe_nested, value))}]"


def _describe_module_values(module: nn.Module, describe_nested: Callable[[object], str]) -> str:
    """Describe a module by its `repr` without addresses and the checksums of its tensors."""
    state = {
        name: checksum(tensor)
        for name, tensor in module.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    text = _ADDRESS.sub("", " ".join(repr(module).split()))
    return text + (f" with values {describe_nested(state)}" if state else "")


def _describe_callable(value: object, describe_nested: Callable[[object], str]) -> str:
    """Describe a function or method by its name, any other object by its type."""
    if inspect.ismethod(value):
        return f"{type(value.__self__).__name__}.{value.__name__}"
    name = getattr(value, "__qualname__", None)
    if name is None:
        return f"{type(value).__module__}.{type(value).__qualname__}"
    full_name = f"{getattr(value, '__module__', None) or ''}.{name}".removeprefix("__main__.")
    # Closure variables are left out: those of a loss that prints on rank 0 only include the rank.
    defaults = [
        default
        for default in getattr(value, "__defaults__", None) or ()
        if isinstance(default, (bool, int, float, str, torch.dtype))
    ]
    return full_name + (f" with {describe_nested(defaults)}" if defaults else "")


def _penstock_version() -> str:
    try:
        return _minor_version(version("penstock"))
    except PackageNotFoundError:
        return "not installed"


def _minor_version(text: str) -> str:
    """Return the first two components of a version."""
    return ".".join(text.split(".")[:2])


def _hex(number: int | None) -> str:
    return "unknown" if number is None else f"{number:08x}"


def _describe_parameter(tensor: Any) -> tuple[str, str]:
    """Return name and description of a parameter."""
    trained = "trained" if tensor.trainable else "not trained"
    return tensor.name, f"{tensor.shape}, {tensor.dtype}, {trained}"


def _describe_module(module: nn.Module) -> str:
    """Describe a layer by class, options and training mode."""
    parts = list(module.modules())
    training = sum(part.training for part in parts)
    mode = "in training mode" if training == len(parts) else "in evaluation mode"
    if 0 < training < len(parts):
        mode = f"with {training} of {len(parts)} modules in training mode"
    # Layers of a traced model print generated code, in which names may differ between processes.
    is_traced = getattr(module, "whole_names", False)
    text = type(module).__name__ if is_traced else _ADDRESS.sub("", " ".join(repr(module).split()))
    return f"{text} {mode}"


def _home_ranks(setting: RunConfig) -> list[int]:
    """Return, by layer, the first rank of its stage."""
    home_ranks: list[int] = []
    for ranks, length in zip(setting.schedule.ranks_of_stage, setting.lengths, strict=False):
        home_ranks += [ranks[0]] * length
    return home_ranks


def _describe_weights(traced: TracedChain) -> list[tuple[str, str]]:
    """Return name and checksum of the parameters and buffers of every layer."""
    stale = stale_layers(traced)
    # By id: a tensor that several layers use is read once.
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
