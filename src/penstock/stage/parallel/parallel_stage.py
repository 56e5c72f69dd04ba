"""A stage whose layers several processes share.

FSDP2 gathers the weights at the beginning of a batch and keeps them until its end, as
`reshard_after_forward=False` says. Backwards of micro-batches add up whole gradients; after the
last one they are summed over the copies and divided, as torch.distributed.pipelining does. They are
summed and not averaged, because losses carry their share of the joined batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from penstock.errors import SettingError
from penstock.ranks.buckets import flat, unflat
from penstock.ranks.mesh.pipeline_mesh import COPIES, TENSOR, PipelineMesh
from penstock.values.sharded import is_sharded, local_part


class ParallelStage:
    """The layers of a stage and their collective operations.

    Args:
        index: the stage.
        layers: its layers, which the caller's function has changed.
        mesh: the place of this process.

    Raises:
        SettingError: the layers are shared over other dimensions than "dp" and "tp".
    """

    def __init__(self, index: int, layers: Sequence[nn.Module], mesh: PipelineMesh) -> None:
        self.index = index
        self._layers, self._mesh = layers, mesh
        self._wrapped = [
            module
            for layer in layers
            for module in layer.modules()
            if isinstance(module, FSDPModule)
        ]
        self._previous: dict[nn.Parameter, Tensor] = {}
        for module in self._wrapped:
            module.set_gradient_divide_factor(1.0)
            # gloo has no product with a factor in its sum.
            module.set_force_sum_reduction_for_comms(True)
            module.set_reshard_after_forward(False, recurse=False)
            # No backward sums by itself: `reduce` does, after the last one.
            self._set_last(module, last=False)
        self._fsdp_parameters = {
            id(entry.sharded_param) for group in self._fsdp_groups() for entry in group.fsdp_params
        }
        self._check_meshes()

    @property
    def sharded(self) -> list[nn.Parameter]:
        """The parameters that processes share."""
        return [
            parameter
            for layer in self._layers
            for parameter in layer.parameters()
            if is_sharded(parameter)
        ]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the whole weights and gradients that FSDP holds during a batch."""
        shared = [p for p in self.sharded if id(p) in self._fsdp_parameters]
        # Weights and gradients, each with the parts of all copies.
        return 2 * self._mesh.copies * sum(local_part(parameter).nbytes for parameter in shared)

    def begin(self) -> None:
        """Before a batch: gather the weights.

        Gradients of earlier batches, which are sums over the copies already, are set aside.
        """
        # A batch that failed has not taken back those that it had set aside.
        self._previous.clear()
        for parameter in self._reduced_without_fsdp():
            if parameter.grad is not None:
                self._previous[parameter] = parameter.grad
                parameter.grad = None
        for module in self._wrapped:
            module.unshard()

    def reduce(self) -> None:
        """After the last backward of a batch: sum the gradients over the copies."""
        if self._wrapped:
            self._reduce_by_fsdp()
        self._sum_over_copies([p for p in self._reduced_without_fsdp() if p.requires_grad])
        # After the sum: these are sums over the copies already.
        for parameter, previous in self._previous.items():
            grad = parameter.grad
            parameter.grad = previous if grad is None else previous + grad
        self._previous.clear()

    def _reduce_by_fsdp(self) -> None:
        """Let FSDP sum and divide the gradients that it has left whole in all backwards.

        The steps are those of a last backward under FSDP, in its order: backwards of a pipeline are
        calls of their own, so that no hook of FSDP could tell which is the last.
        """
        self._complete_gradients()
        for module in self._wrapped:
            self._set_last(module, last=True)
        for group in self._fsdp_groups():
            group.post_backward()
        for module in self._wrapped:
            state = _state_of(module)
            if state._is_root:
                # Waits for the sums, and puts them into `grad`.
                state._root_post_backward_final_callback()
        for module in self._wrapped:
            self._set_last(module, last=False)

    def end(self) -> None:
        """After a batch: free what other processes have of the weights."""
        for module in self._wrapped:
            module.reshard()

    def sum_over_tensor_ranks(self, numbers: Tensor) -> Tensor:
        """Return the sum of numbers over the processes that share the layers of a rank."""
        if self._mesh.width > 1:
            dist.all_reduce(numbers, group=self._mesh.group(TENSOR))
        return numbers

    def share_over_tensor_ranks(self, number: Tensor) -> Tensor:
        """Return the number of the first process that shares the layers of a rank.

        Sums over several dimensions may differ in their last bits between processes, and weights
        that all of them have must stay the same.
        """
        if self._mesh.width > 1:
            dist.broadcast(number, group=self._mesh.group(TENSOR), group_src=0)
        return number

    def _reduced_without_fsdp(self) -> list[nn.Parameter]:
        """Return the shared parameters whose gradients FSDP does not sum over copies."""
        if self._mesh.copies == 1:
            return []
        return [p for p in self.sharded if id(p) not in self._fsdp_parameters]

    def _sum_over_copies(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum gradients of parameters that processes of a dimension "tp" share."""
        if not parameters:
            return
        counts = self._counts([parameter.grad is not None for parameter in parameters])
        used = [p for p, count in zip(parameters, counts, strict=True) if count]
        # All copies sum the same tensors, also those of which only another copy has a gradient.
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        parts = [local_part(parameter.grad) for parameter in used]
        buckets = flat(parts)
        group = self._mesh.group(COPIES)
        works = [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]
        for work in works:
            assert work is not None
            work.wait()
        for part, total in zip(parts, unflat(buckets, parts), strict=True):
            part.copy_(total)

    def _complete_gradients(self) -> None:
        """Let all copies have gradients of the same parameters, zeros where another copy has one.

        FSDP sums those that a process has, in one message.
        """
        entries = [entry for group in self._fsdp_groups() for entry in group.fsdp_params]
        counts = self._counts([_has_gradient(entry) for entry in entries])
        for entry, count in zip(entries, counts, strict=True):
            if count and not _has_gradient(entry):
                entry.unsharded_param.grad = torch.zeros_like(entry.unsharded_param)

    def _counts(self, flags: Iterable[bool]) -> list[int]:
        """Return the number of copies on which each flag is set."""
        group = self._mesh.group(COPIES)
        numbers = torch.tensor([*flags], dtype=torch.int32, device=self._mesh.mesh.device_type)
        dist.all_reduce(numbers, group=group)
        return [int(number) for number in numbers.tolist()]

    def _fsdp_groups(self) -> Iterator[Any]:
        """Yield FSDP's groups of parameters, from the last layer to the first."""
        for module in reversed(self._wrapped):
            state = _state_of(module)
            groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.13
            if not groups:
                groups = [state._fsdp_param_group]
            # A module whose parameters are all in groups of its submodules has none.
            yield from [group for group in groups if group is not None]

    def _check_meshes(self) -> None:
        """Check over which dimensions of the mesh the layers are shared.

        Raises:
            SettingError: over others.
        """
        for layer in self._layers:
            for name, parameter in layer.named_parameters():
                if not isinstance(parameter, DTensor):
                    continue
                dimensions = parameter.device_mesh.mesh_dim_names or ()
                allowed: list[tuple[str, ...]] = [(TENSOR,)]
                if id(parameter) in self._fsdp_parameters:
                    allowed = [(COPIES,), (COPIES, TENSOR)]
                if dimensions not in allowed or not {*dimensions} <= {*self._mesh.dimensions}:
                    raise SettingError(
                        f"parallelize= shares {name} of stage {self.index} over the dimensions "
                        f"{', '.join(map(repr, dimensions)) or 'without names'}: fully_shard takes "
                        "mesh['dp'], and parallelize_module mesh['tp'], of the mesh that is its "
                        "second argument"
                    )

    @staticmethod
    def _set_last(module: FSDPModule, *, last: bool) -> None:
        """Set whether the next backward is the last of the batch."""
        module.set_is_last_backward(last)
        module.set_reshard_after_backward(last, recurse=False)
        module.set_requires_gradient_sync(last, recurse=False)


def _state_of(module: nn.Module) -> Any:
    """Return FSDP's state of a module."""
    return fully_shard.state(module)  # type: ignore[attr-defined]


def _has_gradient(entry: Any) -> bool:
    """Whether a parameter of FSDP has a gradient of this batch."""
    if entry.unsharded_accumulated_grad is not None:
        return True
    # FSDP creates this attribute when it first gathers the parameter.
    return hasattr(entry, "_unsharded_param") and entry.unsharded_param.grad is not None
