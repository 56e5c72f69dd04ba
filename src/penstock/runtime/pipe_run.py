"""One forward of a `Pipe`, and the backward that may follow: a single node in the caller's autograd
graph.

Weights are inputs of that node. What they are sent comes once per backward, and the caller's graph
does with it what it does with any gradient: hooks, `torch.autograd.grad`, adding up in `.grad`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.runtime.pipe_play import Engine, Half, Mixed
from penstock.runtime.pipe_random import Draws, states
from penstock.runtime.pipe_stage import Crossing, Grads
from penstock.values.constants import same_constant
from penstock.values.memory import overlapping
from penstock.values.structure import Structure, Unflattenable, flatten, tensors_of, unflatten


def check(value: Any) -> None:
    """Refuse an input that cannot be cut into micro-batches.

    Raises:
        TypeError: an item in it is neither a tensor nor None; attributes of objects may be others.
    """
    if type(value) is Tensor:
        return
    try:
        leaves, structure = flatten(value)
    except Unflattenable as error:
        raise TypeError(f"the input of a Pipe cannot be cut into micro-batches: {error}") from error
    if structure.has("sparse"):
        raise TypeError(
            "the input of a Pipe has a sparse tensor in it, which cannot be cut into micro-batches: make it in the first "
            "layer"
        )
    for leaf, is_item in zip(leaves, structure.items(), strict=True):
        if is_item and leaf is not None and not isinstance(leaf, Tensor):
            raise TypeError(
                f"expected Tensor, but got {type(leaf).__name__}: a Pipe takes a tensor, or tensors and None in nested tuples, "
                "lists, mappings and records, so that they can be cut into micro-batches"
            )


def cut(value: Any, parts: int) -> list[Crossing]:
    """A nested input in at most `parts` micro-batches, each tensor by `torch.chunk` along its first
    dimension.

    Raises:
        ValueError: its tensors come to different numbers of micro-batches, or there are none.
    """
    leaves: list[Any] = [value]
    spec: Structure | None = None
    if type(value) is not Tensor:
        leaves, spec = flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    columns = [torch.chunk(tensor.detach(), parts) for tensor in tensors]
    counts = sorted({len(column) for column in columns})
    if len(counts) != 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensors"
        raise ValueError(
            f"the tensors of an input are cut along their first dimension, into the same number of micro-batches each; these "
            f"have {shapes}, which come to {', '.join(map(str, counts)) or 0} of at most {parts}"
        )
    wants = [tensor.requires_grad for tensor in tensors]
    whole = Crossing(leaves, spec, wants, overlapping(tensors))
    return [whole.with_tensors(pieces) for pieces in zip(*columns, strict=True)]


def joined(parts: Sequence[Crossing]) -> list[Any]:
    """The leaves of the whole output.

    Raises:
        TypeError: an item is neither a tensor nor None.
        RuntimeError: micro-batches have come out in different forms or with different attributes,
        or a tensor of several has no dimension
            to join it along.
    """
    first = parts[0]
    if any(part.spec != first.spec or len(part.leaves) != len(first.leaves) for part in parts):
        raise RuntimeError(
            "the output of one micro-batch is nested in another way than that of another: they cannot be joined"
        )
    if first.spec is not None and first.spec.has("sparse"):
        raise RuntimeError(
            "the last layer of a Pipe returned a sparse tensor, and outputs of micro-batches are joined along their first "
            "dimension: return its to_dense()"
        )
    items = [True] if first.spec is None else first.spec.items()
    columns = zip(*(part.leaves for part in parts), strict=True)
    return [_joined(column, is_item=item) for column, item in zip(columns, items, strict=True)]


def _joined(column: Sequence[Any], *, is_item: bool) -> Any:
    """One leaf of the whole output, from those of the micro-batches."""
    kinds = {isinstance(leaf, Tensor) for leaf in column}
    for leaf in column:
        if kinds == {True}:
            break
        if is_item and leaf is not None and not isinstance(leaf, Tensor):
            raise TypeError(
                f"expected Tensor, but got {type(leaf).__name__}: what the last layer of a Pipe returns is joined from its "
                "micro-batches, so it is made of tensors and None"
            )
        if not same_constant(leaf, column[0]):
            raise RuntimeError(
                f"the last layer of a Pipe returned {column[0]!r} for one micro-batch and {leaf!r} for another: only tensors "
                "can be joined"
            )
    if not isinstance(column[0], Tensor):
        return column[0]
    if len(column) == 1:
        return column[0].detach()
    if column[0].dim() == 0:
        raise RuntimeError(
            "the last layer of a Pipe returned a tensor without dimensions: outputs of micro-batches are joined along "
            "their first one, so reduce after the Pipe, or use chunks=1"
        )
    return torch.cat([leaf.detach() for leaf in column])


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
        samples = [shapes[0][0] for shapes in self._shapes]
        self._shares = [count / sum(samples) for count in samples]
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
        watched = [
            (stage, part)
            for stage, part in zip(engine.stages, parts, strict=True)
            if not part.looking and not stage.habits.certain
        ]
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

    @property
    def side_wants(self) -> bool:
        """Whether a side loss of this forward wants a gradient."""
        return any(part.side_wants for part in self.parts)

    def side_loss(self) -> Tensor | None:
        """The mean of the layers' side losses over the batch, without its graph, on the last
        device; None where there were none.
        """
        device = self.engine.stages[-1].device
        terms = [
            side.to(device) * self._shares[number]
            for number in range(self.count)
            for part in self.parts
            for side in part.sides.get(number, ())
        ]
        return sum(terms[1:], terms[0]) if terms else None

    def backward(
        self, grads: Sequence[Grads], side_grad: Tensor | None = None
    ) -> tuple[list[Grads], list[Tensor | None]]:
        """Gradients of the inputs, by micro-batch, and of `weights`, of those of the outputs and of
        the side loss.

        Raises:
            RuntimeError: it has been called already.
            RunError: layers have side losses, and what is differentiated does not depend on them.
        """
        if side_grad is None and self.side_wants:
            raise RunError(
                "layers of a Pipe have called ps.side_loss, and the loss whose backward this is has no part of it: add it, as in "
                "loss = criterion(model(x), y) + model.side_loss, or 0 * model.side_loss to leave it out"
            )
        if self._spent:
            raise RuntimeError(
                "trying to backward through a Pipe a second time: what its forward kept is gone, with retain_graph=True, too. "
                "Call the Pipe again, or take all gradients in one backward"
            )
        self._spent = True
        engine, parts = self.engine, self.parts
        half = Half(
            "backward",
            range(self.count - 1, -1, -1),
            range(len(parts) - 1, -1, -1),
            engine.out_of,
            engine.into,
            lambda place, number: engine.stages[place].prepare(parts[place], number),
            lambda place, number, taken: engine.stages[place].backward(
                parts[place],
                number,
                taken,
                None if side_grad is None else side_grad * self._shares[number],
            ),
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
    """Ties the tensors of the output, which are there already, to those of the input and to the
    weights.
    """

    @staticmethod
    def forward(
        ctx: Any, run: Run, made: Sequence[Crossing], outputs: Sequence[Tensor], *tensors: Tensor
    ) -> Any:
        """`tensors` are those of the input, then the run's weights; `made` are the outputs by
        micro-batch. `outputs` are these joined, and the side loss, if there is one.
        """
        ctx.set_materialize_grads(False)
        wanted = [any(column) for column in zip(*(part.wants for part in made), strict=True)]
        if len(outputs) > len(wanted):
            wanted.append(run.side_wants)
        constant = [output for output, flag in zip(outputs, wanted, strict=True) if not flag]
        ctx.mark_non_differentiable(*constant)
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
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Play the backward. Raises as `Run.backward`, and where a graph of the gradients is asked
        for.
        """
        if torch.is_grad_enabled():
            raise RunError(
                "create_graph=True asks for gradients of gradients, which a Pipe does not have: its gradients come without a "
                "graph, so that what is made of them, such as a gradient penalty, would train nothing. Use the plain "
                "nn.Sequential for it, or a penalty that needs no second derivative"
            )
        run: Run = ctx.run
        side_grad = grads[-1] if len(grads) > len(ctx.sizes) else None
        grads = grads[: len(ctx.sizes)]
        columns = [
            [None] * run.count
            if grad is None
            else [grad]
            if sizes is None
            else torch.split(grad, sizes)
            for grad, sizes in zip(grads, ctx.sizes, strict=True)
        ]
        found, sums = run.backward(
            [[column[number] for column in columns] for number in range(run.count)], side_grad
        )
        of_inputs = [run.whole(place, found, device) for place, device in enumerate(ctx.devices)]
        return None, None, None, *of_inputs, *sums


