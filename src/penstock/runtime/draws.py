"""Who draws random numbers on a stage, and from where: asked anew for every batch, because models
change while they are trained.

Streams depend on seed, step, layer and micro-batch. Torch's generators are seeded for every layer
that may draw. Python's `random` and `numpy.random` are seeded for layers whose code mentions them
or that were seen to draw from them. A backward takes the generators for itself where it was seen to
draw: `torch.utils.checkpoint` inside a layer runs the layer's forward again there, and sets and
restores torch's state meanwhile, which another thread must not see.

What a layer does is looked at in its batches 1, 2, 4, 8 and so on, and whenever its settings have
changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import RunError
from penstock.grad.attributes import Attributes
from penstock.runtime.batch import Batch
from penstock.runtime.pipe_random import Met
from penstock.tracing.host_random import (
    equal_states,
    host_state,
    mentions_host_generators,
)
from penstock.tracing.randomness import (
    draw_settings,
    drawing,
    may_draw,
    runs_user_code,
    seed_generators,
    stream_seed,
)

#: Numbers that end a list of a stream's parts, where it is not that of a forward in training.
_EVALUATION, _BACKWARD = 1, 2


class Part(Protocol):
    """A layer, or several that run as one."""

    @property
    def index(self) -> int:
        """Its place in the chain."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def module(self) -> nn.Module:
        """What runs."""


class Place(NamedTuple):
    """A micro-batch of a batch."""

    batch: Batch
    micro_batch: int


class _Habits:
    """What is known of one part. `torch` and `host`: by training or not, whether it has drawn from
    torch's or the host's generators.
    """

    def __init__(self, part: Part, mentioned: bool) -> None:
        self.index = part.index
        self.may_draw = may_draw(part.module)
        self.user_code = runs_user_code(part.module)
        self.torch = {True: False, False: False}
        self.host = {True: mentioned, False: mentioned}


