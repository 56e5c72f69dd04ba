"""Random numbers in a `Pipe`: the same at the recompute as at first, the same for threads as for one, and the caller's to seed.

Torch's generators belong to the process: threads that run layers side by side would draw from them in an order that is never twice the
same. So every op that draws is met on its way to torch's kernels, and has a generator seeded for it, by the forward, the layer, the
micro-batch and how many such ops the layer has had; the generators are then put back. The forward's own seed is drawn from torch's
default generator at its first such op: `torch.manual_seed` decides all, and a model that draws nothing moves nothing.

Meeting every op costs some 10 µs each. A partition in whose first forward none drew is therefore left alone afterwards, as is one with
modules that are known never to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.tracing.randomness import drawing, may_draw, seed_generators, stream_seed


class Draws:
    """The random numbers of one forward and its recompute."""

    def __init__(self) -> None:
        self._seed: int | None = None
        self._settled = False

    def seed(self) -> int:
        """The forward's own seed. Call it inside `drawing`, before seeding: the generator is then as the caller left it."""
        if self._seed is None:
            self._seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        return self._seed

    def settle(self) -> None:
        """The forward is over: if it has drawn its seed, the caller's generator moves on by that."""
        if self._seed is not None and not self._settled:
            self._settled = True
            torch.empty((), dtype=torch.int64, device="cpu").random_()


class Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets ops that draw do so reproducibly, while it is entered around a partition's forward on one micro-batch.

    `drew` tells afterwards whether any has; `forbidden`, if there is one, is raised instead.
    """

    def __init__(
        self,
        draws: Draws,
        device: torch.device,
        micro_batch: int,
        forbidden: Callable[[str], Exception] | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws, self._device, self._micro_batch, self._forbidden = (
            draws,
            device,
            micro_batch,
            forbidden,
        )
        self.layer = 0
        self.drew = False
        self._count = 0

    def begin(self, layer: int) -> None:
        """The ops to come are this layer's, counted through the whole model."""
        self.layer, self._count = layer, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op."""
        kwargs = kwargs or {}
        if (
            not _is_random(func)
            or kwargs.get("generator") is not None
            or not _by_chance(func, args, kwargs)
        ):
            return func(*args, **kwargs)
        with drawing(self._device):
            seed_generators(
                self._device,
                stream_seed(self._draws.seed(), self.layer, self._micro_batch, self._count),
            )
            before = states(self._device)
            made = func(*args, **kwargs)
            drew = not all(map(torch.equal, before, states(self._device)))
        self._count += 1
        self.drew |= drew
        if drew and self._forbidden is not None:
            raise self._forbidden(str(func))
        return made


@lru_cache(maxsize=4096)
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@lru_cache(maxsize=256)
def _chances(func: Any) -> tuple[tuple[int, str], ...]:
    """Where, among an op's arguments, the share is that it drops: fused attention has the tag of random ops without any, too."""
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.name == "dropout_p"
    )


def _by_chance(func: Any, args: Any, kwargs: Any) -> bool:
    found = _chances(func)
    return not found or any(
        (args[place] if place < len(args) else kwargs.get(name, 0.0)) != 0 for place, name in found
    )


def states(device: torch.device) -> list[torch.Tensor]:
    """Of the generators that ops on a device draw from."""
    return [
        torch.get_rng_state(),
        *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else []),
    ]


class Habits:
    """What is known of a partition: whether its forward draws, in training and in evaluation."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: list[nn.Module] = []
        self._able = False
        self._silent: dict[bool, object] = {}
        self.watched = False

    def silent(self, parts: list[nn.Module], training: bool) -> bool:
        """Whether it may run without anybody looking: it cannot draw, or did not the last time that somebody looked."""
        if parts != self._parts:
            own = self._module._forward_hooks or self._module._forward_pre_hooks
            self._parts, self._able, self._silent = (
                parts,
                bool(own) or any(map(may_draw, self._module.children())),
                {},
            )
        if not self._able:
            return True
        return (
            not self.watched
            and training in self._silent
            and self._silent[training] == _shares(parts)
        )

    @property
    def certain(self) -> bool:
        """Whether it is known never to draw, not only seen not to."""
        return not self._able

    def saw(self, training: bool, drew: bool) -> None:
        """A forward of all micro-batches is over."""
        if drew:
            self._silent.pop(training, None)
        else:
            self._silent[training] = _shares(self._parts)


def _shares(parts: Iterable[nn.Module]) -> list[object]:
    """The settings by which layers that drop nothing begin to."""
    return [
        part.__dict__[name] for part in parts for name in ("p", "dropout") if name in part.__dict__
    ]