@contextmanager
def _apart(weights: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """Gradients that are added to weights' `.grad` in here, apart from those that are there and
    from the user's hooks.

    Autograd adds a micro-batch's gradient of a layer as soon as it has it, which nobody could with
    less memory; but the user's graph, hooks and `.grad` are to see one of the whole batch. They get
    it from our node, as they get any other.
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


def run_forward(
    engine: Engine, value: Any, parts: Sequence[Crossing], recomputed: int
) -> tuple[Any, Tensor | None]:
    """The output of the whole for an input, which has been cut into `parts`; and the mean of the
    layers' side losses, if they have any.

    Args:
        engine: the partitions.
        value: the input, as the caller gave it.
        parts: its micro-batches.
        recomputed: how many of them run again before their backward.
    """
    run = Run(engine, parts, recomputed)
    made = run.forward()
    leaves = joined(made)
    side = run.side_loss()
    if run.grads:
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        sides = [] if side is None else [side]
        tied = list(Node.apply(run, made, [*outputs, *sides], *tensors_of(value), *run.weights))  # type: ignore[no-untyped-call]
        side = tied.pop() if sides else None
        fresh = iter(tied)
        leaves = [next(fresh) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    spec = made[0].spec
    return leaves[0] if spec is None else unflatten(spec, leaves), side
