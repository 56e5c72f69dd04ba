"""One partition of a `Pipe`, and what it does with one micro-batch: forward, recompute, backward.

Unlike `runtime.stage.Stage`, which trains, this is a part of somebody else's autograd graph: see `runtime.pipe_run`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.runtime.pipe_random import Drawing, Draws, Habits
from penstock.runtime.second_forward import FirstForward, SecondForwards
from penstock.tracing.recomputing import PASSES
from penstock.tracing.skippable import Skip, Skippable, Waiting, waiting_skips


class Partition(nn.Sequential):
    """Layers that run on one device. Its forward tells whoever seeds random numbers which layer it is at."""

    first_of_layers: int = 0
    drawing_of_layers: Drawing | None = None

    def forward(self, input: Any) -> Any:  # noqa: A002 - torch's own name
        """Run the layers."""
        if self.drawing_of_layers is None:
            return super().forward(input)  # type: ignore[no-untyped-call]
        for place, layer in enumerate(self):
            input = self.drawing_of_layers.run(self.first_of_layers + place, layer, input)  # noqa: A001
        return input


class Crossing(NamedTuple):
    """A nested value on its way: `spec` is how it nests, None for a bare tensor; `wants` has, by tensor, whether a gradient comes back."""

    leaves: Sequence[Any]
    spec: pytree.TreeSpec | None
    wants: Sequence[bool]

    @classmethod
    def of(cls, value: Any) -> Crossing:
        """A value as it is."""
        if isinstance(value, Tensor):
            return cls((value,), None, (value.requires_grad,))
        leaves, spec = pytree.tree_flatten(value)
        return cls(
            leaves, spec, [leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor)]
        )

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def value(self) -> Any:
        """The nested value."""
        return (
            self.leaves[0]
            if self.spec is None
            else pytree.tree_unflatten(list(self.leaves), self.spec)
        )

    def wanting(self, trained: bool) -> Crossing:
        """The same, made without a graph: what is no float cannot want a gradient, and any float may if anything is trained."""
        wants = [
            trained and (leaf.is_floating_point() or leaf.is_complex()) for leaf in self.tensors
        ]
        return Crossing(self.leaves, self.spec, wants)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Crossing:
        """The same with other tensors in the tensors' places."""
        fresh = iter(tensors)
        return Crossing(
            [next(fresh) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves],
            self.spec,
            self.wants,
        )


Grads = list[Tensor | None]


@dataclass
class _Kept:
    """What one micro-batch keeps: its inputs, with leaves of its graph, and the graph's roots; before a recompute there are none."""

    inputs: list[Crossing]
    roots: list[Crossing] | None
    first: FirstForward | None


@dataclass
class PartRun:
    """One partition in one forward of the whole, and in the backward of that.

    `parts` are its modules, `modes` whether they were training. `weights` want gradients. Micro-batches
    below `recomputed` are run again. `draws` has the random numbers; with `looking`, ops that draw are looked for, and `drew` says whether
    there were any; `doubtful` is a run in which some may have been that nobody looked at.
    """

    parts: list[nn.Module]
    weights: list[Tensor]
    training: bool
    draws: Draws
    looking: bool
    grads: bool = False
    recomputed: int = 0
    drew: bool = False
    doubtful: bool = False
    versions: list[int] = field(default_factory=list)
    modes: list[bool] = field(default_factory=list)
    kept: dict[int, _Kept] = field(default_factory=dict)

    def keep(self, recomputed: int) -> None:
        """There will be a backward."""
        self.grads, self.recomputed = True, recomputed
        if recomputed:
            self.versions = [weight._version for weight in self.weights]
            self.modes = [part.training for part in self.parts]


