"""Reproducible random numbers in a `Pipe`: equal in the recompute and the first forward, equal for
several threads and one, and seeded by the caller.

Torch's generators belong to the process. Threads that run layers concurrently would draw from them
in an order that differs from run to run. Every layer therefore has a random stream, seeded from the
forward's seed, the layer and the micro-batch. A dispatch mode intercepts every op that draws: the
op draws from the stream of its layer, and the generators are then restored. The forward's seed is
drawn from torch's default generator when the first layer draws. So `torch.manual_seed` determines
all random numbers, and a model that draws nothing leaves the generator as it is.

Some layers hold the generators exclusively while they run: layers that use `torch.utils.checkpoint`
inside, which saves torch's random state and sets it again in the backward, and layers that draw
from Python's `random` or from `numpy.random`. To detect such layers, forwards number 1, 2, 4, 8 and
so on are observed: all layers with code of the user then hold the generators exclusively. The
numbers are the same with and without exclusive use.

Intercepting costs about 10 µs per op. It is left out for a partition whose modules are known never
to draw, and, except in observed forwards, for one whose last intercepted forward drew nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.grad.attributes import Attributes
from penstock.modules.host_random import equal_states, host_state, mentions_host_generators
from penstock.modules.random_ops import RandomOpDetector, draws_with, is_random_op
from penstock.modules.randomness import (
    drawing,
    generator_states,
    has_drawn,
    may_draw,
    running_backward,
    runs_user_code,
    seed_generators,
    set_generator_states,
    stream_seed,
)
from penstock.values.rare_checks import is_due


class ForwardSeed:
    """The random seed of one forward and of its recompute.

    Attributes:
        drew: whether any layer has drawn random numbers.
    """

    def __init__(self) -> None:
        self._seed: int | None = None
        self.drew = False

    def get(self) -> int:
        """Return the seed; the first call draws it from torch's default generator.

        Call this inside `drawing`, before seeding: the generator then has the caller's state, and
        `drawing` restores that state afterwards.
        """
        if self._seed is None:
            self._seed = _draw_seed()
        return self._seed

    def advance_generator(self) -> None:
        """At the end of the forward, advance the caller's generator by the seed if layers drew."""
        if self.drew:
            _draw_seed()


