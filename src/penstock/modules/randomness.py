"""Random numbers that depend on seed, step, layer and micro-batch alone.

They depend neither on the partition nor on the order in which threads run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.modules import module as _hooks

from penstock.modules.deterministic_code import (
    DeterminismProof,
    is_torchs,
    prove_deterministic,
)
from penstock.modules.generator_lock import GeneratorLock
from penstock.modules.hooks import has_hooks
from penstock.modules.host_random import host_state, restore_host, seed_host

#: The modules of torch.nn that draw random numbers by themselves or by functions they call.
_DRAWING_MODULES = (
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

#: A subclass of one of these classes draws nothing if it overrides none of the attributes in
#: `_FORWARD_ATTRIBUTES`: then it only initialises its weights differently.
_DETERMINISTIC_BASES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
_FORWARD_ATTRIBUTES = ("__call__", "forward", "_conv_forward", "weight", "bias")

# Threads of one process share torch's generators: a thread that seeds one must hold this lock until
# the layer has run.
_GENERATORS_LOCK = GeneratorLock()


def may_draw(module: nn.Module) -> bool:
    """Return whether a forward of `module` may draw random numbers.

    True unless all submodules are known never to draw. Seeding takes about 10 µs per layer and
    micro-batch, so it is skipped for layers that cannot draw. A layer of a traced model knows the
    answer, as its attribute `draws`.
    """
    draws = _draws(module)
    if isinstance(draws, bool):
        return draws
    if _hooks._global_forward_hooks or _hooks._global_forward_pre_hooks:
        return True
    return any(_part_may_draw(part) for part in module.modules())


def prove_no_draws(module: nn.Module) -> DeterminismProof | None:
    """Return a proof that a forward of a module with code of the user draws nothing, if there is
    one.

    The code of the user is read. Of torch's modules it is known which may draw.
    """
    if _hooks._global_forward_hooks or _hooks._global_forward_pre_hooks:
        return None
    for part in module.modules():
        if part._forward_hooks or part._forward_pre_hooks or isinstance(_draws(part), bool):
            return None
        if is_torchs(type(part)) and _part_may_draw(part):
            return None
    return prove_deterministic(module)


def _draws(module: nn.Module) -> object:
    """Return what a layer of a traced model knows about itself; None of any other module."""
    return getattr(module, "draws", None)


def draw_settings(modules: Iterable[nn.Module]) -> list[object]:
    """Return everything on which `may_draw` depends, to detect changes between batches.

    Hooks may be registered, dropout rates raised and children replaced at any time.
    """
    settings: list[object] = []
    for module in modules:
        values = module.__dict__
        settings.append(
            (
                module.__class__,
                values["_modules"] and tuple(values["_modules"].values()),
                bool(values["_forward_hooks"] or values["_forward_pre_hooks"]),
                values.get("p"),
                "forward" in values,
            )
        )
    return settings


def has_dropout(module: nn.Module) -> bool:
    """Return whether `module` contains dropout, whatever its rate."""
    return any(isinstance(part, nn.modules.dropout._DropoutNd) for part in module.modules())


def runs_user_code(module: nn.Module) -> bool:
    """Return whether a module's forward or backward may run Python code that is not torch's."""
    if _draws(module) is False:  # a layer of a traced model: torch ops only
        return False
    return any(_part_runs_user_code(part) for part in module.modules())


def _part_runs_user_code(part: nn.Module) -> bool:
    """Return whether a module itself, without its submodules, runs code of the user."""
    kind = type(part)
    is_torchs = kind.__module__.startswith(("torch.nn.modules.", "torch.nn.utils.parametri"))
    if not is_torchs and not _has_torchs_forward(kind):
        return True
    if has_hooks(part) or "forward" in vars(part):
        return True
    return any(
        parameter is not None
        and bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
        for parameter in part._parameters.values()
    )


def _has_torchs_forward(kind: type[nn.Module]) -> bool:
    """Return whether a class runs the same code as one of the deterministic bases."""
    base = next((base for base in _DETERMINISTIC_BASES if issubclass(kind, base)), None)
    return base is not None and all(
        getattr(kind, name, None) is getattr(base, name, None) for name in _FORWARD_ATTRIBUTES
    )


def _part_may_draw(part: nn.Module) -> bool:
    """Return whether a module itself, without its submodules, may draw random numbers."""
    kind = type(part)
    if part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part):
        return True
    if not is_torchs(kind):
        return not _has_torchs_forward(kind)
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return part.p > 0
    return isinstance(part, _DRAWING_MODULES)


def stream_seed(*parts: int) -> int:
    """Return a seed of 63 bits that depends on a list of integers (splitmix64 over them)."""
    # 2**64 divided by the golden ratio, and below the multipliers of splitmix64.
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    # To torch a seed is a signed integer of 64 bits.
    return state >> 1


def _generators(device: torch.device) -> list[torch.Generator]:
    """Return torch's generators for the CPU and, for a GPU, the device."""
    if device.type != "cuda":
        return [torch.default_generator]
    # Not yet run on a GPU.
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of torch's generators from which a module on `device` may draw."""
    return [generator.get_state() for generator in _generators(device)]


def set_generator_states(device: torch.device, states: Iterable[torch.Tensor]) -> None:
    """Set the generators to states that `generator_states` returned."""
    for generator, state in zip(_generators(device), states, strict=True):
        generator.set_state(state)


def has_drawn(device: torch.device, before: Iterable[torch.Tensor]) -> bool:
    """Return whether a number was drawn since `generator_states` returned `before`."""
    return not all(map(torch.equal, before, generator_states(device)))


@contextmanager
def drawing(device: torch.device, *, host: bool = False) -> Iterator[None]:
    """Reserve the generators of this process for this thread; restore their states afterwards.

    Args:
        device: where layers compute.
        host: also restore the states of Python's `random` and of `numpy.random`.
    """
    # In a backward this is a thread of the device, unless that is the CPU. The number is what
    # torch.utils.checkpoint tells backwards by.
    in_device_thread = device.type != "cpu" and torch._C._current_graph_task_id() != -1
    with _GENERATORS_LOCK.held(passes=in_device_thread):
        states = generator_states(device)
        saved_host_state = host_state() if host else None
        try:
            yield
        finally:
            if saved_host_state is not None:
                restore_host(saved_host_state)
            set_generator_states(device, states)


def running_backward(device: torch.device) -> AbstractContextManager[None]:
    """Enclose a backward that is called inside `drawing`.

    Autograd's device thread, for which the caller waits, may enter `drawing` meanwhile.
    """
    return nullcontext() if device.type == "cpu" else _GENERATORS_LOCK.opened()


def seed_generators(device: torch.device, seed: int, *, host: bool = False) -> None:
    """Seed the generators from which a module on `device` draws.

    Call it inside `drawing` with the same `host`.

    Args:
        device: where the module computes.
        seed: the seed.
        host: also seed Python's `random` and `numpy.random`.
    """
    if host:
        seed_host(seed)
    for generator in _generators(device):
        generator.manual_seed(seed)