class PipeStage:
    """A partition on its device.

    Args:
        module: its layers.
        device: where they are.
        takes: skips that it pops and another one has stashed.
        gives: skips that it stashes for another one.
    """

    def __init__(
        self, module: Partition, device: torch.device, takes: Sequence[Skip], gives: Sequence[Skip]
    ) -> None:
        self.module, self.device, self.takes, self.gives = (
            module,
            device,
            tuple(takes),
            tuple(gives),
        )
        self.habits = Habits(module)
        self._skips = any(isinstance(part, Skippable) for part in module.modules())
        # By training or not, whether layers change what they are given. Not known before they have run once: the flag `inplace` tells
        # only of some of torch's own, and a layer may hand on its input, or a view of it, to one that does.
        self._changes_input: dict[bool, bool] = {}
        self._parts: list[nn.Module] = []
        self._again = SecondForwards([module], [], self._name())

    def begin(self, draws: Draws) -> PartRun:
        """A forward of the whole begins."""
        parts = list(_modules(self.module))
        if parts != self._parts:
            self._parts, self._again = parts, SecondForwards([self.module], [], self._name())
        weights = {
            id(p): p
            for part in parts
            for p in part._parameters.values()
            if p is not None and p.requires_grad
        }
        training = self.module.training
        return PartRun(
            parts, list(weights.values()), training, draws, not self.habits.silent(parts, training)
        )

    def forward(
        self, run: PartRun, micro_batch: int, arrived: Sequence[Crossing]
    ) -> list[Crossing]:
        """Run the layers on one micro-batch.

        Args:
            run: what `begin` has returned.
            micro_batch: which one.
            arrived: what the partition before has made of it, or the input; then the skips of `takes`.

        Returns:
            What the layers make of it, then the skips of `gives`.
        """
        again = micro_batch < run.recomputed
        keeps = run.grads and not again
        inputs = [self._leaves(crossing, run.grads) for crossing in arrived]
        first = self._again.first() if again else None
        PASSES.checkpointing = again
        try:
            with torch.set_grad_enabled(keeps):
                made = self._run(run, micro_batch, inputs)
        finally:
            PASSES.checkpointing = False
        if run.grads:
            if first is not None:
                first.note([crossing.leaves for crossing in made])
            run.kept[micro_batch] = _Kept(inputs, None if again else made, first)
        if again:
            trained = bool(run.weights) or any(any(crossing.wants) for crossing in inputs)
            made = [crossing.wanting(trained) for crossing in made]
        return made

    def prepare(self, run: PartRun, micro_batch: int) -> None:
        """Run the forward again, if it is to be; before the gradients are there, so as not to stand still until they are.

        Raises:
            RuntimeError: what it reads has changed since, or it has made something else than the first.
        """
        kept = run.kept[micro_batch]
        if kept.roots is not None:
            return
        if run.versions != [weight._version for weight in run.weights]:
            raise RuntimeError("a parameter has been changed in place between the forward of a Pipe and its backward, which needs it as it "
                               "was to run the forward again: call optimizer.step() after backward(), or use checkpoint='never'")  # fmt: skip
        before = PASSES.recomputing
        PASSES.recomputing = True
        modes = [part.training for part in run.parts]
        try:
            _set_modes(run.parts, run.modes, modes)
            assert kept.first is not None
            with torch.enable_grad(), self._again.seeing(kept.first):
                kept.roots = self._run(run, micro_batch, kept.inputs, again=True)
        finally:
            PASSES.recomputing = before
            _set_modes(run.parts, modes, run.modes)
        self._again.check(kept.first, [crossing.leaves for crossing in kept.roots], micro_batch)
        kept.first = None

    def backward(self, run: PartRun, micro_batch: int, grads: Sequence[Grads]) -> list[Grads]:
        """Gradients of what `forward` was given, of those of what it returned; those of weights are added to their `.grad`.

        Args:
            run: as in the forward.
            micro_batch: which one. `prepare` has been called.
            grads: by crossing and tensor, None where there is none.
        """
        kept = run.kept.pop(micro_batch)
        assert kept.roots is not None
        roots, starts = [], []
        for crossing, row in zip(kept.roots, grads, strict=True):
            for root, grad in zip(crossing.tensors, row, strict=True):
                if grad is not None and root.requires_grad:
                    roots.append(root)
                    starts.append(grad.to(root.device))
        if roots:
            before = PASSES.recomputing
            PASSES.recomputing = True  # a layer that recomputes by itself, in here, does so as much as one that we recompute
            try:
                with self.habits.backward(self.device):
                    torch.autograd.backward(roots, starts)
            finally:
                PASSES.recomputing = before
        return [
            [leaf.grad if leaf.requires_grad else None for leaf in crossing.tensors]
            for crossing in kept.inputs
        ]

    def _leaves(self, crossing: Crossing, grads: bool) -> Crossing:
        wants = crossing.wants if grads else [False] * len(crossing.wants)
        leaves = [tensor.detach().to(self.device) for tensor in crossing.tensors]
        for leaf, wanted in zip(leaves, wants, strict=True):
            if wanted:
                leaf.requires_grad_()
        return (
            Crossing(leaves, None, wants)
            if crossing.spec is None
            else crossing.with_tensors(leaves)
        )

    def _run(
        self, run: PartRun, micro_batch: int, inputs: Sequence[Crossing], *, again: bool = False
    ) -> list[Crossing]:
        tensors = [tensor for crossing in inputs for tensor in crossing.tensors]
        given = list(inputs)
        changes = self._changes_input.get(run.training, True)
        if (
            changes
        ):  # autograd forbids changing a leaf in place, and nobody else may see such a change
            given = [
                crossing.with_tensors([tensor.clone() for tensor in crossing.tensors])
                for crossing in inputs
            ]
            tensors = [tensor for crossing in given for tensor in crossing.tensors]
        versions = _versions(tensors)
        waiting: Waiting = {
            skip: crossing.value() for skip, crossing in zip(self.takes, given[1:], strict=True)
        }
        if self._skips or run.looking or (again and run.doubtful):
            with self._watched(run, micro_batch, again), waiting_skips(waiting):
                made = self.module(given[0].value())
        else:
            made = self.module(given[0].value())
        changed = versions != _versions(tensors)
        if run.training not in self._changes_input and versions is not None:
            self._changes_input[run.training] = changed
        elif changed and not changes:
            self._changes_input[run.training] = True
            raise RuntimeError("layers of a Pipe have changed in place what they were given, and had not done so before: the next forward "
                               "allows for it, this one cannot")  # fmt: skip
        return [Crossing.of(made), *(Crossing.of(waiting.pop(skip)) for skip in self.gives)]

    @contextmanager
    def _watched(self, run: PartRun, micro_batch: int, again: bool) -> Iterator[None]:
        """Let random numbers be reproducible, where any may be drawn."""
        doubtful = again and run.doubtful
        if not run.looking and not doubtful:
            yield
            return
        drawing = Drawing(
            run.draws,
            self.device,
            micro_batch,
            self._late if doubtful and not run.looking else None,
            self.habits,
        )
        self.module.drawing_of_layers = drawing
        try:
            with drawing:
                yield
        finally:
            self.module.drawing_of_layers = None
            run.drew |= drawing.drew

    def _name(self) -> str:
        first, names = self.module.first_of_layers, list(self.module._modules)
        return f"layers {first} to {first + len(names) - 1} of a Pipe ({', '.join(names)})"

    def _late(self, op: str) -> RuntimeError:
        return RuntimeError(f"a layer of a Pipe drew random numbers ({op}) in a forward, and had drawn none before: which ones is not known, "
                            "so it cannot be run again for its backward. The next forward allows for it: repeat the batch")  # fmt: skip


def _versions(tensors: Sequence[Tensor]) -> list[int] | None:
    """How often each has been changed; nobody knows that in inference mode."""
    return None if torch.is_inference_mode_enabled() else [tensor._version for tensor in tensors]


def _set_modes(parts: Sequence[nn.Module], modes: list[bool], before: list[bool]) -> None:
    """Let modules be in training or not as they were in the forward, whatever the caller has made of them since."""
    if modes != before:
        for part, training in zip(parts, modes, strict=True):
            part.training = training


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    """All modules, several times where they stand several times; at a tenth of the cost of `modules()`."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _modules(child)