def _draw_seed() -> int:
    """Draw a seed from torch's default generator."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


class SeededOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode in which random ops draw from the stream of their layer.

    It is entered around the forward of a partition on one micro-batch.

    Args:
        forward_seed: the seed of the forward.
        device: where the partition computes.
        micro_batch: index of the micro-batch.
        random_op_error: if given, a function from the name of an op to the exception that is raised
            when that op has drawn.
        randomness: what is known about the partition's use of random numbers.

    Attributes:
        drew: whether any op has drawn.
    """

    def __init__(
        self,
        forward_seed: ForwardSeed,
        device: torch.device,
        micro_batch: int,
        random_op_error: Callable[[str], Exception] | None,
        randomness: PartitionRandomness,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._forward_seed, self._device = forward_seed, device
        self._micro_batch = micro_batch
        self._random_op_error = random_op_error
        self._randomness = randomness
        self._context = _checkpoint_context()
        self.drew = False
        # The layer that runs; None in hooks of the partition before its first layer.
        self._layer = 0
        self._layer_randomness: LayerRandomness | None = None
        # Whether that layer holds the generators, which then have the state of its stream.
        self._exclusive = False
        # The state of its stream after its last random op; None before the first one.
        self._stream_state: list[torch.Tensor] | None = None

    def run(self, layer: int, module: nn.Module, value: Any) -> Any:
        """Run one layer on a value.

        Args:
            layer: index of the layer in the whole model.
            module: the layer.
            value: its input.
        """
        self._layer, self._stream_state = layer, None
        self._layer_randomness = self._randomness.of_layer(module)
        if self._randomness.needs_exclusive_use(self._layer_randomness):
            return self._run_exclusively(module, value, self._layer_randomness)
        return module(value)

    def _run_exclusively(self, module: nn.Module, value: Any, randomness: LayerRandomness) -> Any:
        """Run a layer that holds all generators, seeded with its stream, until it ends."""
        with drawing(self._device, host=True):
            # Before seeding: this mode must not intercept the op that draws the forward's seed.
            self._exclusive = True
            try:
                seed_generators(self._device, self._stream(), host=True)
                states_before, host_before = generator_states(self._device), host_state()
                output = module(value)
            finally:
                self._exclusive = False
            drew_on_host = not equal_states(host_before, host_state())
            drew = drew_on_host or has_drawn(self._device, states_before)
        randomness.host_random |= drew_on_host
        if drew:
            self._record_draw("numpy.random or random" if drew_on_host else "an op of torch")
        return output

    def _stream(self) -> int:
        """Return the seed of the present layer's stream."""
        return stream_seed(self._forward_seed.get(), self._layer, self._micro_batch)

    def _record_draw(self, op: str) -> None:
        self.drew = self._forward_seed.drew = True
        if self._random_op_error is not None:
            raise self._random_op_error(op)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op; a random one draws from the stream of its layer."""
        kwargs = kwargs or {}
        if (
            not is_random_op(func)
            or kwargs.get("generator") is not None
            or not draws_with(func, args, kwargs)
        ):
            return func(*args, **kwargs)
        randomness = self._layer_randomness
        will_rerun = randomness is not None and _checkpoint_context() != self._context
        if self._exclusive:
            assert randomness is not None
            randomness.random_in_rerun |= will_rerun
            return func(*args, **kwargs)
        result, drew = self._draw_from_stream(func, args, kwargs)
        if drew:
            self._record_draw(str(func))
            if will_rerun and randomness is not None and randomness.user_code:
                randomness.random_in_rerun = True
                raise RuntimeError(
                    f"layer {self._layer} of a Pipe drew random numbers ({func}) inside "
                    "torch.utils.checkpoint, or without gradients, and had not done so before. The "
                    "next forward allows for it: repeat the batch"
                )
        return result

    def _draw_from_stream(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Run one op with the generators in the state of its layer's stream.

        Other partitions draw from the same generators between two ops of a layer.

        Returns:
            The result of the op, and whether it drew a number.
        """
        with drawing(self._device):
            if self._stream_state is None:
                seed_generators(self._device, self._stream())
            else:
                set_generator_states(self._device, self._stream_state)
            before = generator_states(self._device)
            result = func(*args, **kwargs)
            self._stream_state = generator_states(self._device)
        return result, not all(map(torch.equal, before, self._stream_state))


def _checkpoint_context() -> tuple[bool, object]:
    """Return what `torch.utils.checkpoint` changes around a forward that it will run again.

    That is the gradient mode (reentrant variant) or the innermost hooks on saved tensors.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    # Without this private function of torch no two contexts count as equal.
    return torch.is_grad_enabled(), object() if top is None else top(True)


class LayerRandomness:
    """What is known about the random numbers of one layer.

    Attributes:
        user_code: whether the layer runs code outside of torch. Only such a layer can have one of
            the following two attributes.
        host_random: whether it draws, or its code mentions, `random` or `numpy.random`.
        random_in_rerun: whether it draws inside `torch.utils.checkpoint`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.user_code = runs_user_code(module)
        self.host_random = self.user_code and mentions_host_generators(module)
        self.random_in_rerun = False


class PartitionRandomness:
    """What is known about the random numbers of one partition, from its code and from past runs.

    Attributes:
        may_draw: whether the modules may draw; if not, they are known never to.
        observing: whether the present run is one of those observed on schedule (1, 2, 4, 8, ...).
        always_intercept: intercept the ops of every run, because one without interception may have
            drawn.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.may_draw = False
        self.observing = True
        self.always_intercept = False
        self._runs = 0
        self._parts: list[nn.Module] = []
        self._layers: dict[nn.Module, LayerRandomness] = {}
        # By training mode: the dropout rates with which an intercepted forward drew nothing.
        self._rates_without_draws: dict[bool, object] = {}
        self._attributes = Attributes(())
        self._backward_draws = False

    def begin_run(self, parts: list[nn.Module], training: bool) -> bool:
        """Count a forward; return whether the random ops of its partition must be intercepted.

        Args:
            parts: all modules of the partition.
            training: whether the partition is in training mode.
        """
        if parts != self._parts:
            self._examine_modules(parts)
        self._runs += 1
        self.observing = self.may_draw and is_due(self._runs)
        if not self.may_draw:
            return False
        if self.observing or self.always_intercept:
            return True
        return self._rates_without_draws.get(training) != self._dropout_rates()

    def _examine_modules(self, parts: list[nn.Module]) -> None:
        """Begin anew with the modules that the partition has now."""
        has_hooks = self._module._forward_hooks or self._module._forward_pre_hooks
        self.may_draw = bool(has_hooks) or any(map(may_draw, self._module.children()))
        self._runs = 0
        self._parts, self._layers = parts, {}
        self._rates_without_draws = {}
        self._attributes = Attributes(self._module.children())

    def of_layer(self, module: nn.Module) -> LayerRandomness:
        """Return what is known about one of the partition's layers."""
        if module not in self._layers:
            self._layers[module] = LayerRandomness(module)
        return self._layers[module]

    def needs_exclusive_use(self, layer: LayerRandomness) -> bool:
        """Whether a layer holds the generators exclusively in the present run."""
        is_observed = self.observing and layer.user_code
        return is_observed or layer.host_random or layer.random_in_rerun

    @property
    def observes_layers(self) -> bool:
        """Whether layers of the present run hold the generators because they are observed."""
        return self.observing and any(
            self.of_layer(layer).user_code for layer in self._module.children()
        )

    def backward(self, device: torch.device) -> AbstractContextManager[None]:
        """Enclose a backward: reserve the generators for it if layers may draw in it."""
        return self._reserve_generators(device) if self.may_draw else nullcontext()

    @contextmanager
    def _reserve_generators(self, device: torch.device) -> Iterator[None]:
        """Reserve the generators for a backward that is observed or known to draw.

        An observed backward records whether it runs random ops.
        """
        layers = [self.of_layer(layer) for layer in self._module.children()]
        observed = self.observes_layers
        known_to_draw = self._backward_draws or any(layer.random_in_rerun for layer in layers)
        if not (observed or known_to_draw):
            yield
            return
        detector = RandomOpDetector()
        with (
            drawing(device),
            detector if observed else nullcontext(),
            running_backward(device),
        ):
            yield
        self._backward_draws |= detector.detected

    def record_run(self, training: bool, drew: bool) -> None:
        """Record whether an intercepted forward of all micro-batches drew random numbers."""
        if drew:
            self._rates_without_draws.pop(training, None)
        else:
            self._rates_without_draws[training] = self._dropout_rates()

    def _dropout_rates(self) -> list[object]:
        """Return all values that may be dropout rates: `p`, `dropout`, and any float attribute."""
        rows = self._attributes.contents()
        floats = [value for row in rows for value in row if type(value) is float]
        return _dropout_settings(self._parts) + floats


def _dropout_settings(parts: Iterable[nn.Module]) -> list[object]:
    """Return the attributes `p` and `dropout` of all modules, as torch's dropout layers have."""
    return [
        part.__dict__[name] for part in parts for name in ("p", "dropout") if name in part.__dict__
    ]
