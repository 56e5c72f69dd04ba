"""Sum of the gradients of replicas in buckets, which starts beside the last backward.

As in torch's DistributedDataParallel (Li et al. 2020, "PyTorch Distributed", section 3.2) a bucket
holds some MB of gradients, from the last parameter to the first, as backwards produce them. A hook
on each parameter copies its gradient into its bucket during the last backward before an update, and
a full bucket is sent while the backward goes on. All ranks send their buckets in one order.

Unlike DDP nothing is assumed about the backward: if a gradient changes after its bucket was sent,
since the graph reaches a parameter several times, the ranks notice it by the version counter of
the tensor, tell each other, and send the bucket again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from penstock.ranks.buckets import gradient_flags
from penstock.simulate.overlapped_sums import BUCKET_BYTES
from penstock.stage.gradients.bucket_reduction import BucketLayout, Reduction, ReductionFactory
from penstock.stage.gradients.shared_memory_sum import dense, same_parameters
from penstock.transport.replica_collectives import ReplicaCollectives
from penstock.transport.wire import PendingWork

#: Calls a function that waits for what the text describes; converts errors of the transport.
Waiting = Callable[[str, Callable[[], None]], None]

#: What identifies the contents of a gradient: the tensor and its version counter.
_Contents = tuple[Tensor | None, int]


@dataclass
class Bucket:
    """Some parameters whose gradients are summed together.

    Attributes:
        parameters: the parameters.
        layout: of their gradients.
        reduction: how the bucket is summed.
        work: the operation that has been started; None before.
        rounds: number of rounds that have been started.
        total: the sum, flat, once it is complete.
    """

    parameters: list[nn.Parameter]
    layout: BucketLayout
    reduction: Reduction
    work: PendingWork | None = None
    rounds: int = 0
    total: Tensor | None = None
    _contents: list[_Contents] = field(default_factory=list)

    def fill(self, stage: int) -> None:
        """Copy the gradients into the memory of the reduction, zeros where there is none."""
        self._contents = [_contents(parameter) for parameter in self.parameters]
        targets, sources = [], []
        with torch.no_grad():
            views = self.layout.views(self.reduction.memory())
            for parameter, view in zip(self.parameters, views, strict=True):
                if parameter.grad is None:
                    view.zero_()
                else:
                    targets.append(view)
                    sources.append(dense(parameter, stage))
            if targets:
                torch._foreach_copy_(targets, sources)

    def take_sums(self) -> list[Tensor]:
        """Return the sum of each gradient, and give up their memory."""
        assert self.total is not None
        views = self.layout.views(self.total)
        self.total = None
        sums = []
        for parameter, view in zip(self.parameters, views, strict=True):
            # Optimizers are slower on gradients with other strides than their parameter.
            in_place = parameter.is_contiguous()
            sums.append(view if in_place else torch.empty_like(parameter).copy_(view))
        return sums

    def is_stale(self) -> bool:
        """Whether a gradient has changed since `fill`."""
        for parameter, (grad, version) in zip(self.parameters, self._contents, strict=True):
            if parameter.grad is not grad or (grad is not None and grad._version != version):
                return True
        return False


class BucketSum:
    """The sum of a stage's gradients over replicas by collective operations.

    Args:
        stage: index of the stage.
        collectives: those of the replicas.
        make_reduction: see `ReductionFactory`.
        waiting: see `Waiting`.
    """

    def __init__(
        self,
        stage: int,
        collectives: ReplicaCollectives,
        make_reduction: ReductionFactory,
        waiting: Waiting,
    ) -> None:
        self._stage = stage
        self._collectives, self._make_reduction = collectives, make_reduction
        self._waiting = waiting
        self._parameters: tuple[nn.Parameter, ...] = ()
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._missing: list[int] = []
        self._next_bucket = 0
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._flags: Tensor | None = None
        self._flags_work: PendingWork | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all reductions."""
        return sum(bucket.reduction.nbytes for bucket in self._buckets)

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Before the last backward: send each bucket when its gradients are complete."""
        self._prepare(parameters)
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        for parameter in self._parameters:
            if parameter.requires_grad:
                hook: torch.utils.hooks.RemovableHandle
                hook = parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)
            else:
                # Its hook never runs: counted, it would hold its bucket back to the end.
                self._missing[self._bucket_of[parameter]] -= 1

    def start(self, parameters: Sequence[nn.Parameter]) -> None:
        """After the last backward: send the remaining buckets, and what else ranks must know."""
        self._remove_hooks()
        if self._flags_work is None:
            self._send_all(parameters)

    def poll(self) -> None:
        """Start the second round of buckets whose first one has ended, in order, without
        waiting.
        """
        for bucket in self._buckets:
            if bucket.rounds == 2:
                continue
            if bucket.work is None or not self._collectives.is_completed(bucket.work):
                return
            self._advance(bucket)

    def finish(self, parameters: Sequence[nn.Parameter]) -> tuple[list[int], list[Tensor]]:
        """Wait for the sums.

        Returns:
            For each parameter the number of replicas that have a gradient; and the sum, in new
            memory.
        """
        self.start(parameters)  # does nothing if it has been called
        self._waiting("the other replicas", self._complete)
        counts = self._read_flags()
        self._flags = self._flags_work = None
        self._next_bucket = 0
        return counts, self._sums()

    def forget(self) -> None:
        """Drop the state of an unfinished sum."""
        self._remove_hooks()
        self._flags = self._flags_work = None
        self._next_bucket = 0
        for bucket in self._buckets:
            bucket.work, bucket.rounds, bucket.total = None, 0, None

    def reset(self) -> None:
        """Forget what reductions have kept from earlier steps."""
        for bucket in self._buckets:
            bucket.reduction.reset()

    def _prepare(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divide the parameters into buckets, if they are other ones than before."""
        if same_parameters(parameters, self._parameters):
            return
        groups: list[list[nn.Parameter]] = []
        open_groups: dict[torch.dtype, list[nn.Parameter]] = {}
        # Backwards produce gradients from the last parameter on: so the first bucket is full early.
        for parameter in reversed(parameters):
            group = open_groups.get(parameter.dtype)
            if group is None or sum(member.nbytes for member in group) >= BUCKET_BYTES:
                group = open_groups[parameter.dtype] = []
                groups.append(group)
            group.append(parameter)
        self._parameters = tuple(parameters)
        self._buckets = [self._make_bucket(group) for group in groups]
        self._bucket_of = {
            parameter: index
            for index, bucket in enumerate(self._buckets)
            for parameter in bucket.parameters
        }

    def _make_bucket(self, parameters: list[nn.Parameter]) -> Bucket:
        """Make a bucket of parameters of one dtype."""
        shapes = tuple(parameter.shape for parameter in parameters)
        layout = BucketLayout(shapes, parameters[0].dtype, parameters[0].device)
        return Bucket(parameters, layout, self._make_reduction(layout))

    def _ready(self, parameter: nn.Parameter) -> None:
        """Note that a gradient is there; send the buckets that are full, in their order."""
        self._missing[self._bucket_of[parameter]] -= 1
        # In their order, although a later one may be full sooner: all ranks send in one order.
        # Below 0 where the graph reaches a parameter several times.
        while self._next_bucket < len(self._buckets) and self._missing[self._next_bucket] <= 0:
            self._send(self._buckets[self._next_bucket])
            self._next_bucket += 1
        self.poll()

    def _send(self, bucket: Bucket) -> None:
        """Start the first round of a bucket."""
        bucket.fill(self._stage)
        with torch.no_grad():
            bucket.work, bucket.rounds = bucket.reduction.begin(), 1

    def _send_all(self, parameters: Sequence[nn.Parameter]) -> None:
        """Send the remaining buckets, then which gradients there are and which buckets are
        stale.
        """
        self._prepare(parameters)
        for bucket in self._buckets[self._next_bucket :]:
            self._send(bucket)
        has_grad = gradient_flags(self._parameters)
        stale = [bucket.is_stale() for bucket in self._buckets]
        self._flags = torch.cat([has_grad, torch.tensor(stale, dtype=torch.uint8)]).int()
        self._flags_work = self._collectives.all_reduce(self._flags)

    def _advance(self, bucket: Bucket) -> None:
        """Start the second round of a bucket, after its first one."""
        assert bucket.work is not None
        self._collectives.wait(bucket.work)  # has ended; reports its errors
        with torch.no_grad():
            bucket.work, bucket.rounds = bucket.reduction.advance(), 2

    def _complete(self) -> None:
        """Wait for all buckets; send those again that were stale on any rank."""
        self._complete_rounds(self._buckets)
        assert self._flags is not None
        assert self._flags_work is not None
        self._collectives.wait(self._flags_work)
        stale = self._flags[len(self._parameters) :].tolist()
        resent = [bucket for bucket, count in zip(self._buckets, stale, strict=True) if count]
        for bucket in resent:
            self._send(bucket)
        self._complete_rounds(resent)
        # Only now: PowerSGD stores what the sum leaves out, and that of a stale sum would be wrong.
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.total = bucket.reduction.finish()
                bucket.work, bucket.rounds = None, 0

    def _complete_rounds(self, buckets: Sequence[Bucket]) -> None:
        """Wait for both rounds of some buckets."""
        for bucket in buckets:
            if bucket.rounds == 1:
                self._advance(bucket)
        for bucket in buckets:
            if bucket.work is not None:
                self._collectives.wait(bucket.work)

    def _read_flags(self) -> list[int]:
        """Return for each parameter the number of replicas that have a gradient."""
        assert self._flags is not None
        return [int(flag) for flag in self._flags[: len(self._parameters)].tolist()]

    def _sums(self) -> list[Tensor]:
        """Return the sums in the order of the parameters."""
        sums: dict[nn.Parameter, Tensor] = {}
        with torch.no_grad():
            for bucket in self._buckets:
                sums.update(zip(bucket.parameters, bucket.take_sums(), strict=True))
        return [sums[parameter].detach() for parameter in self._parameters]

    def _remove_hooks(self) -> None:
        """Remove the hooks of `watch`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _contents(parameter: nn.Parameter) -> _Contents:
    """Return what identifies the contents of a gradient."""
    grad = parameter.grad
    return grad, 0 if grad is None else grad._version
