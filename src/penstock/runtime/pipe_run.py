"""One forward of a `Pipe`, and the backward that may follow: a single node in the caller's autograd graph.

Weights are inputs of that node. What they are sent comes once per backward, and the caller's graph does with it what it does with any
gradient: hooks, `torch.autograd.grad`, adding up in `.grad`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from penstock.runtime.pipe_play import Engine, Half, Mixed
from penstock.runtime.pipe_random import Draws, states
from penstock.runtime.pipe_stage import Crossing, Grads


def check(value: Any) -> None:
    """Refuse an input that cannot be cut into micro-batches.

    Raises:
        TypeError: something in it is neither a tensor nor None.
    """
    for leaf in pytree.tree_leaves(value):
        if leaf is not None and not isinstance(leaf, Tensor):
            raise TypeError(f"expected Tensor, but got {type(leaf).__name__}: a Pipe takes a tensor, or tensors and None in nested tuples, "
                            "lists and dicts, so that they can be cut into micro-batches")  # fmt: skip


def cut(value: Any, parts: int) -> list[Crossing]:
    """A nested input in at most `parts` micro-batches, each tensor by `torch.chunk` along its first dimension.

    Raises:
        ValueError: its tensors come to different numbers of micro-batches, or there are none.
    """
    leaves, spec = ([value], None) if isinstance(value, Tensor) else pytree.tree_flatten(value)
    columns = [torch.chunk(leaf.detach(), parts) for leaf in leaves if leaf is not None]
    counts = sorted({len(column) for column in columns})
    if len(counts) != 1:
        shapes = (
            ", ".join(str(tuple(leaf.shape)) for leaf in leaves if leaf is not None) or "no tensors"
        )
        raise ValueError(f"the tensors of an input are cut along their first dimension, into the same number of micro-batches each; these "
                         f"have {shapes}, which come to {', '.join(map(str, counts)) or 0} of at most {parts}")  # fmt: skip
    wants = [leaf.requires_grad for leaf in leaves if leaf is not None]
    made = []
    for pieces in zip(*columns, strict=True):
        fresh = iter(pieces)
        made.append(
            Crossing([None if leaf is None else next(fresh) for leaf in leaves], spec, wants)
        )
    return made


def joined(parts: Sequence[Crossing]) -> list[Any]:
    """The leaves of the whole output.

    Raises:
        TypeError: one is neither a tensor nor None.
        RuntimeError: micro-batches have come out in different forms, or a tensor of several has no dimension to join it along.
    """
    if any(
        part.spec != parts[0].spec or len(part.leaves) != len(parts[0].leaves) for part in parts
    ):
        raise RuntimeError(
            "the output of one micro-batch is nested in another way than that of another: they cannot be joined"
        )
    leaves: list[Any] = []
    for column in zip(*(part.leaves for part in parts), strict=True):
        for leaf in column:
            if leaf is not None and not isinstance(leaf, Tensor):
                raise TypeError(f"expected Tensor, but got {type(leaf).__name__}: what the last layer of a Pipe returns is joined from its "
                                "micro-batches, so it is made of tensors and None")  # fmt: skip
        if column[0] is None:
            leaves.append(None)
        elif len(column) == 1:
            leaves.append(column[0].detach())
        elif column[0].dim() == 0:
            raise RuntimeError("the last layer of a Pipe returned a tensor without dimensions: outputs of micro-batches are joined along "
                               "their first one, so reduce after the Pipe, or use chunks=1")  # fmt: skip
        else:
            leaves.append(torch.cat([leaf.detach() for leaf in column]))
    return leaves


class Run:
    """A forward, and what it keeps for its backward.

    Args:
        engine: the partitions.
        inputs: the micro-batches.
        recomputed: how many of them, from the first on, are run again before their backward.
    """

    def __init__(self, engine: Engine, inputs: Sequence[Crossing], recomputed: int) -> None:
        self.engine = engine
        self._inputs: Sequence[Crossing] = inputs
        self.count = len(inputs)
        self._shapes = [[tensor.shape for tensor in part.tensors] for part in inputs]
        self._draws = Draws()
        self.parts = [stage.begin(self._draws) for stage in engine.stages]
        self.weights = list(
            {id(weight): weight for part in self.parts for weight in part.weights}.values()
        )
        self.grads = torch.is_grad_enabled() and (bool(self.weights) or any(inputs[0].wants))
        if self.grads:
            for part in self.parts:
                part.keep(recomputed)
        self._mixed = Mixed(
            [stage.device for stage in engine.stages], caching=not (self.grads and recomputed)
        )
        self._spent = False

    def forward(self) -> list[Crossing]:
        """What the last partition makes of each micro-batch."""
        engine, parts = self.engine, self.parts
        watched = [(stage, part) for stage, part in zip(engine.stages, parts, strict=True)
                   if not part.looking and not stage.habits.certain]  # fmt: skip
        before = [states(stage.device) for stage, _ in watched]
        half = Half(
            "forward",
            range(self.count),
            range(len(parts)),
            engine.into,
            engine.out_of,
            lambda _, __: None,
            lambda place, number, taken: engine.stages[place].forward(parts[place], number, taken),
            self._inputs,
        )
        self._inputs = ()
        engine.play(half, self._mixed)
        for stage, part in zip(engine.stages, parts, strict=True):
            if part.looking:
                stage.habits.saw(part.training, part.drew)
        for (stage, part), were in zip(watched, before, strict=True):
            if not all(map(torch.equal, were, states(stage.device))):
                stage.habits.watched = part.doubtful = (
                    True  # it, or somebody else: from now on somebody looks
                )
        self._draws.settle()
        return [half.made[number] for number in range(self.count)]

    def backward(self, grads: Sequence[Grads]) -> tuple[list[Grads], list[Tensor | None]]:
        """Gradients of the inputs, by micro-batch, and of `weights`, of those of the outputs.

        Raises:
            RuntimeError: it has been called already.
        """
        if self._spent:
            raise RuntimeError("trying to backward through a Pipe a second time: what its forward kept is gone, with retain_graph=True, too. "
                               "Call the Pipe again, or take all gradients in one backward")  # fmt: skip
        self._spent = True
        engine, parts = self.engine, self.parts
        half = Half(
            "backward",
            range(self.count - 1, -1, -1),
            range(len(parts) - 1, -1, -1),
            engine.out_of,
            engine.into,
            lambda place, number: engine.stages[place].prepare(parts[place], number),
            lambda place, number, taken: engine.stages[place].backward(parts[place], number, taken),
            grads,
        )
        with _apart(self.weights) as sums:
            engine.play(half, self._mixed)
        return [half.made[number] for number in range(self.count)], sums

    def whole(self, place: int, parts: Sequence[Grads], device: torch.device) -> Tensor | None:
        """The gradient of the input's tensor at `place` from its micro-batches'."""
        column = [part[place] for part in parts]
        found = next((grad for grad in column if grad is not None), None)
        if found is None:
            return None
        rows = [
            found.new_zeros(shapes[place]) if grad is None else grad
            for grad, shapes in zip(column, self._shapes, strict=True)
        ]
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).to(device)


class Node(torch.autograd.Function):
    """Ties the tensors of the output, which are there already, to those of the input and to the weights."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, made: Sequence[Crossing], outputs: Sequence[Tensor], *tensors: Tensor
    ) -> Any:
        """`tensors` are those of the input, then the run's weights; `made` are the outputs by micro-batch."""
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(
                output
                for place, output in enumerate(outputs)
                if not any(part.wants[place] for part in made)
            )
        )
        ctx.run, ctx.devices = (
            run,
            [tensor.device for tensor in tensors[: len(tensors) - len(run.weights)]],
        )
        columns = zip(*(part.tensors for part in made), strict=True)
        ctx.sizes = [
            [len(tensor) for tensor in column] if len(column) > 1 else None for column in columns
        ]
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Play the backward. Raises as `Run.backward`."""
        run: Run = ctx.run
        columns = [
            [None] * run.count
            if grad is None
            else [grad]
            if sizes is None
            else torch.split(grad, sizes)
            for grad, sizes in zip(grads, ctx.sizes, strict=True)
        ]
        found, sums = run.backward(
            [[column[number] for column in columns] for number in range(run.count)]
        )
        of_inputs = [run.whole(place, found, device) for place, device in enumerate(ctx.devices)]
        return None, None, None, *of_inputs, *sums


@contextmanager
def _apart(weights: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """Gradients that are added to weights' `.grad` in here, apart from those that are there and from the user's hooks.

    Autograd adds a micro-batch's gradient of a layer as soon as it has it, which nobody could with less memory; but the user's graph, hooks
    and `.grad` are to see one of the whole batch. They get it from our node, as they get any other.
    """
    own = [weight.grad for weight in weights]
    registered = [
        hooks
        for weight in weights
        for hooks in (weight._backward_hooks, weight._post_accumulate_grad_hooks)
        if hooks
    ]
    hooks = [dict(each) for each in registered]
    sums: list[Tensor | None] = []
    try:
        for weight in weights:
            weight.grad = None
        for each in registered:
            each.clear()
        yield sums
        sums += [weight.grad for weight in weights]
    finally:
        for each, before in zip(registered, hooks, strict=True):
            each.update(before)
        for weight, grad in zip(weights, own, strict=True):
            weight.grad = grad


def run_forward(engine: Engine, value: Any, parts: Sequence[Crossing], recomputed: int) -> Any:
    """The output of the whole for an input, which has been cut into `parts`.

    Args:
        engine: the partitions.
        value: the input, as the caller gave it.
        parts: its micro-batches.
        recomputed: how many of them run again before their backward.
    """
    run = Run(engine, parts, recomputed)
    made = run.forward()
    leaves = joined(made)
    if run.grads:
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in leaves if leaf is not None]
        tied = iter(Node.apply(run, made, outputs, *tensors, *run.weights))  # type: ignore[no-untyped-call]
        leaves = [None if leaf is None else next(tied) for leaf in leaves]
    spec = made[0].spec
    return leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)
