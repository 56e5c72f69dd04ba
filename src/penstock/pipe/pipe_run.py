"""One forward of a `Pipe` with its backward: one node of the caller's autograd graph.

The weights are inputs of that node. Their gradients reach the caller's graph once per backward, and
autograd treats them as any gradient: hooks, `torch.autograd.grad`, accumulation in `.grad`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.modules.randomness import generator_states, has_drawn
from penstock.pipe.pipe_batch import concatenate_outputs
from penstock.pipe.pipe_engine import AutocastState, Engine, HalfStep
from penstock.pipe.pipe_random import ForwardSeed
from penstock.pipe.pipe_value import Grads
from penstock.transport.payload import Payload
from penstock.values.structure import tensors_of


class Run:
    """One forward of a `Pipe`, with the state that its backward needs.

    Args:
        engine: the partitions.
        micro_batches: the inputs of the micro-batches.
        recompute_count: number of micro-batches, from the first on, to recompute in the backward.

    Attributes:
        micro_batch_count: number of micro-batches.
        sample_counts: by micro-batch, its number of samples.
        partition_runs: by partition, its part in this forward.
        weights: all parameters that require gradients, each once.
        has_backward: whether a graph is recorded.
    """

    def __init__(
        self, engine: Engine, micro_batches: Sequence[Payload], recompute_count: int
    ) -> None:
        self.engine = engine
        self._inputs: Sequence[Payload] = micro_batches
        self.micro_batch_count = len(micro_batches)
        self._shapes: list[list[torch.Size]] = []
        for value in micro_batches:
            self._shapes.append([tensor.shape for tensor in value.tensors])
        self.sample_counts = [shapes[0][0] for shapes in self._shapes]
        samples = sum(self.sample_counts)
        self._sample_shares = [count / samples for count in self.sample_counts]
        self._forward_seed = ForwardSeed()
        self.partition_runs = [stage.begin(self._forward_seed) for stage in engine.stages]
        weights = {id(weight): weight for run in self.partition_runs for weight in run.weights}
        self.weights = list(weights.values())
        self.has_backward = torch.is_grad_enabled() and (
            bool(self.weights) or any(micro_batches[0].wants_grad)
        )
        if self.has_backward:
            for partition_run in self.partition_runs:
                partition_run.expect_backward(recompute_count)
        self._autocast = AutocastState(
            [stage.device for stage in engine.stages],
            caching=not (self.has_backward and recompute_count),
        )
        self._backward_started = False

    def forward(self) -> list[Payload]:
        """Return the output of the last partition for each micro-batch."""
        engine, runs = self.engine, self.partition_runs
        # Partitions that may draw and are not intercepted, with the states of the generators.
        not_intercepted = [
            (stage, run, generator_states(stage.device))
            for stage, run in zip(engine.stages, runs, strict=True)
            if stage.randomness.may_draw and not run.intercepted
        ]
        half_step = HalfStep(
            "forward",
            range(self.micro_batch_count),
            range(len(runs)),
            engine.forward_in,
            engine.forward_out,
            lambda _, __: None,
            lambda partition, micro_batch, values: engine.stages[partition].forward(
                runs[partition], micro_batch, values
            ),
            self._inputs,
        )
        self._inputs = ()
        engine.run(half_step, self._autocast)
        for stage, run in zip(engine.stages, runs, strict=True):
            if run.intercepted:
                stage.randomness.record_run(run.training, run.drew)
        for stage, run, states_before in not_intercepted:
            if has_drawn(stage.device, states_before):
                # This partition has drawn, or other code of the process has: intercept its ops in
                # every forward from now on.
                stage.randomness.always_intercept = run.may_have_drawn = True
        self._forward_seed.advance_generator()
        return [half_step.outputs[number] for number in range(self.micro_batch_count)]

    @property
    def side_loss_requires_grad(self) -> bool:
        """Whether a side loss of this forward requires a gradient."""
        return any(run.side_loss_requires_grad for run in self.partition_runs)

    def side_loss(self) -> Tensor | None:
        """Return the mean of the layers' side losses over the batch, None if there are none.

        Returns:
            A scalar tensor without graph, on the device of the last partition.
        """
        device = self.engine.stages[-1].device
        terms: list[Tensor] = []
        for micro_batch, share in enumerate(self._sample_shares):
            for run in self.partition_runs:
                side_losses = run.side_losses.get(micro_batch, ())
                terms += [side_loss.to(device) * share for side_loss in side_losses]
        return sum(terms[1:], terms[0]) if terms else None

    def backward(
        self, grads: Sequence[Grads], side_grad: Tensor | None = None
    ) -> tuple[list[Grads], list[Tensor | None]]:
        """Compute the gradients of the inputs and of `weights`.

        Args:
            grads: by micro-batch, the gradients of the outputs.
            side_grad: the gradient of the mean side loss.

        Returns:
            By micro-batch, the gradients of the inputs; and the gradients of `weights`.

        Raises:
            RuntimeError: it has been called already.
            RunError: layers have side losses, and the differentiated loss does not depend on them.
        """
        if side_grad is None and self.side_loss_requires_grad:
            raise RunError(
                "layers of a Pipe have called ps.side_loss, and the loss of this backward does not "
                "include it: add it, as in loss = criterion(model(x), y) + model.side_loss, or "
                "0 * model.side_loss to leave it out"
            )
        if self._backward_started:
            raise second_backward()
        self._backward_started = True
        engine, runs = self.engine, self.partition_runs

        def backward_op(partition: int, micro_batch: int, values: list[Any]) -> list[Any]:
            share = self._sample_shares[micro_batch]
            scaled_side_grad = None if side_grad is None else side_grad * share
            stage = engine.stages[partition]
            return stage.backward(runs[partition], micro_batch, values, scaled_side_grad)

        half_step = HalfStep(
            "backward",
            range(self.micro_batch_count - 1, -1, -1),
            range(len(runs) - 1, -1, -1),
            engine.forward_out,
            engine.forward_in,
            lambda partition, micro_batch: engine.stages[partition].prepare(
                runs[partition], micro_batch
            ),
            backward_op,
            grads,
        )
        with separate_gradients(self.weights) as weight_grads:
            engine.run(half_step, self._autocast)
        input_grads = [half_step.outputs[number] for number in range(self.micro_batch_count)]
        return input_grads, weight_grads

    def concatenate_input_grad(
        self, position: int, grads: Sequence[Grads], device: torch.device
    ) -> Tensor | None:
        """Return the gradient of one tensor of the whole input.

        Args:
            position: which tensor of the input.
            grads: by micro-batch, the gradients of the input's tensors.
            device: where to put the result.
        """
        column = [micro_batch_grads[position] for micro_batch_grads in grads]
        example = next((grad for grad in column if grad is not None), None)
        if example is None:
            return None
        rows = [
            example.new_zeros(shapes[position]) if grad is None else grad
            for grad, shapes in zip(column, self._shapes, strict=True)
        ]
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).to(device)


class Node(torch.autograd.Function):
    """Connects the computed output of a `Run` to its input and weights in the caller's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Run,
        micro_batches: Sequence[Payload],
        outputs: Sequence[Tensor],
        *tensors: Tensor,
    ) -> Any:
        """Return `outputs` as results of this node.

        Args:
            ctx: context of autograd.
            run: the forward, which has been run.
            micro_batches: the outputs by micro-batch.
            outputs: the concatenated outputs, and the side loss, if there is one.
            tensors: the tensors of the input, then the weights of the run.
        """
        # A gradient of None shows that the loss does not depend on an output: of the side loss,
        # `Run.backward` refuses that.
        ctx.set_materialize_grads(False)
        flag_rows = [value.wants_grad for value in micro_batches]
        requires_grad = [any(column) for column in zip(*flag_rows, strict=True)]
        # The side loss, which comes last.
        if len(outputs) > len(requires_grad):
            requires_grad.append(run.side_loss_requires_grad)
        constant = [output for output, flag in zip(outputs, requires_grad, strict=True) if not flag]
        ctx.mark_non_differentiable(*constant)
        ctx.run = run
        input_tensors = tensors[: len(tensors) - len(run.weights)]
        ctx.devices = [tensor.device for tensor in input_tensors]
        # By output tensor, its samples per micro-batch; None if there is one micro-batch.
        ctx.sizes = []
        for column in zip(*(value.tensors for value in micro_batches), strict=True):
            ctx.sizes.append(list(map(len, column)) if len(column) > 1 else None)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Run the backward of all partitions.

        Raises:
            RuntimeError: the backward has been run already.
            RunError: create_graph=True, or the loss does not depend on the side losses.
        """
        check_no_graph()
        run: Run = ctx.run
        side_grad = grads[-1] if len(grads) > len(ctx.sizes) else None
        columns: list[Sequence[Tensor | None]] = []
        for grad, sizes in zip(grads[: len(ctx.sizes)], ctx.sizes, strict=True):
            if grad is None:
                columns.append([None] * run.micro_batch_count)
            elif sizes is None:
                columns.append([grad])
            else:
                columns.append(torch.split(grad, sizes))
        output_grads: list[Grads] = []
        for number in range(run.micro_batch_count):
            output_grads.append([column[number] for column in columns])
        micro_batch_grads, weight_grads = run.backward(output_grads, side_grad)
        input_grads = [
            run.concatenate_input_grad(position, micro_batch_grads, device)
            for position, device in enumerate(ctx.devices)
        ]
        return None, None, None, *input_grads, *weight_grads


def check_no_graph() -> None:
    """Reject a backward with create_graph=True: autograd then records a graph of the backward.

    Raises:
        RunError: it does.
    """
    if torch.is_grad_enabled():
        raise RunError(
            "create_graph=True asks for gradients of gradients, which a Pipe does not have: "
            "its gradients come without a graph, so that a term computed from them, such as a "
            "gradient penalty, would train nothing. Use the plain nn.Sequential for it, or a "
            "penalty that needs no second derivative"
        )


def second_backward() -> RuntimeError:
    """Return the error for a second backward of one forward."""
    return RuntimeError(
        "trying to backward through a Pipe a second time: the saved tensors of its forward "
        "are freed, also with retain_graph=True. Call the Pipe again, or take all "
        "gradients in one backward"
    )


def _hook_dicts(weights: Sequence[Tensor]) -> list[dict[int, Any]]:
    """Return the dicts of all hooks that autograd calls with gradients of the weights."""
    return [
        hooks
        for weight in weights
        for hooks in (weight._backward_hooks, weight._post_accumulate_grad_hooks)
        if hooks
    ]


@contextmanager
def separate_gradients(weights: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """Collect the gradients of weights separately from their `.grad`, without running their hooks.

    Inside, autograd accumulates the gradients of micro-batches in `.grad`, one layer at a time,
    which needs the least memory. But `.grad` and the user's hooks must see one gradient of the
    whole batch, which they get from `Node`. So `.grad` and the hooks are removed here and restored
    at the end.

    Yields:
        A list, to which the accumulated gradients are appended at the end.
    """
    previous_grads = [weight.grad for weight in weights]
    hook_dicts = _hook_dicts(weights)
    removed_hooks = [dict(hooks) for hooks in hook_dicts]
    weight_grads: list[Tensor | None] = []
    try:
        for weight in weights:
            weight.grad = None
        for hooks in hook_dicts:
            hooks.clear()
        yield weight_grads
        weight_grads += [weight.grad for weight in weights]
    finally:
        for hooks, removed in zip(hook_dicts, removed_hooks, strict=True):
            hooks.update(removed)
        for weight, grad in zip(weights, previous_grads, strict=True):
            weight.grad = grad


def run_forward(
    engine: Engine, value: Any, micro_batches: Sequence[Payload], recompute_count: int
) -> tuple[Any, Tensor | None]:
    """Run the whole model forward.

    Args:
        engine: the partitions.
        value: the input of the caller.
        micro_batches: the same, split into micro-batches.
        recompute_count: number of micro-batches, from the first on, to recompute in the backward.

    Returns:
        The output, and the mean of the layers' side losses, None if there are none.
    """
    run = Run(engine, micro_batches, recompute_count)
    outputs = run.forward()
    output = concatenate_outputs(outputs, run.sample_counts)
    side_loss = run.side_loss()
    if run.has_backward:
        side_losses = [] if side_loss is None else [side_loss]
        results = Node.apply(  # type: ignore[no-untyped-call]
            run, outputs, [*output.tensors, *side_losses], *tensors_of(value), *run.weights
        )
        connected = list(results)
        side_loss = connected.pop() if side_losses else None
        output = output.with_tensors(connected)
    return output.value(), side_loss
