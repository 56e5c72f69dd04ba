"""Random numbers in a `Pipe`: the same at the recompute as at first, the same for threads as for
one, and the caller's to seed.

Torch's generators belong to the process: threads that run layers side by side would draw from them
in an order that is never twice the same. So every layer has a stream of its own, seeded by the
forward, the layer and the micro-batch. Every op that draws is met on its way to torch's kernels,
draws from its layer's stream, and the generators are then restored. The forward's own seed is drawn
from torch's default generator when the first layer draws: `torch.manual_seed` decides all, and a
model that draws nothing moves nothing.

Some layers have the generators for themselves as long as they run: those with
`torch.utils.checkpoint` inside, which saves torch's state and sets it in the backward, and those
that draw from Python's `random` or from `numpy.random`. Which these are is looked at in the
forwards 1, 2, 4, 8 and so on. The numbers are the same either way.

Meeting every op costs some 10 µs each. A partition in whose first forward none drew is therefore
left alone afterwards, as is one with modules that are known never to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.grad.attributes import Attributes
from penstock.tracing.host_random import equal_states, host_state, mentions_host_generators
from penstock.tracing.randomness import (
    drawing,
    may_draw,
    runs_user_code,
    seed_generators,
    stream_seed,
)


class Draws:
    """The random numbers of one forward and its recompute."""

    def __init__(self) -> None:
        self._seed: int | None = None
        self._settled = False
        self.drew = False

    def seed(self) -> int:
        """The forward's own seed. Call it inside `drawing`, before seeding: the generator is then
        as the caller left it.
        """
        if self._seed is None:
            self._seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        return self._seed

    def settle(self) -> None:
        """The forward is over: if layers have drawn, the caller's generator moves on by the seed."""
        if self.drew and not self._settled:
            self._settled = True
            torch.empty((), dtype=torch.int64, device="cpu").random_()


class Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets ops that draw do so reproducibly, while it is entered around a partition's forward on
    one micro-batch.

    `drew` tells afterwards whether any has; `forbidden`, if there is one, is raised instead.
    """

    def __init__(
        self,
        draws: Draws,
        device: torch.device,
        micro_batch: int,
        forbidden: Callable[[str], Exception] | None,
        habits: Habits,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws, self._device, self._micro_batch, self._forbidden = (
            draws,
            device,
            micro_batch,
            forbidden,
        )
        self._habits = habits
        self._context = _context()
        self.drew = False
        self._layer = 0
        self._of_layer: LayerHabits | None = None
        self._alone = False
        self._state: list[torch.Tensor] | None = None

    def run(self, layer: int, module: nn.Module, value: Any) -> Any:
        """What a layer, counted through the whole model, makes of a value."""
        self._layer, self._state = layer, None
        habits = self._of_layer = self._habits.of_layer(module)
        if not (habits.user_code and (habits.host or habits.reruns or self._habits.looks)):
            return module(value)
        with drawing(self._device, host=True):
            self._alone = True  # drawing the forward's seed is not an op of the layer's
            try:
                seed_generators(self._device, self._stream(), host=True)
                before, of_host = states(self._device), host_state()
                made = module(value)
            finally:
                self._alone = False
            drew_of_host = not equal_states(of_host, host_state())
            drew = drew_of_host or not all(map(torch.equal, before, states(self._device)))
        habits.host |= drew_of_host
        if drew:
            self._note("numpy.random or random" if drew_of_host else "an op of torch")
        return made

    def _stream(self) -> int:
        return stream_seed(self._draws.seed(), self._layer, self._micro_batch)

    def _note(self, what: str) -> None:
        self.drew = self._draws.drew = True
        if self._forbidden is not None:
            raise self._forbidden(what)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op."""
        kwargs = kwargs or {}
        if (
            not _is_random(func)
            or kwargs.get("generator") is not None
            or not _by_chance(func, args, kwargs)
        ):
            return func(*args, **kwargs)
        runs_again = self._of_layer is not None and _context() != self._context
        if self._alone:
            assert self._of_layer is not None
            self._of_layer.reruns |= runs_again
            return func(*args, **kwargs)
        with drawing(self._device):
            if self._state is None:
                seed_generators(self._device, self._stream())
            else:
                set_states(self._device, self._state)
            before = states(self._device)
            made = func(*args, **kwargs)
            self._state = states(self._device)
        if not all(map(torch.equal, before, self._state)):
            self._note(str(func))
            if runs_again and self._of_layer is not None and self._of_layer.user_code:
                self._of_layer.reruns = True
                raise RuntimeError(
                    f"layer {self._layer} of a Pipe drew random numbers ({func}) inside torch.utils.checkpoint, or without "
                    "gradients, and had not done so before: the next forward allows for it. Repeat the batch"
                )
        return made


