"""Tied weights: one parameter used by layers of several stages, such as a GPT's embedding and head.

On one rank all stages share one tensor. After the program of a batch, every rank that holds the
tensor sends its gradient to the tensor's home: the first rank of the first stage that uses it.
There the gradients are summed in the order of the ranks and stepped by one optimizer, and the other
ranks get the new weights before any rank's next forward. None of this happens inside a U: ranks
that are home to one tensor and hold another could wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ChainError
from penstock.model.chain import Chain
from penstock.modules.state_names import prefix_of
from penstock.ranks.buckets import Packed, gradient_flags
from penstock.schedule.lower import Link
from penstock.schedule.op import Schedule
from penstock.tracing.traced_chain import TracedChain
from penstock.transport.payload import Payload
from penstock.transport.transport import Transport
from penstock.transport.update_messages import UpdateMessage

#: Runs a function that may wait for a rank, and converts errors of the transport into those of the
#: run.
Guard = Callable[[int, Callable[[], Any]], Any]

#: The buffers of batch norm, which every forward changes.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Shared:
    """A parameter or buffer that layers of several stages use.

    Attributes:
        name: its name in the chain.
        stages: the stages that use it, ascending.
        ranks: the ranks that hold it, ascending.
        home: the rank whose tensor counts.
        trainable: whether it is trained.
    """

    name: str
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    home: int
    trainable: bool

    @property
    def links(self) -> set[Link]:
        """The links between its home and the other ranks, in both directions."""
        links = set()
        for rank in self.ranks:
            if rank != self.home:
                links |= {Link(self.home, rank), Link(rank, self.home)}
        return links


def shared_tensors(
    description: Chain, lengths: Sequence[int], schedule: Schedule
) -> tuple[Shared, ...]:
    """Return the tensors that layers of several stages use, in the order of the chain.

    Args:
        description: the chain.
        lengths: the number of layers of each stage.
        schedule: the schedule.

    Raises:
        ChainError: a tensor cannot be shared: the schedule is asynchronous, or the tensor is a
            running statistic.
    """
    bounds = description.stage_bounds(list(lengths))
    stage_of_layer = [stage for stage, (first, end) in enumerate(bounds) for _ in range(first, end)]
    shared = []
    for name, users in description.tied.items():
        stages = tuple(sorted({stage_of_layer[user] for user in users}))
        if len(stages) < 2:
            continue
        trainable = description.tensor(name).trainable
        layers = ", ".join(description.layers[user].name for user in users)
        use = (
            f"{name} is used by layers {layers}, which this cut puts into stages "
            f"{', '.join(map(str, stages))}"
        )
        _check_sharable(name, trainable, use, schedule)
        ranks = sorted({rank for stage in stages for rank in schedule.ranks_of_stage[stage]})
        home = schedule.ranks_of_stage[stages[0]][0]
        shared.append(Shared(name, stages, tuple(ranks), home, trainable))
    return tuple(shared)


def _check_sharable(name: str, trainable: bool, use: str, schedule: Schedule) -> None:
    """Check that a tensor can be shared between stages.

    Args:
        name: its name in the chain.
        trainable: whether it is trained.
        use: a sentence about the layers that use it.
        schedule: the schedule.

    Raises:
        ChainError: the schedule is asynchronous, or the tensor is a running statistic.
    """
    if trainable and not schedule.synchronous:
        raise ChainError(
            f"{use}. {schedule.name} is asynchronous: its stages update at different times, so "
            "there is no moment at which their gradients could be added up. Move the cut so that "
            "these layers stay together, untie them, or use a synchronous schedule"
        )
    if name.rpartition(".")[2] in _STATISTICS:
        raise ChainError(
            f"{use}. It is a running statistic, and each use continues from the value of the one "
            "before: put these layers into one stage, or give each a batch norm of its own"
        )


def tensors_of(traced: TracedChain, layers: Iterable[tuple[str, nn.Module]]) -> dict[str, Tensor]:
    """Return the live parameters and buffers of some layers by the chain's own names.

    Args:
        traced: the chain.
        layers: names and modules of the layers. Of a tensor under several names, the first module's
            counts.
    """
    tensors: dict[str, Tensor] = {}
    for layer, module in layers:
        prefix = prefix_of(layer, module)
        for named_tensors in (
            module.named_parameters(prefix, remove_duplicate=False),
            module.named_buffers(prefix, remove_duplicate=False),
        ):
            for name, tensor in named_tensors:
                tensors.setdefault(traced.first_name(name), tensor)
    return tensors


@dataclass
class Tied:
    """One rank's communication about tensors that several ranks hold.

    Attributes:
        rank: this rank.
        held: the shared tensors that this rank holds, in the order of the chain.
        transport: the links of this rank.
        guard: see `Guard`.
    """

    rank: int
    held: Sequence[tuple[Shared, Tensor]]
    transport: Transport
    guard: Guard
    _home_tensors: Mapping[int, list[Tensor]] = field(default_factory=dict)
    _remote_tensors: Mapping[int, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._trained = {shared.name for shared, _ in self.held if shared.trainable}
        self.refresh()

    def refresh(self) -> None:
        """Add parameters that have been thawed to the trained ones."""
        self._trained |= {shared.name for shared, tensor in self.held if tensor.requires_grad}
        trained = [row for row in self.held if row[0].name in self._trained]
        self._home_tensors, self._remote_tensors = self._by_peer(trained)

    def _by_peer(
        self, rows: Iterable[tuple[Shared, Tensor]]
    ) -> tuple[dict[int, list[Tensor]], dict[int, list[Tensor]]]:
        """Group tensors by the other rank that holds them; both ranks get the same order.

        Returns:
            The tensors whose home is this rank, by each rank that also holds them; and the other
            tensors, by their home.
        """
        home_tensors: dict[int, list[Tensor]] = {}
        remote_tensors: dict[int, list[Tensor]] = {}
        for shared, tensor in rows:
            if shared.home != self.rank:
                remote_tensors.setdefault(shared.home, []).append(tensor)
                continue
            for rank in shared.ranks:
                if rank != self.rank:
                    home_tensors.setdefault(rank, []).append(tensor)
        return dict(sorted(home_tensors.items())), dict(sorted(remote_tensors.items()))

    def gather(self) -> None:
        """Send gradients to their homes, and add those that arrive, in the order of the ranks."""
        kind = UpdateMessage.TIED_GRADIENTS
        arrivals = {
            rank: self.transport.post(rank, kind.of_run, _signature(kind, tensors))
            for rank, tensors in self._home_tensors.items()
        }
        for home, tensors in self._remote_tensors.items():
            self._send_grads(home, tensors)
        for rank, arrival in arrivals.items():
            tensors = self._home_tensors[rank]
            flags, *parts = self.guard(rank, arrival.wait).tensors
            grads = Packed.of([tensor.detach() for tensor in tensors]).unpacked(parts)
            # What the other rank has no gradient of arrives as zeros, which change no sum. Where
            # all tensors have a gradient here, the flags need not be read, which would make the
            # host wait for the device.
            all_have = all(tensor.grad is not None for tensor in tensors)
            has_grads = [True] * len(tensors) if all_have else flags.tolist()
            for tensor, has_grad, grad in zip(tensors, has_grads, grads, strict=True):
                if has_grad:
                    total = tensor.grad
                    tensor.grad = grad if total is None else _dense(total) + grad

    def _send_grads(self, home: int, tensors: list[Tensor]) -> None:
        """Send the gradients of tensors to their home, with flags for those that have one."""
        flags = gradient_flags(tensors)
        grads = [
            torch.zeros_like(tensor) if tensor.grad is None else _dense(tensor.grad)
            for tensor in tensors
        ]
        kind = UpdateMessage.TIED_GRADIENTS
        self._send(home, kind, [flags, *Packed.of(grads).parts], _signature(kind, tensors))
        for tensor in tensors:
            tensor.grad = None

    def send_weights(self) -> None:
        """Send trained weights from their homes to the other ranks, and receive those of others."""
        self._send_weights(self._home_tensors, self._remote_tensors)

    def begin(self) -> None:
        """Send all shared tensors from their homes, frozen weights and buffers included."""
        self._send_weights(*self._by_peer(self.held))

    def _send_weights(
        self,
        home_tensors: Mapping[int, list[Tensor]],
        remote_tensors: Mapping[int, list[Tensor]],
    ) -> None:
        """Send tensors to the ranks that hold them, and receive others; both by peer."""
        kind = UpdateMessage.TIED_WEIGHTS
        # Receives first: two ranks that send to each other would else wait for each other.
        arrivals = {
            home: self.transport.post(home, kind.of_run, _signature(kind, tensors))
            for home, tensors in remote_tensors.items()
        }
        for rank, tensors in home_tensors.items():
            self._send(rank, kind, Packed.of(tensors).parts, _signature(kind, tensors))
        with torch.no_grad():
            for home, arrival in arrivals.items():
                tensors = remote_tensors[home]
                values = Packed.of(tensors).unpacked(self.guard(home, arrival.wait).tensors)
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)

    def _send(self, rank: int, kind: UpdateMessage, tensors: list[Tensor], signature: str) -> None:
        """Send tensors to a rank."""
        payload = Payload.row(tensors)
        self.guard(rank, lambda: self.transport.send(rank, kind.of_run, payload, signature))


def _signature(kind: UpdateMessage, tensors: Sequence[Tensor]) -> str:
    """Return a name for the form of a message, which depends on how many tensors are sent."""
    return f"{kind.name} {len(tensors)}"


def _dense(grad: Tensor) -> Tensor:
    """Return a gradient as a dense tensor."""
    return grad.to_dense() if grad.is_sparse else grad
