"""Random numbers that depend on seed, step, layer and micro-batch, never on the cut or on who runs
beside whom.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules import module as _hooks

from penstock.tracing.host_random import host_state, restore_host, seed_host

#: The modules of torch.nn that draw random numbers, or hold parts that do without being modules
#: themselves.
_DRAW = (
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.modules.transformer.Transformer,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)

#: A subclass of one of these that only initialises its weights in another way draws nothing ...
_SILENT = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
#: ... which is to say that it has left these as they were.
_RUN = ("__call__", "forward", "_conv_forward", "weight", "bias")

# Threads of one process share torch's generators: whoever seeds one must hold this until the layer
# has run.
_GENERATORS = threading.RLock()


def may_draw(module: nn.Module) -> bool:
    """Whether a forward of `module` could draw random numbers: true unless every part of it is
    known never to.

    Seeding costs some 10 µs per layer and micro-batch, so layers that cannot draw are spared it. A
    layer that was cut out of a traced model knows, and says so by `draws`.
    """
    known = getattr(module, "draws", None)
    if isinstance(known, bool):
        return known
    if _hooks._global_forward_hooks or _hooks._global_forward_pre_hooks:
        return True
    return any(_part_may_draw(part) for part in module.modules())


def draw_settings(modules: Iterable[nn.Module]) -> list[object]:
    """What `may_draw` depends on, for all parts of modules: as long as it is equal, so is the
    answer.

    Hooks may be registered, rates of dropout raised and children exchanged at any time between
    batches.
    """
    return [
        (
            part.__class__,
            values["_modules"] and tuple(values["_modules"].values()),
            bool(values["_forward_hooks"] or values["_forward_pre_hooks"]),
            values.get("p"),
            "forward" in values,
        )
        for part, values in ((part, part.__dict__) for part in modules)
    ]


def has_dropout(module: nn.Module) -> bool:
    """Whether `module` has dropout in it, though it may drop nothing at present."""
    return any(isinstance(part, nn.modules.dropout._DropoutNd) for part in module.modules())


def runs_user_code(module: nn.Module) -> bool:
    """Whether a forward or a backward of `module` may run Python code that is not torch's."""
    if getattr(module, "draws", None) is False:  # cut out of a traced model: operations of torch
        return False
    return any(_part_runs_user_code(part) for part in module.modules())


def _part_runs_user_code(part: nn.Module) -> bool:
    kind = type(part)
    if not kind.__module__.startswith(("torch.nn.modules.", "torch.nn.utils.parametri")):
        base = next((base for base in _SILENT if issubclass(kind, base)), None)
        if base is None or any(
            getattr(kind, name, None) is not getattr(base, name, None) for name in _RUN
        ):
            return True
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks)
    if any(hooks) or part._backward_pre_hooks or "forward" in vars(part):
        return True
    return any(
        parameter is not None
        and bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
        for parameter in part._parameters.values()
    )


def _part_may_draw(part: nn.Module) -> bool:
    kind = type(part)
    if part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part):
        return True
    if not kind.__module__.startswith("torch.nn.modules."):
        base = next((base for base in _SILENT if issubclass(kind, base)), None)
        return base is None or any(
            getattr(kind, name, None) is not getattr(base, name, None) for name in _RUN
        )
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return part.p > 0
    return isinstance(part, _DRAW)


def stream_seed(*parts: int) -> int:
    """A seed of 63 bits from whole numbers (splitmix64 over them), different for different lists."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def _generator(device: torch.device) -> torch.Generator | None:
    """The generator that modules on `device` draw from, besides the CPU's."""
    if device.type == "cuda":  # not yet run on a GPU
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[
            device.index if device.index is not None else torch.cuda.current_device()
        ]
    return None


@contextmanager
def drawing(device: torch.device, *, host: bool = False) -> Iterator[None]:
    """Reserve the generators of this process for this thread, and restore their states afterwards.

    Args:
        device: where layers compute.
        host: restore the states of Python's `random` and of `numpy.random` as well.
    """
    with _GENERATORS:
        other = _generator(device)
        kept = torch.get_rng_state(), None if other is None else other.get_state()
        of_host = host_state() if host else None
        try:
            yield
        finally:
            if of_host is not None:
                restore_host(of_host)
            torch.set_rng_state(kept[0])
            if other is not None and kept[1] is not None:
                other.set_state(kept[1])


def seed_generators(device: torch.device, seed: int, *, host: bool = False) -> None:
    """Seed the generators that a module on `device` draws from, with `host` those of `random` and
    `numpy.random`, too.

    Call it inside `drawing` with the same `host`.
    """
    if host:
        seed_host(seed)
    torch.default_generator.manual_seed(seed)
    other = _generator(device)
    if other is not None:
        other.manual_seed(seed)
