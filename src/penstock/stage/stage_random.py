"""Seed the random numbers of a stage: which layers draw, and from which generators.

This is determined again for every batch, because models change while they are trained.

Random streams depend on seed, step, layer and micro-batch. Torch's generators are seeded for every
layer that may draw: it has modules of torch that do, or code of the user that is not proven to draw
nothing (`modules.deterministic_code`) or was observed to draw nevertheless. Python's `random` and
`numpy.random` are seeded for layers whose code mentions them or that were observed to draw from
them. A backward holds the generators exclusively if it was observed to draw:
`torch.utils.checkpoint` inside a layer runs the layer's forward again in the backward, and sets and
restores torch's random state meanwhile, which other threads must not see.

The batches number 1, 2, 4, 8 and so on are observed. The count starts again when settings of the
layers change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.batches.batch import Batch
from penstock.errors import RunError
from penstock.modules.host_random import (
    equal_states,
    host_state,
    mentions_host_generators,
)
from penstock.modules.random_ops import RandomOpDetector
from penstock.modules.randomness import (
    draw_settings,
    drawing,
    generator_states,
    has_drawn,
    may_draw,
    prove_no_draws,
    running_backward,
    runs_user_code,
    seed_generators,
    stream_seed,
)
from penstock.values.rare_checks import is_due

#: Last component of a stream's seed in evaluation and in a backward; a training forward has none.
_EVALUATION, _BACKWARD = 1, 2


class Part(Protocol):
    """A layer, or several layers that run as one function."""

    @property
    def index(self) -> int:
        """Index in the chain; of several layers, that of the first."""

    @property
    def name(self) -> str:
        """Name in the chain."""

    @property
    def module(self) -> nn.Module:
        """The module."""


class Place(NamedTuple):
    """A micro-batch of a batch, by number."""

    batch: Batch
    micro_batch: int


class _PartRandomness:
    """What is known about the random numbers of one part.

    Args:
        part: the part.
        mentions_host: whether its code mentions the generators of `random` or `numpy.random`.

    Attributes:
        index: of the part.
        proof: where the part runs code outside of torch: the proof that its forward draws nothing,
            if there is one.
        may_draw: whether its forward may draw in training.
        user_code: whether it runs code outside of torch.
        drew_torch: by training mode, whether it has drawn from torch's generators.
        draws_host: by training mode, whether it draws from `random` or `numpy.random`.
    """

    def __init__(self, part: Part, mentions_host: bool) -> None:
        self.index = part.index
        self.may_draw = may_draw(part.module)
        self.user_code = runs_user_code(part.module)
        self.proof = None
        if self.may_draw and not mentions_host:
            self.proof = prove_no_draws(part.module)
            self.may_draw = self.proof is None
        self.drew_torch = {True: False, False: False}
        self.draws_host = {True: mentions_host, False: mentions_host}

    def needs_seed(self, *, training: bool) -> bool:
        """Return whether its forward needs a random stream of its own."""
        return self.may_draw if training else self.drew_torch[False] or self.draws_host[False]

    def take_over(self, earlier: _PartRandomness) -> None:
        """Take over what was observed before the settings of the part changed."""
        self.drew_torch = earlier.drew_torch
        for training, draws in earlier.draws_host.items():
            self.draws_host[training] |= draws
        # Observation outranks the proof, which assumes that values are plain tensors.
        self.may_draw |= self.drew_torch[True] or self.draws_host[True]


class StageDraws:
    """The random numbers of a stage.

    Args:
        parts: the layers of the stage.
        device: where they compute.
        seed: seed of the pipeline.
        joined: by index, the name of layers that are compiled as one function and therefore cannot
            be seeded one by one.
        compiled: whether the layers are compiled; dispatch modes must not be entered around them.

    Attributes:
        needed: whether the present forward needs the generators.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        device: torch.device,
        seed: int,
        joined: Mapping[int, str],
        *,
        compiled: bool = False,
    ) -> None:
        self._parts, self._device, self._seed = list(parts), device, seed
        self._joined, self._compiled = joined, compiled
        self._batch: Callable[[], Batch | None] = _no_batch
        # Step of the last evaluated batch, and its number among those evaluated at this step: each
        # draws other numbers.
        self._evaluation = (-1, 0)
        self._mentions_by_types: dict[frozenset[type], bool] = {}
        self._randomness: dict[int, _PartRandomness] = {}
        self._rates: list[float] = []
        self._inspect_layers()
        # Of this batch: numbers of forwards and backwards still to be observed; whether a forward
        # has been planned; and of the present forward, whether it is observed and whether it uses
        # the host's generators.
        self._forwards_to_observe = self._backwards_to_observe = 0
        self._is_planned = False
        self._observing = self._host = self.needed = False
        # Of all backwards: whether any ran random ops, and whether any changed the states of the
        # generators.
        self._backward_draws = self._backward_changes_states = False
        # Of the present backward: the part that it has reached (-1 before the first; None outside
        # of a backward, where hooks must not seed), whether the states of the generators changed,
        # and these states when they were last seeded.
        self._part_in_backward: int | None = None
        self._states_changed = False
        self._seeded_states: tuple[list[Tensor], Any] | None = None

    @property
    def watches_backward(self) -> bool:
        """Whether backwards must be run inside `backward`."""
        return self._backwards_to_observe > 0 or self._backward_draws

    def prepare(self, batch: Batch) -> None:
        """Begin a batch and plan its first forward before its input is there."""
        self._begin_batch_once(batch)
        if not self._forwards_to_observe:
            self._plan_forward(batch.training)

    def begin(self, batch: Batch) -> bool:
        """Begin a forward of a micro-batch of `batch`; return whether it needs the generators."""
        self._begin_batch_once(batch)
        if self._observing or not self._is_planned:
            self._plan_forward(batch.training)
        return self.needed

    def _begin_batch_once(self, batch: Batch) -> None:
        """Begin a batch if this is the first call with it."""
        if self._batch() is not batch:
            self._batch = weakref.ref(batch)
            self._begin_batch(batch)
            self._is_planned = False

    def _begin_batch(self, batch: Batch) -> None:
        """Inspect the layers if they have changed; decide which passes of the batch to observe."""
        rates = self._possible_rates()
        proofs_hold = all(proof.holds() for proof in self._proofs)
        if not proofs_hold or draw_settings(self._modules) != self._settings:
            self._inspect_layers()
        elif rates != self._rates:
            self._rates = rates
            self._counts = {True: 0, False: 0}
        training = batch.training
        if not training:
            step, number = self._evaluation
            self._evaluation = batch.step, number + 1 if step == batch.step else 0
        count = self._counts[training] = self._counts[training] + 1
        # All micro-batches of the first batch are observed, then one of batches 2, 4, 8 and so on.
        micro_batches = len(batch.inputs) if count == 1 else int(is_due(count))
        self._forwards_to_observe = micro_batches if self._runs_user_code else 0
        if training:
            self._backwards_to_observe = 0 if self._compiled else self._forwards_to_observe

    def _plan_forward(self, training: bool) -> None:
        """Decide whether to observe the next forward, and which generators it needs."""
        self._is_planned = True
        self._observing = self._forwards_to_observe > 0
        if self._observing:
            self._forwards_to_observe -= 1
            self._host = self.needed = True
            return
        rows = self._randomness.values()
        self._host = any(row.draws_host[training] for row in rows)
        self.needed = any(row.needs_seed(training=training) for row in rows)

    def _inspect_layers(self) -> None:
        """Read the settings of all modules. Parts that have drawn are assumed to draw again.

        Raises:
            RunError: layers that are compiled as one function may draw now.
        """
        self._modules = [module for part in self._parts for module in part.module.modules()]
        self._settings = draw_settings(self._modules)
        before, self._randomness = self._randomness, {}
        for part in self._parts:
            randomness = _PartRandomness(part, self._mentions_host(part.module))
            self._randomness[part.index] = randomness
            if part.index in before:
                randomness.take_over(before[part.index])
            if randomness.may_draw and part.index in self._joined:
                raise RunError(
                    f"layers {self._joined[part.index]} are compiled as one function, because none "
                    "of them could draw random numbers when the pipeline was made; now one may. "
                    "Set hooks, dropout and forwards before the Pipeline is made"
                )
        user_modules = [
            part.module for part in self._parts if self._randomness[part.index].user_code
        ]
        self._runs_user_code = bool(user_modules)
        rows = self._randomness.values()
        self._proofs = [row.proof for row in rows if row.proof is not None]
        # A proof holds for all numbers that the code reads. The attributes of a module stay in one
        # dictionary for as long as it lives.
        self._unproven_attributes = [
            vars(module)
            for part in self._parts
            if self._randomness[part.index].user_code and self._randomness[part.index].proof is None
            for module in part.module.modules()
        ]
        self._rates = self._possible_rates()
        self._counts = {True: 0, False: 0}

    def _mentions_host(self, module: nn.Module) -> bool:
        """Return whether the module's code mentions `random` or `numpy.random`.

        The code is read once per set of classes, unless the module has code outside its class.
        """
        if not runs_user_code(module):
            return False
        parts = list(module.modules())
        if any(
            part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part)
            for part in parts
        ):
            return mentions_host_generators(module)
        types = frozenset(map(type, parts))
        if types not in self._mentions_by_types:
            self._mentions_by_types[types] = mentions_host_generators(module)
        return self._mentions_by_types[types]

    def _possible_rates(self) -> list[float]:
        """Return all float attributes of user code that may draw: any may be a dropout rate."""
        rates: list[float] = []
        for attributes in self._unproven_attributes:
            rates += [value for value in attributes.values() if type(value) is float]
        return rates

    # -- forward

    def running(self) -> AbstractContextManager[None]:
        """Enclose the forward of all parts on a micro-batch, after `begin`."""
        return drawing(self._device, host=self._host) if self.needed else nullcontext()

    def call(self, part: Part, place: Place, run: Callable[[Any], Any], value: Any) -> Any:
        """Run a part on a value with its random stream. Called inside `running`.

        Args:
            part: the part.
            place: the micro-batch.
            run: the forward of the part.
            value: its input.
        """
        randomness = self._randomness[part.index]
        training = place.batch.training
        observing = self._observing and randomness.user_code
        if not observing and not randomness.needs_seed(training=training):
            return run(value)
        host = observing or randomness.draws_host[training]
        seed_generators(self._device, self._forward_seed(part, place), host=host)
        if not randomness.user_code:
            return run(value)
        # Code of users may draw in some calls only: the generators' states tell.
        torch_before = generator_states(self._device)
        host_before = host_state() if observing else None
        output = run(value)
        if has_drawn(self._device, torch_before):
            self._record_draw(randomness, training)
        if host_before is not None and not equal_states(host_before, host_state()):
            randomness.draws_host[training] = True
            randomness.may_draw |= training
        backward_may_draw = self._backwards_to_observe or self._backward_changes_states
        if training and backward_may_draw:
            self._seed_at_backward(part, place, value, output)
        return output

    def call_again(self, part: Part, place: Place, run: Callable[[Any], Any], value: Any) -> Any:
        """Run a recomputed part a second time, in a backward. Arguments as for `call`."""
        randomness = self._randomness[part.index]
        if not randomness.may_draw:
            return run(value)
        host = randomness.draws_host[True]
        with drawing(self._device, host=host):
            seed_generators(self._device, self._forward_seed(part, place), host=host)
            return run(value)

    def _forward_seed(self, part: Part, place: Place) -> int:
        """Return the seed of a part's forward.

        It depends on the place alone, so that no cut and no schedule changes the random numbers.
        """
        components = [self._seed, place.batch.step, part.index, place.micro_batch]
        if not place.batch.training:
            components += [_EVALUATION, self._evaluation[1]]
        return stream_seed(*components)

    def _record_draw(self, randomness: _PartRandomness, training: bool) -> None:
        """Record that a part has drawn from torch's generators.

        The first time, its backwards are observed too: they may draw as well.
        """
        if training and not randomness.drew_torch[True] and not self._compiled:
            batch = self._batch()
            self._backwards_to_observe = 1 if batch is None else len(batch.inputs)
        randomness.drew_torch[training] = True
        randomness.may_draw |= training
        if training and self._compiled:
            self._backward_draws = True

    # -- backward

    def _seed_at_backward(self, part: Part, place: Place, value: Any, output: Any) -> None:
        """Register hooks that seed the generators when the backward reaches the part.

        Args:
            part: the part.
            place: the micro-batch.
            value: the input of the part.
            output: its output.
        """
        seed = stream_seed(self._seed, place.batch.step, part.index, place.micro_batch, _BACKWARD)

        def seed_once(_: Tensor) -> None:
            if self._part_in_backward not in (None, part.index):
                self._part_in_backward = part.index
                self._seed_backward(seed)

        # Tensors that the part passes through unchanged belong to the part that computed them.
        passed_through = set(map(id, pytree.tree_leaves(value)))
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and not leaf.is_leaf and id(leaf) not in passed_through:
                leaf.register_hook(seed_once)  # type: ignore[no-untyped-call]

    def _seed_backward(self, seed: int) -> None:
        self._compare_states()
        seed_generators(self._device, seed, host=True)
        self._seeded_states = generator_states(self._device), host_state()

    def _compare_states(self) -> None:
        """Record whether random numbers were drawn since the generators were last seeded."""
        if self._seeded_states is not None:
            torch_seeded, host_seeded = self._seeded_states
            if has_drawn(self._device, torch_seeded) or not equal_states(host_seeded, host_state()):
                self._states_changed = True

    @contextmanager
    def backward(self, place: Place, *, weights_only: bool = False) -> Iterator[None]:
        """Enclose a backward, if `watches_backward`.

        Args:
            place: the micro-batch.
            weights_only: this is the second part of a backward that is split into two (I and W
                ops), in which some code of the layers runs a second time.

        Raises:
            RunError: a layer has drawn, and `weights_only`.
        """
        # The states of Python's and NumPy's generators take about 50 µs (`host_random`), so they are
        # saved only for the first backwards, and for all if one of these has drawn from them.
        observing = self._backwards_to_observe > 0
        self._backwards_to_observe -= observing
        host = observing or self._backward_changes_states
        seed = stream_seed(self._seed, place.batch.step, -1, place.micro_batch, _BACKWARD)
        self._seeded_states = None
        with drawing(self._device, host=host):
            if host:
                self._states_changed = False
                self._seed_backward(seed)
                self._part_in_backward = -1
            detector = RandomOpDetector()
            try:
                with detector if observing else nullcontext(), running_backward(self._device):
                    yield
            finally:
                self._part_in_backward = None
            if host:
                self._compare_states()
        changed = host and self._states_changed
        self._backward_draws |= detector.detected or changed
        self._backward_changes_states |= changed
        if changed and weights_only:
            names = ", ".join(part.name for part in self._parts)
            raise RunError(
                f"a layer among {names} draws random numbers in its backward (in an autograd "
                "function or a hook), and the schedule splits backwards into two parts, in both of "
                "which it would draw: use a schedule without W ops, such as 1f1b, or draw the "
                "numbers in the forward"
            )


def _no_batch() -> Batch | None:
    """Return None, in place of a weak reference to a batch."""
    return None
