"""One partition of a `Pipe`: its forward, recompute and backward on a micro-batch.

Unlike `stage.stage.Stage`, which trains, a partition is part of the caller's autograd graph: see
`pipe_run`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.grad.full_backward import whole_grad
from penstock.modules.recomputing import checkpointing
from penstock.modules.side_loss import collecting_side_losses
from penstock.modules.skippable import Skip, Skippable, Waiting, waiting_skips
from penstock.pipe.pipe_random import ForwardSeed, PartitionRandomness, SeededOps
from penstock.pipe.pipe_value import Grads, detach_payload, gradients_of, payloads_of
from penstock.stage.boundary_checks import InPlaceChanges, check_same_requires_grad
from penstock.stage.second_forward import FirstForward, SecondForwards
from penstock.tracing.traced_layer import with_inputs_on
from penstock.transport.payload import Payload


class Partition(nn.Sequential):
    """The layers that run on one device.

    Attributes:
        first_layer: index of the first layer in the whole model.
        seeded_ops: if set, runs each layer with the random stream of its index.
    """

    first_layer: int = 0
    seeded_ops: SeededOps | None = None

    def forward(self, input: Any) -> Any:  # noqa: A002 - torch's own name
        """Run the layers in order."""
        if self.seeded_ops is None:
            return super().forward(input)  # type: ignore[no-untyped-call]
        for position, layer in enumerate(self):
            input = self.seeded_ops.run(self.first_layer + position, layer, input)  # noqa: A001
        return input


@dataclass
class _SavedMicroBatch:
    """What a forward saves for the backward of one micro-batch.

    Attributes:
        inputs: the inputs, whose tensors are the leaves of the graph.
        roots: the outputs with their graph; None until a recompute has made them.
        first_forward: state and fingerprint of the first forward, if there will be a recompute.
        requires_grad: by output tensor, whether it requires a gradient.
        side_losses: the side losses, with their graph.
    """

    inputs: list[Payload]
    roots: list[Payload] | None
    first_forward: FirstForward | None
    requires_grad: list[bool]
    side_losses: list[Tensor]


@dataclass
class PartitionRun:
    """One partition in one forward of the model and the backward of that forward.

    Attributes:
        weights: parameters that require gradients.
        training: whether the partition is in training mode.
        forward_seed: seed of the random numbers.
        intercepted: whether random ops are intercepted and recorded.
        has_backward: whether there will be a backward.
        recompute_count: the micro-batches below this index are recomputed.
        drew: whether an intercepted op has drawn random numbers.
        may_have_drawn: whether an op may have drawn without being intercepted.
        weight_versions: version counters of `weights` at the beginning of the forward.
        saved: by micro-batch, what its backward needs.
        side_losses: by micro-batch, its side losses without their graphs.
        side_loss_requires_grad: whether any side loss requires a gradient.
    """

    weights: list[Tensor]
    training: bool
    forward_seed: ForwardSeed
    intercepted: bool
    has_backward: bool = False
    recompute_count: int = 0
    drew: bool = False
    may_have_drawn: bool = False
    weight_versions: list[int] = field(default_factory=list)
    saved: dict[int, _SavedMicroBatch] = field(default_factory=dict)
    side_losses: dict[int, list[Tensor]] = field(default_factory=dict)
    side_loss_requires_grad: bool = False

    def expect_backward(self, recompute_count: int) -> None:
        """Record that a backward will follow, and the weights that a recompute has to see."""
        self.has_backward, self.recompute_count = True, recompute_count
        if recompute_count:
            self.weight_versions = [weight._version for weight in self.weights]


class PipeStage:
    """A partition on its device.

    Args:
        module: its layers.
        device: where they compute.
        incoming: skips that the partition pops and another one stashes.
        outgoing: skips that the partition stashes and another one pops.
    """

    def __init__(
        self,
        module: Partition,
        device: torch.device,
        incoming: Sequence[Skip],
        outgoing: Sequence[Skip],
    ) -> None:
        self.module, self.device = module, device
        self.incoming, self.outgoing = tuple(incoming), tuple(outgoing)
        self.randomness = PartitionRandomness(module)
        self._has_skips = any(isinstance(part, Skippable) for part in module.modules())
        self._in_place = InPlaceChanges()
        self._modules: list[nn.Module] = []
        self._second_forwards = SecondForwards([module], [], self._name())

    def begin(self, forward_seed: ForwardSeed) -> PartitionRun:
        """Begin a forward of the model; return the record of this partition's part in it."""
        modules = list(_iterate_modules(self.module))
        if modules != self._modules:
            self._modules = modules
            self._second_forwards = SecondForwards([self.module], [], self._name())
        weights = {
            id(parameter): parameter
            for module in modules
            for parameter in module._parameters.values()
            if parameter is not None and parameter.requires_grad
        }
        training = self.module.training
        intercepted = self.randomness.begin_run(modules, training)
        return PartitionRun(list(weights.values()), training, forward_seed, intercepted)

    def forward(
        self, run: PartitionRun, micro_batch: int, arrived: Sequence[Payload]
    ) -> list[Payload]:
        """Run the layers on one micro-batch.

        Args:
            run: the record that `begin` returned.
            micro_batch: index of the micro-batch.
            arrived: the output of the partition before, or the input of the model; then the skips
                in `incoming`.

        Returns:
            The output of the layers, then the skips in `outgoing`.
        """
        recompute = micro_batch < run.recompute_count
        inputs = [self._make_leaves(value, run.has_backward) for value in arrived]
        first_forward = self._second_forwards.first() if recompute else None
        # The graph is recorded even if the micro-batch is recomputed: it shows which outputs
        # require gradients, and torch chooses kernels by it. It is freed at the end of this
        # forward.
        with (
            checkpointing() if recompute else nullcontext(),
            torch.set_grad_enabled(run.has_backward),
        ):
            outputs, side_losses = self._run_layers(run, micro_batch, inputs)
        if side_losses:
            run.side_losses[micro_batch] = [term.detach() for term in side_losses]
            run.side_loss_requires_grad |= any(term.requires_grad for term in side_losses)
        if run.has_backward:
            if first_forward is not None:
                first_forward.note([leaf for value in outputs for leaf in value.leaves])
            requires_grad = [flag for value in outputs for flag in value.wants_grad]
            run.saved[micro_batch] = _SavedMicroBatch(
                inputs,
                None if recompute else outputs,
                first_forward,
                requires_grad,
                [] if recompute else side_losses,
            )
        return [detach_payload(value) for value in outputs] if recompute else outputs

    def prepare(self, run: PartitionRun, micro_batch: int) -> None:
        """Recompute the forward of a micro-batch, if it is to be recomputed.

        This is called before the gradients arrive, so that the partition does not wait idly.

        Raises:
            RuntimeError: a weight was modified since the forward, or the recompute gave other
                results than the first forward.
        """
        saved = run.saved[micro_batch]
        if saved.roots is not None:
            return
        if run.weight_versions != [weight._version for weight in run.weights]:
            raise RuntimeError(
                "a parameter has been changed in place between the forward of a Pipe and its "
                "backward, which recomputes the forward with it: call optimizer.step() after "
                "backward(), or use checkpoint='never'"
            )
        assert saved.first_forward is not None
        # Among the attributes that are restored are the modes of the layers.
        with torch.enable_grad(), self._second_forwards.seeing(saved.first_forward):
            saved.roots, saved.side_losses = self._run_layers(
                run, micro_batch, saved.inputs, recompute=True
            )
        leaves = [leaf for value in saved.roots for leaf in value.leaves]
        self._second_forwards.check(saved.first_forward, leaves, micro_batch)
        saved.first_forward = None
        tensors = [tensor for value in saved.roots for tensor in value.tensors]
        check_same_requires_grad(saved.requires_grad, tensors, "a partition of a Pipe")
        first_count = len(run.side_losses.get(micro_batch, ()))
        if len(saved.side_losses) != first_count:
            raise RunError(
                "a partition of a Pipe: run again for its backward, a forward had "
                f"{len(saved.side_losses)} side losses, and {first_count} the first time: layers "
                "must do the same in both forwards; otherwise use checkpoint='never'"
            )

    def backward(
        self,
        run: PartitionRun,
        micro_batch: int,
        grads: Sequence[Grads],
        side_grad: Tensor | None = None,
    ) -> list[Grads]:
        """Compute the gradients of the inputs; add those of the weights to their `.grad`.

        Args:
            run: the record that `begin` returned.
            micro_batch: index of the micro-batch; `prepare` has been called for it.
            grads: gradients of the outputs of `forward`, by value and tensor; None where there is
                none.
            side_grad: gradient of each of the micro-batch's side losses.

        Returns:
            Gradients of the inputs of `forward`, by value and tensor.
        """
        saved = run.saved.pop(micro_batch)
        assert saved.roots is not None
        roots, root_grads = [], []
        for value, value_grads in zip(saved.roots, grads, strict=True):
            for root, grad in zip(value.tensors, value_grads, strict=True):
                if grad is not None and root.requires_grad:
                    roots.append(root)
                    root_grads.append(grad.to(root.device))
        if side_grad is not None:
            side_losses = [term for term in saved.side_losses if term.requires_grad]
            roots += side_losses
            root_grads += [side_grad.to(term.device, term.dtype) for term in side_losses]
        if roots:
            with self.randomness.backward(self.device):
                whole_grad(roots, root_grads)
        return [gradients_of(value) for value in saved.inputs]

    def _make_leaves(self, value: Payload, has_backward: bool) -> Payload:
        """Return a value on this device, with its tensors as leaves of a new graph."""
        leaves = [tensor.detach().to(self.device) for tensor in value.tensors]
        if has_backward:
            for leaf, requires_grad in zip(leaves, value.wants_grad, strict=True):
                if requires_grad:
                    leaf.requires_grad_()
        return value.with_tensors(leaves)

    def _run_layers(
        self,
        run: PartitionRun,
        micro_batch: int,
        leaves: Sequence[Payload],
        *,
        recompute: bool = False,
    ) -> tuple[list[Payload], list[Tensor]]:
        """Return the output and the outgoing skips of the layers, and their side losses."""
        watch = self._in_place.watch(leaves, training=run.training)
        inputs = watch.inputs
        skips: Waiting = {
            skip: value.value() for skip, value in zip(self.incoming, inputs[1:], strict=True)
        }
        value = with_inputs_on(inputs[0].value(), self.device)
        with collecting_side_losses() as side_losses:
            if self._has_skips or run.intercepted or (recompute and run.may_have_drawn):
                with self._reproducible(run, micro_batch, recompute), waiting_skips(skips):
                    output = self.module(value)
            else:
                output = self.module(value)
        watch.check()
        return payloads_of([output, *(skips.pop(skip) for skip in self.outgoing)]), side_losses

    @contextmanager
    def _reproducible(self, run: PartitionRun, micro_batch: int, recompute: bool) -> Iterator[None]:
        """Make the random numbers of a forward reproducible, if it may draw any."""
        if not (run.intercepted or (recompute and run.may_have_drawn)):
            yield
            return
        seeded_ops = SeededOps(
            run.forward_seed,
            self.device,
            micro_batch,
            None if run.intercepted else self._undetected_draw_error,
            self.randomness,
        )
        self.module.seeded_ops = seeded_ops
        try:
            with seeded_ops:
                yield
        finally:
            self.module.seeded_ops = None
            run.drew |= seeded_ops.drew

    def _name(self) -> str:
        """Return a name of the partition for messages."""
        first, names = self.module.first_layer, list(self.module._modules)
        return f"layers {first} to {first + len(names) - 1} of a Pipe ({', '.join(names)})"

    def _undetected_draw_error(self, op: str) -> RuntimeError:
        return RuntimeError(
            f"a layer of a Pipe drew random numbers ({op}) in a forward, and had drawn none "
            "before. They were not recorded, so the forward cannot be recomputed for its backward. "
            "The next forward allows for it: repeat the batch"
        )


def _iterate_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield all modules; one that occurs several times is yielded several times.

    This takes a tenth of the time of `nn.Module.modules()`, which removes duplicates.
    """
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _iterate_modules(child)