def _context() -> tuple[bool, object]:
    """What `torch.utils.checkpoint` changes around the forward that it will run again."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return torch.is_grad_enabled(), object() if top is None else top(True)


@lru_cache(maxsize=4096)
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@lru_cache(maxsize=256)
def _chances(func: Any) -> tuple[tuple[int, str], ...]:
    """Where, among an op's arguments, the share is that it drops: fused attention has the tag of
    random ops without any, too.
    """
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


def set_states(device: torch.device, values: list[torch.Tensor]) -> None:
    """Let the generators that ops on a device draw from go on from `states`."""
    torch.set_rng_state(values[0])
    if len(values) > 1:
        torch.cuda.set_rng_state(values[1], device)


class LayerHabits:
    """What is known of a layer: whether it runs code of the user's, draws from the host's
    generators, or draws in what runs again.
    """

    def __init__(self, module: nn.Module) -> None:
        self.user_code = runs_user_code(module)
        self.host = self.user_code and mentions_host_generators(module)
        self.reruns = False


class Habits:
    """What is known of a partition: whether its forward draws, in training and in evaluation, and
    whether its backward does.

    `looks`: whether the present run is looked at closely.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._layers: dict[nn.Module, LayerHabits] = {}
        self._runs = 0
        self._backward_draws = False
        self.looks = True
        self._parts: list[nn.Module] = []
        self._able = False
        self._silent: dict[bool, object] = {}
        self._attributes = Attributes(())
        self.watched = False

    def silent(self, parts: list[nn.Module], training: bool) -> bool:
        """Whether it may run without anybody looking: it cannot draw, or did not the last time that
        somebody looked.
        """
        if parts != self._parts:
            own = self._module._forward_hooks or self._module._forward_pre_hooks
            self._parts, self._able, self._silent = (
                parts,
                bool(own) or any(map(may_draw, self._module.children())),
                {},
            )
            self._layers, self._runs = {}, 0
            self._attributes = Attributes(self._module.children())
        self._runs += 1
        self.looks = self._able and self._runs & (self._runs - 1) == 0
        if self.looks:
            return False
        if not self._able:
            return True
        return (
            not self.watched
            and training in self._silent
            and self._silent[training] == self._rates()
        )

    def of_layer(self, module: nn.Module) -> LayerHabits:
        """What is known of one of its layers."""
        if module not in self._layers:
            self._layers[module] = LayerHabits(module)
        return self._layers[module]

    @contextmanager
    def backward(self, device: torch.device) -> Iterator[None]:
        """Around a backward: it has the generators for itself if layers draw there."""
        layers = [self.of_layer(layer) for layer in self._module.children()]
        looks = self.looks and any(layer.user_code for layer in layers)
        if not (looks or self._backward_draws or any(layer.reruns for layer in layers)):
            yield
            return
        met = Met()
        with drawing(device), met if looks else nullcontext():
            yield
        self._backward_draws |= met.random

    @property
    def certain(self) -> bool:
        """Whether it is known never to draw, not only seen not to."""
        return not self._able

    def saw(self, training: bool, drew: bool) -> None:
        """A forward of all micro-batches is over."""
        if drew:
            self._silent.pop(training, None)
        else:
            self._silent[training] = self._rates()

    def _rates(self) -> list[object]:
        """Numbers that may be rates of dropout, under whatever name."""
        rows = self._attributes.contents()
        return _shares(self._parts) + [
            value for row in rows for value in row if type(value) is float
        ]


class Met(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an op that draws has run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op."""
        self.random |= _is_random(func)
        return func(*args, **(kwargs or {}))


def _shares(parts: Iterable[nn.Module]) -> list[object]:
    """The settings by which layers that drop nothing begin to."""
    return [
        part.__dict__[name] for part in parts for name in ("p", "dropout") if name in part.__dict__
    ]
