"""One partition of a `Pipe`, and what it does with one micro-batch: forward, recompute, backward.

Unlike `runtime.stage.Stage`, which trains, this is a part of somebody else's autograd graph: see
`runtime.pipe_run`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.runtime.crossing import check_same_flags, check_shared, versions_of
from penstock.runtime.pipe_random import Drawing, Draws, Habits
from penstock.runtime.second_forward import FirstForward, SecondForwards
from penstock.tracing.recomputing import PASSES
from penstock.tracing.side_loss import collecting_side_losses
from penstock.tracing.skippable import Skip, Skippable, Waiting, waiting_skips
from penstock.values.memory import copy_of, overlapping
from penstock.values.structure import Structure, check_tensor, flatten, unflatten


class Partition(nn.Sequential):
    """Layers that run on one device. Its forward tells whoever seeds random numbers which layer it
    is at.
    """

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
    """A nested value on its way: `spec` is how it nests, None for a bare tensor; `wants` has, by
    tensor, whether a gradient comes back.

    `shared` are pairs of its tensors, by place, that have memory in common where they are made.
    Those in `elsewhere` share theirs with what goes another way.
    """

    leaves: Sequence[Any]
    spec: Structure | None
    wants: Sequence[bool]
    shared: Sequence[tuple[int, int]] = ()
    elsewhere: Sequence[int] = ()

    @classmethod
    def of(cls, value: Any) -> Crossing:
        """A value as it is.

        Raises:
            Unflattenable: there is something in it that cannot cross.
        """
        if type(value) is Tensor and value.layout is torch.strided:
            check_tensor(value)
            return cls((value,), None, (value.requires_grad,))
        leaves, spec = flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        wants = [tensor.requires_grad for tensor in tensors]
        return cls(leaves, spec, wants, overlapping(tensors))

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def value(self) -> Any:
        """The nested value."""
        return self.leaves[0] if self.spec is None else unflatten(self.spec, self.leaves)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Crossing:
        """The same with other tensors in the tensors' places."""
        fresh = iter(tensors)
        leaves = [next(fresh) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return self._replace(leaves=leaves)


def _crossings(values: Sequence[Any]) -> list[Crossing]:
    """What goes several ways at once."""
    made = [Crossing.of(value) for value in values]
    if len(made) == 1:
        return made
    homes = [number for number, crossing in enumerate(made) for _ in crossing.tensors]
    firsts = [homes.index(home) for home in homes]
    tensors = [tensor for crossing in made for tensor in crossing.tensors]
    for pair in overlapping(tensors):
        if homes[pair[0]] == homes[pair[1]]:
            continue
        for place in pair:
            crossing = made[homes[place]]
            also = (*crossing.elsewhere, place - firsts[place])
            made[homes[place]] = crossing._replace(elsewhere=also)
    return made


Grads = list[Tensor | None]


@dataclass
class _Kept:
    """What one micro-batch keeps: its inputs, with leaves of its graph, and the graph's roots;
    before a recompute there are none.

    `flags` has which of the tensors that it made want a gradient. `sides` are its side losses.
    """

    inputs: list[Crossing]
    roots: list[Crossing] | None
    first: FirstForward | None
    flags: list[bool]
    sides: list[Tensor]


@dataclass
class PartRun:
    """One partition in one forward of the whole, and in the backward of that.

    `parts` are its modules, `modes` whether they were training. `weights` want gradients.
    Micro-batches below `recomputed` are run again. `draws` has the random numbers; with `looking`,
    ops that draw are looked for, and `drew` says whether there were any; `doubtful` is a run in
    which some may have been that nobody looked at. `sides` are its side losses by micro-batch,
    without their graphs, and `side_wants` says whether any wants a gradient.
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
    sides: dict[int, list[Tensor]] = field(default_factory=dict)
    side_wants: bool = False

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
        # By training or not, whether layers change what they are given. Not known before they have
        # run once: the flag `inplace` tells
        # only of some of torch's own, and a layer may hand on its input, or a view of it, to one
        # that does.
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
            arrived: what the partition before has made of it, or the input; then the skips of
            `takes`.

        Returns:
            What the layers make of it, then the skips of `gives`.
        """
        again = micro_batch < run.recomputed
        inputs = [self._leaves(crossing, run.grads) for crossing in arrived]
        first = self._again.first() if again else None
        PASSES.checkpointing = again
        try:
            # With a graph also where it is run again: which outputs want a gradient is known from
            # that alone, and kernels are chosen by
            # it. That graph goes at the end of this forward.
            with torch.set_grad_enabled(run.grads):
                made, sides = self._run(run, micro_batch, inputs)
        finally:
            PASSES.checkpointing = False
        if sides:
            run.sides[micro_batch] = [side.detach() for side in sides]
            run.side_wants |= any(side.requires_grad for side in sides)
        if run.grads:
            if first is not None:
                first.note([crossing.leaves for crossing in made])
            flags = [wanted for crossing in made for wanted in crossing.wants]
            kept = _Kept(inputs, None if again else made, first, flags, [] if again else sides)
            run.kept[micro_batch] = kept
        if again:
            return [
                crossing.with_tensors([tensor.detach() for tensor in crossing.tensors])
                for crossing in made
            ]
        return made

    def prepare(self, run: PartRun, micro_batch: int) -> None:
        """Run the forward again, if it is to be; before the gradients are there, so as not to stand
        still until they are.

        Raises:
            RuntimeError: what it reads has changed since, or it has made something else than the
            first.
        """
        kept = run.kept[micro_batch]
        if kept.roots is not None:
            return
        if run.versions != [weight._version for weight in run.weights]:
            raise RuntimeError(
                "a parameter has been changed in place between the forward of a Pipe and its backward, which needs it as it "
                "was to run the forward again: call optimizer.step() after backward(), or use checkpoint='never'"
            )
        before = PASSES.recomputing
        PASSES.recomputing = True
        modes = [part.training for part in run.parts]
        try:
            _set_modes(run.parts, run.modes, modes)
            assert kept.first is not None
            with torch.enable_grad(), self._again.seeing(kept.first):
                kept.roots, kept.sides = self._run(run, micro_batch, kept.inputs, again=True)
        finally:
            PASSES.recomputing = before
            _set_modes(run.parts, modes, run.modes)
        self._again.check(kept.first, [crossing.leaves for crossing in kept.roots], micro_batch)
        kept.first = None
        found = [tensor for crossing in kept.roots for tensor in crossing.tensors]
        check_same_flags(kept.flags, found, "a partition of a Pipe")
        if len(kept.sides) != len(run.sides.get(micro_batch, ())):
            raise RunError(
                f"a partition of a Pipe: run again for its backward, a forward had {len(kept.sides)} side losses, and "
                f"{len(run.sides.get(micro_batch, ()))} the first time: layers must do the same twice, or take "
                "checkpoint='never'"
            )

    def backward(
        self,
        run: PartRun,
        micro_batch: int,
        grads: Sequence[Grads],
        side_grad: Tensor | None = None,
    ) -> list[Grads]:
        """Gradients of what `forward` was given, of those of what it returned; those of weights are
        added to their `.grad`.

        Args:
            run: as in the forward.
            micro_batch: which one. `prepare` has been called.
            grads: by crossing and tensor, None where there is none.
            side_grad: of each of the micro-batch's side losses.
        """
        kept = run.kept.pop(micro_batch)
        assert kept.roots is not None
        roots, starts = [], []
        for crossing, row in zip(kept.roots, grads, strict=True):
            for root, grad in zip(crossing.tensors, row, strict=True):
                if grad is not None and root.requires_grad:
                    roots.append(root)
                    starts.append(grad.to(root.device))
        if side_grad is not None:
            sides = [side for side in kept.sides if side.requires_grad]
            roots += sides
            starts += [side_grad.to(side.device, side.dtype) for side in sides]
        if roots:
            before = PASSES.recomputing
            # a layer that recomputes by itself, in here, does so as much as one that we recompute
            PASSES.recomputing = True
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
        return crossing.with_tensors(leaves)

    def _run(
        self, run: PartRun, micro_batch: int, inputs: Sequence[Crossing], *, again: bool = False
    ) -> tuple[list[Crossing], list[Tensor]]:
        """What the layers make, and their side losses."""
        given = list(inputs)
        changes = self._changes_input.get(run.training, True)
        if changes:
            # Autograd forbids changing a leaf in place, and the partition before must not see such
            # a change.
            given = [
                crossing.with_tensors([copy_of(tensor) for tensor in crossing.tensors])
                for crossing in inputs
            ]
        tensors = [tensor for crossing in given for tensor in crossing.tensors]
        versions = versions_of(tensors)
        waiting: Waiting = {
            skip: crossing.value() for skip, crossing in zip(self.takes, given[1:], strict=True)
        }
        with collecting_side_losses() as sides:
            if self._skips or run.looking or (again and run.doubtful):
                with self._watched(run, micro_batch, again), waiting_skips(waiting):
                    made = self.module(given[0].value())
            else:
                made = self.module(given[0].value())
        after = versions_of(tensors)
        if versions is not None and after is not None:
            changed = [one != other for one, other in zip(versions, after, strict=True)]
            self._learn(run, given, changed, copied=changes)
        return _crossings([made, *(waiting.pop(skip) for skip in self.gives)]), sides

    def _learn(
        self, run: PartRun, given: Sequence[Crossing], changed: list[bool], *, copied: bool
    ) -> None:
        """Whether layers change what they are given.

        Raises:
            RuntimeError: they had not done so before, and have been given no copies; or what they
            have changed shares memory.
        """
        any_changed = any(changed)
        if run.training not in self._changes_input:
            self._changes_input[run.training] = any_changed
        elif any_changed and not copied:
            self._changes_input[run.training] = True
            raise RuntimeError(
                "layers of a Pipe have changed in place what they were given, and had not done so before: the next forward "
                "allows for it, this one cannot"
            )
        if not any_changed:
            return
        place = 0
        for crossing in given:
            count = len(crossing.tensors)
            own = changed[place : place + count]
            check_shared([*crossing.shared, *((each, each) for each in crossing.elsewhere)], own)
            place += count

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
        return RuntimeError(
            f"a layer of a Pipe drew random numbers ({op}) in a forward, and had drawn none before: which ones is not known, "
            "so it cannot be run again for its backward. The next forward allows for it: repeat the batch"
        )


def _set_modes(parts: Sequence[nn.Module], modes: list[bool], before: list[bool]) -> None:
    """Let modules be in training or not as they were in the forward, whatever the caller has made
    of them since.
    """
    if modes != before:
        for part, training in zip(parts, modes, strict=True):
            part.training = training


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    """All modules, several times where they stand several times; at a tenth of the cost of
    `modules()`.
    """
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _modules(child)