class StageDraws:
    """The random numbers of a stage.

    Args:
        parts: its layers.
        device: where they compute.
        seed: the pipeline's.
        joined: by index, names of layers that are compiled as one and cannot be seeded one by one.
        compiled: the layers are compiled, and no mode may be entered around them.
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
        self._evaluation = (-1, 0)
        self._mentioned: dict[frozenset[type], bool] = {}
        self._habits: dict[int, _Habits] = {}
        self._rates: list[float] = []
        self._learn()
        # Of this batch: forwards and backwards that are still to be looked at, and whether the
        # present one is.
        self._forward_looks = self._backward_looks = 0
        self._looks = self._host = self.needed = False
        # Of all backwards: whether any ran ops that draw, and whether any left the generators in
        # another state.
        self._backward_draws = self._backward_moves = False
        # Of the present one: the part that it has come to, whether it has drawn, and the states
        # when generators were seeded last.
        self._part_in_backward: int | None = None
        self._moved = False
        self._states: tuple[Tensor, Any] | None = None

    @property
    def watches_backward(self) -> bool:
        """Whether backwards are to be run inside `backward`."""
        return self._backward_looks > 0 or self._backward_draws

    def begin(self, batch: Batch) -> bool:
        """Whether a forward on `batch` needs the generators. Called for every micro-batch."""
        if self._batch() is not batch:
            self._batch = weakref.ref(batch)
            self._begin(batch)
            self._settle(batch.training)
        elif self._looks:
            self._settle(batch.training)
        return self.needed

    def _begin(self, batch: Batch) -> None:
        rates = self._rates_now()
        if draw_settings(self._modules) != self._settings:
            self._learn()
        elif rates != self._rates:
            self._rates = rates
            self._counts = {True: 0, False: 0}
        training = batch.training
        if not training:
            step, number = self._evaluation
            self._evaluation = batch.step, number + 1 if step == batch.step else 0
        count = self._counts[training] = self._counts[training] + 1
        looks = len(batch.inputs) if count == 1 else int(count & (count - 1) == 0)
        self._forward_looks = looks if self._runs_user_code else 0
        if training:
            self._backward_looks = 0 if self._compiled else self._forward_looks

    def _settle(self, training: bool) -> None:
        """What the next forward needs."""
        self._looks = self._forward_looks > 0
        self._forward_looks -= self._looks
        self._host = self.needed = self._looks
        if self._looks:
            return
        for part in self._habits.values():
            host = part.host[training]
            self._host |= host
            self.needed |= part.may_draw if training else part.torch[False] or host

    def _learn(self) -> None:
        """Read the settings of all modules. What has drawn once is taken to draw again."""
        self._modules = [module for part in self._parts for module in part.module.modules()]
        self._settings = draw_settings(self._modules)
        before, self._habits = self._habits, {}
        for part in self._parts:
            habits = self._habits[part.index] = _Habits(part, self._mentions(part.module))
            if part.index in before:
                habits.torch = before[part.index].torch
                habits.host |= {
                    mode: True for mode, drew in before[part.index].host.items() if drew
                }
            if habits.may_draw and part.index in self._joined:
                raise RunError(
                    f"layers {self._joined[part.index]} are compiled as one function, because none of them could draw random "
                    "numbers when the pipeline was made; now one may. Set hooks, dropout and forwards before the Pipeline "
                    "is made"
                )
        users = [part.module for part in self._parts if self._habits[part.index].user_code]
        self._runs_user_code = bool(users)
        self._attributes = Attributes(users, complete=True)
        self._rates = self._rates_now()
        self._counts = {True: 0, False: 0}

    def _mentions(self, module: nn.Module) -> bool:
        """Whether the module's code mentions the host's generators; read once per set of classes."""
        if not runs_user_code(module):
            return False
        parts = list(module.modules())
        if any(
            part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part)
            for part in parts
        ):
            return mentions_host_generators(module)
        kinds = frozenset(map(type, parts))
        if kinds not in self._mentioned:
            self._mentioned[kinds] = mentions_host_generators(module)
        return self._mentioned[kinds]

    def _rates_now(self) -> list[float]:
        """Numbers that may be rates of dropout, under whatever name."""
        rows = self._attributes.contents()
        return [value for row in rows for value in row if type(value) is float]

    # -- forward
    # ----------------------------------------------------------------------------------------------------------

    def running(self) -> AbstractContextManager[None]:
        """Around the forward of all parts on a micro-batch, after `begin`."""
        return drawing(self._device, host=self._host) if self.needed else nullcontext()

    def call(self, part: Part, place: Place, run: Callable[[Any], Any], value: Any) -> Any:
        """What a part makes of a value, with random numbers of its own. Called inside `running`."""
        habits = self._habits[part.index]
        training = place.batch.training
        looks = self._looks and habits.user_code
        draws = habits.may_draw if training else habits.torch[False] or habits.host[False]
        if not looks and not draws:
            return run(value)
        numbers = [self._seed, place.batch.step, part.index, place.micro_batch]
        if not training:
            numbers += [_EVALUATION, self._evaluation[1]]
        host = looks or habits.host[training]
        seed_generators(self._device, stream_seed(*numbers), host=host)
        if not habits.user_code:
            return run(value)
        before = torch.get_rng_state()
        of_host = host_state() if looks else None
        made = run(value)
        if not torch.equal(before, torch.get_rng_state()):
            self._drew(habits, training)
        if of_host is not None and not equal_states(of_host, host_state()):
            habits.host[training] = True
        if training and (self._backward_looks or self._backward_moves) and torch.is_grad_enabled():
            self._mark(part, place, value, made)
        return made

    def call_again(self, part: Part, place: Place, run: Callable[[Any], Any], value: Any) -> Any:
        """The same from within a backward, for a part that runs again by itself."""
        habits = self._habits[part.index]
        if not habits.may_draw:
            return run(value)
        host = habits.host[True]
        with drawing(self._device, host=host):
            seed = stream_seed(self._seed, place.batch.step, part.index, place.micro_batch)
            seed_generators(self._device, seed, host=host)
            return run(value)

    def _drew(self, habits: _Habits, training: bool) -> None:
        """A part has drawn from torch's generators: if that is new, its backward may do so, too."""
        if training and not habits.torch[True] and not self._compiled:
            batch = self._batch()
            self._backward_looks = 1 if batch is None else len(batch.inputs)
        habits.torch[training] = True
        if training and self._compiled:
            self._backward_draws = True

    # -- backward
    # ---------------------------------------------------------------------------------------------------------

    def _mark(self, part: Part, place: Place, value: Any, made: Any) -> None:
        """Let the backward seed the generators when it comes to what a part has made of `value`."""
        seed = stream_seed(self._seed, place.batch.step, part.index, place.micro_batch, _BACKWARD)

        def begin(_: Tensor) -> None:
            if self._part_in_backward not in (None, part.index):
                self._part_in_backward = part.index
                self._seed_backward(seed)

        through = set(map(id, pytree.tree_leaves(value)))
        for leaf in pytree.tree_leaves(made):
            if isinstance(leaf, Tensor) and not leaf.is_leaf and id(leaf) not in through:
                leaf.register_hook(begin)  # type: ignore[no-untyped-call]

    def _seed_backward(self, seed: int) -> None:
        self._compare_states()
        seed_generators(self._device, seed, host=True)
        self._states = torch.get_rng_state(), host_state()

    def _compare_states(self) -> None:
        """Note whether anything was drawn since the generators were seeded last."""
        if self._states is not None:
            of_torch, of_host = self._states
            same = torch.equal(of_torch, torch.get_rng_state()) and equal_states(
                of_host, host_state()
            )
            self._moved |= not same

    @contextmanager
    def backward(self, place: Place, *, weights_only: bool = False) -> Iterator[None]:
        """Around a backward, where `watches_backward`.

        Args:
            place: of the micro-batch.
            weights_only: it is the second part of a backward, in which some of the layers' code
            runs again.

        Raises:
            RunError: `weights_only`, and a layer has drawn there.
        """
        looks = self._backward_looks > 0
        self._backward_looks -= looks
        host = looks or self._backward_moves
        seed = stream_seed(self._seed, place.batch.step, -1, place.micro_batch, _BACKWARD)
        self._states = None
        with drawing(self._device, host=host):
            if host:
                self._moved = False
                self._seed_backward(seed)
                self._part_in_backward = None if weights_only else -1
            met = Met()
            try:
                with met if looks else nullcontext():
                    yield
            finally:
                self._part_in_backward = None
            if host:
                self._compare_states()
        moves = host and self._moved
        self._backward_draws |= met.random or moves
        self._backward_moves |= moves
        if moves and weights_only:
            names = ", ".join(part.name for part in self._parts)
            raise RunError(
                f"a layer among {names} draws random numbers in its backward (a function or a hook of its own does), and the "
                "schedule runs backwards in two parts, in which it would draw twice: take a schedule without W ops, such as "
                "1f1b, or draw the numbers in the forward"
            )


def _no_batch() -> Batch | None:
    """Stands for a batch that is gone."""
    return None
