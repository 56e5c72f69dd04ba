"""Replicas of a stage on several ranks: equal initial weights, and gradients summed at every U.

The sum is formed in the order of the ranks, so that it is bitwise the same on every rank and in
every run. Two replicas send each other all their gradients. More of them run an all-reduce in two
rounds: each replica owns a piece of the gradients, receives that piece from all others, sums it,
and sends the sum to all. Each of k replicas sends 2 (k - 1) / k of the gradients, the minimum for
an all-reduce (Rabenseifner 2004).

Buffers, such as the running statistics of batch norm, are those of the first replica, and thus of
its micro-batches alone, as in torch's DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from penstock.ranks.buckets import Packed, flat, gradient_flags, unflat
from penstock.stage.gradients.bucket_sum import BucketSum
from penstock.stage.gradients.replica_messages import Guard, ReplicaMessages
from penstock.stage.gradients.shared_memory_sum import (
    OpenSegment,
    SharedMemorySum,
    dense,
)
from penstock.stage.optimizer_shards import OptimizerShards
from penstock.stage.stage import Stage
from penstock.tracing.single_copy import keeps_sparse_gradients
from penstock.transport.payload import Payload
from penstock.transport.transport import Transport
from penstock.transport.update_messages import UpdateMessage, wave_message


@dataclass
class ReplicaGroup:
    """One rank's replica of a stage, and its communication with the others.

    Attributes:
        stage: the replica of this rank.
        ranks: the ranks that hold a replica, ascending.
        rank: this rank.
        transport: the links of this rank.
        guard: see `Guard`.
        tied: parameters that other stages use too; `tied_weights.Tied` sums their gradients.
        open_segment: opens the memory of another replica; None where the replicas are not
            processes of one host, whose gradients are in host memory.
        buckets: sums gradients in buckets; None where no collective operations join the replicas.
        zero: level of ZeRO, 0 or 1.
        shards: the division of the optimizer state among the replicas; None at level 0.
    """

    stage: Stage
    ranks: tuple[int, ...]
    rank: int
    transport: Transport
    guard: Guard
    tied: Collection[Tensor] = ()
    open_segment: OpenSegment | None = None
    buckets: BucketSum | None = None
    zero: int = 0
    shards: OptimizerShards | None = field(default=None, init=False)
    _previous: list[Tensor | None] | None = None

    def __post_init__(self) -> None:
        self._messages = ReplicaMessages(
            self.stage.index, self.ranks, self.rank, self.transport, self.guard
        )
        self._shared_memory: SharedMemorySum | None = None
        if self.open_segment is not None:
            self._shared_memory = SharedMemorySum(self._messages, self.open_segment)
        if self.zero:
            update = self.stage.update
            divided = _without(update.candidates, self.tied)
            self.shards = OptimizerShards(update, divided, self._messages)
        self.refresh()

    @property
    def sum_bytes(self) -> int:
        """Bytes of this rank in which gradients are summed, in addition to the gradients."""
        shared_bytes = 0 if self._shared_memory is None else self._shared_memory.nbytes
        bucket_bytes = 0 if self.buckets is None else self.buckets.nbytes
        return shared_bytes + bucket_bytes

    def refresh(self) -> None:
        """Update the list of parameters after some have been frozen or thawed."""
        self._parameters = _without(self.stage.update.parameters, self.tied)
        self._sparse = {
            id(module.weight)
            for module in self.stage.modules()
            if keeps_sparse_gradients(module) and isinstance(module.weight, Tensor)
        }

    def begin(self) -> None:
        """Before a batch, set aside gradients of earlier batches that no update has used.

        They are sums over the replicas already, and must not be summed again.
        """
        parameters = self._parameters
        if self._previous is None:
            self._previous = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

    def forget(self) -> None:
        """Drop the gradients that `begin` has set aside."""
        self._previous = None
        if self._shared_memory is not None:
            self._shared_memory.forget()
        if self.buckets is not None:
            self.buckets.forget()

    def all_reduce(self, *, updates: bool = False) -> None:
        """Sum the gradients over all replicas, and copy the buffers of the first one.

        Blocks until all replicas have called it. Ranks that share several stages must call it in
        the same order of stages.

        Args:
            updates: whether the stage is updated at once. At level 1 of ZeRO a replica then needs
                the sums of those parameters that it updates.
        """
        if self._parameters:
            self._sum_gradients(self.shards if updates else None)
        self._share(UpdateMessage.BUFFERS, self._buffers())

    def _sum_gradients(self, shards: OptimizerShards | None) -> None:
        """Sum the gradients: all of them, or of ZeRO's shards those that this replica updates."""
        if self._sparse:  # buckets and shared memory are flat and of fixed sizes
            self._sum_in_messages()
            return
        shared_memory = self._shared_memory
        area = None if shared_memory is None else shared_memory.area(self._parameters)
        if shared_memory is not None and area is not None:
            needed = None if shards is None else shards.is_updated_here
            self._set_grads(*shared_memory.finish(area, needed), {})
        elif self.buckets is not None:
            self._set_grads(*self.buckets.finish(self._parameters), {})
        elif shards is not None:
            self._sum_shards(shards)
        else:
            self._sum_in_messages()

    def send_updates(self) -> None:
        """After a step: send the parameters that this replica has updated for all."""
        if self.shards is not None:
            self.shards.send_updates()

    def receive_updates(self) -> None:
        """Wait for the parameters that other replicas have updated. All call it, as
        `all_reduce`.
        """
        if self.shards is not None:
            self.shards.receive_updates()

    def watch(self) -> None:
        """Before the last backward before an update, prepare to sum gradients beside it.
        Optional.
        """
        if self.buckets is not None and self._parameters and not self._sparse:
            self.buckets.watch(self._parameters)

    def start(self) -> None:
        """Begin to sum the gradients, which are complete, without waiting for other replicas.

        Optional; `all_reduce` ends it. Called after the last backward before an update, so that
        what follows in the program runs beside it.
        """
        if not self._parameters or self._sparse:
            return
        if self.buckets is not None:
            self.buckets.start(self._parameters)
        if self._shared_memory is not None:
            # Shared memory is made in `all_reduce`, where this rank may wait for the others.
            area = self._shared_memory.existing_area(self._parameters)
            if area is not None:
                self._shared_memory.start(area)

    def poll(self) -> None:
        """Go on with a sum that has been started, without waiting. Optional."""
        if self.buckets is not None:
            self.buckets.poll()

    def _sum_in_messages(self) -> None:
        """Sum the gradients by messages to all other replicas."""
        parameters = self._parameters
        has_grad = gradient_flags(parameters)
        # A parameter with a gradient here has one on at least one replica. Where all have one, the
        # counts need not be read, which would make the host wait for the device.
        all_have = all(parameter.grad is not None for parameter in parameters)
        grads = [self._dense(parameter) for parameter in parameters]
        tables = [parameter for parameter in parameters if id(parameter) in self._sparse]
        counts, sums = self._all_sum(has_grad, [*grads, *map(rows_of, tables)])
        rows = dict(zip(map(id, tables), sums[len(parameters) :], strict=True))
        counts_by_parameter = [1] * len(parameters) if all_have else counts.tolist()
        self._set_grads(counts_by_parameter, sums[: len(parameters)], rows)

    def _sum_shards(self, shards: OptimizerShards) -> None:
        """Sum, by messages, the gradients of those parameters that this replica updates."""
        rows: list[list[Tensor]] = []
        groups = shards.by_owner(self._parameters)
        for group in groups:
            grads = [self._dense(parameter) for parameter in group]
            # A replica that owns no parameters gets an empty message: each waits for one from all
            # others.
            rows.append([gradient_flags(group), *flat(grads)] if group else [torch.empty(0)])
        # The form is not that of sums of all parameters.
        signature = f"{UpdateMessage.GRADIENTS.name} {len(self._parameters)} divided"
        received = self._messages.exchange(UpdateMessage.GRADIENTS, rows, signature)
        counts, *parts = [_sum(column) for column in zip(*received, strict=True)]
        sums: dict[int, Tensor] = {}
        flags: dict[int, int] = {}
        updated = groups[self._messages.position]
        if updated:
            sums = dict(zip(map(id, updated), unflat(parts, updated), strict=True))
            flags = dict(zip(map(id, updated), map(int, counts.tolist()), strict=True))
        self._set_grads(
            [flags.get(id(parameter), 0) for parameter in self._parameters],
            [sums.get(id(parameter)) for parameter in self._parameters],
            {},
        )

    def _set_grads(
        self, counts: list[int], sums: Sequence[Tensor | None], rows: Mapping[int, Tensor]
    ) -> None:
        """Set the gradients to sums over all replicas, plus those that `begin` has set aside.

        Args:
            counts: for each parameter the number of replicas that have a gradient, or 1 where it is
                known that there are some.
            sums: for each parameter the sum of the gradients; None where it is not needed.
            rows: for sparse gradients, by the `id` of the parameter, see `rows_of`.
        """
        previous = self._previous or [None] * len(self._parameters)
        for parameter, count, total, earlier in zip(
            self._parameters, counts, sums, previous, strict=True
        ):
            # A parameter that no replica has a gradient of stays without one. So does one that
            # another replica updates (ZeRO): `Update.step` drops what was set aside of it.
            grad = total if count else None
            if grad is not None and id(parameter) in rows:
                grad = sparse_of(grad, rows[id(parameter)])
            if earlier is not None:
                grad = earlier if grad is None else earlier + grad
            parameter.grad = grad
        self._previous = None

    def _dense(self, parameter: nn.Parameter) -> Tensor:
        """Return a parameter's gradient as a dense tensor, zeros if it has none.

        Raises:
            SettingError: it is sparse, and no module of the stage declares sparse gradients.
        """
        grad = parameter.grad
        if grad is None:
            return torch.zeros_like(parameter)
        if grad.layout is torch.strided:
            return grad
        if id(parameter) not in self._sparse:
            return dense(parameter, self.stage.index)  # raises
        return grad.to_dense()

    def share_weights(self) -> None:
        """Copy the first replica's parameters and buffers to all others."""
        tensors = [
            tensor
            for module in self.stage.modules()
            for tensor in module._parameters.values()
            if tensor is not None
        ]
        self._share(UpdateMessage.WEIGHTS, [*tensors, *self._buffers()])

    def _buffers(self) -> list[Tensor]:
        """Return the buffers of the stage."""
        return [
            buffer
            for module in self.stage.modules()
            for buffer in module._buffers.values()
            if buffer is not None
        ]

    def _all_sum(self, flags: Tensor, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Sum flags and tensors over the replicas, in the order of the ranks."""
        # One round instead of two. a + b is b + a to the last bit, so that both replicas get equal
        # sums.
        if len(self.ranks) == 2:
            return self._sum_of_two(flags, tensors)
        # Every replica sums one piece of all gradients and sends the sum: with n replicas a rank
        # sends 2 (n - 1) / n of the bytes, as around a ring, and not n - 1 times all of them.
        columns = [part.tensor_split(len(self.ranks)) for part in flat(tensors)]
        pieces = list(zip(*columns, strict=True))
        received = self._exchange(UpdateMessage.GRADIENTS, [[flags, *piece] for piece in pieces])
        flags = _sum([row[0] for row in received])
        grads = [row[1:] for row in received]
        sums = [_sum(column) for column in zip(*grads, strict=True)]
        received = self._exchange(UpdateMessage.SUMS, [sums] * len(self.ranks))
        totals = [torch.cat(column) for column in zip(*received, strict=True)]
        return flags, unflat(totals, tensors)

    def _sum_of_two(self, flags: Tensor, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Sum flags and tensors over two replicas in one round."""
        packed = Packed.of(tensors)
        received = self._exchange(UpdateMessage.GRADIENTS, [[flags, *packed.parts]] * 2)
        position = self.ranks.index(self.rank)
        local_parts, peer_parts = received[position], received[1 - position]
        # In place unless the transport shares memory with the peer: allocating a tensor of that
        # size takes as long as summing it.
        sums = [
            peer + local if self.transport.shares else peer.add_(local)
            for local, peer in zip(local_parts, peer_parts, strict=True)
        ]
        return sums[0], packed.unpacked(sums[1:])

    def _exchange(
        self, number: UpdateMessage, rows: Sequence[Sequence[Tensor]]
    ) -> list[list[Tensor]]:
        """Send `rows[n]` to the n-th replica, and receive one row from each."""
        # With the count: the message has another form after parameters have been thawed.
        signature = f"{number.name} {len(self._parameters)}"
        return self._messages.exchange(number, rows, signature)

    def _share(self, number: UpdateMessage, tensors: list[Tensor]) -> None:
        """Copy the first replica's tensors to all others."""
        if not tensors:
            return
        message = number.of_stage(self.stage.index)
        first, *others = self.ranks
        if self.rank == first:
            # Flat copies, since the next batch may change the tensors before they have been sent.
            parts = flat(tensors)
            for rank in others:
                self.transport.send(rank, message, Payload.row(parts), number.name)
            return
        payload = self.guard(first, self.transport.post(first, message, number.name).wait)
        assert payload is not None
        with torch.no_grad():
            for tensor, value in zip(tensors, unflat(payload.tensors, tensors), strict=True):
                tensor.copy_(value)


@dataclass(frozen=True)
class WaveReplicaExchange:
    """Messages between replicas that do not synchronise at every U but once per wave.

    Implements `penstock.optim.stage_weights.WaveExchange`.

    Attributes:
        replica: the replica of this rank.
    """

    replica: ReplicaGroup

    @property
    def copies(self) -> int:
        """The number of replicas, this one included."""
        return len(self.replica.ranks)

    def send_wave(self, wave: int, tensors: list[Tensor]) -> None:
        """Send the tensors of a wave to the other replicas, without waiting.

        The tensors must not be changed afterwards.
        """
        for rank in self._others:
            payload = Payload.row(tensors)
            self.replica.guard(rank, partial(self._send, rank, wave, payload))

    def _send(self, rank: int, wave: int, payload: Payload) -> None:
        """Start to send the tensors of a wave to one other replica."""
        self.replica.transport.send(
            rank, wave_message(self.replica.stage.index, wave), payload, "wave"
        )

    def receive_wave(self, wave: int) -> list[list[Tensor]]:
        """Wait for the tensors that the other replicas have sent for a wave.

        Returns:
            The tensors of each other replica, in the order of the ranks.
        """
        arrivals = {
            rank: self.replica.transport.post(
                rank, wave_message(self.replica.stage.index, wave), "wave"
            )
            for rank in self._others
        }
        payloads = [self.replica.guard(rank, arrival.wait) for rank, arrival in arrivals.items()]
        return [list(payload.tensors) for payload in payloads if payload is not None]

    @property
    def _others(self) -> list[int]:
        """The ranks of the other replicas."""
        return [rank for rank in self.replica.ranks if rank != self.replica.rank]


def _without(
    parameters: Sequence[nn.Parameter], excluded: Collection[Tensor]
) -> list[nn.Parameter]:
    """Return the parameters that are not among others."""
    excluded_ids = set(map(id, excluded))
    return [parameter for parameter in parameters if id(parameter) not in excluded_ids]


def _sum(terms: Sequence[Tensor]) -> Tensor:
    """Add tensors up from left to right, on the device of the first partial sum."""
    # The same order on all replicas: another one would round differently.
    total = terms[0]
    for term in terms[1:]:
        total = total + term.to(total.device)
    return total


def rows_of(parameter: nn.Parameter) -> Tensor:
    """Mark the rows of an embedding that its gradient has, even those with zeros.

    Returns:
        One float per row, 1 for a row of the gradient and 0 for the others.
    """
    rows = torch.zeros(parameter.shape[0], dtype=torch.float32, device=parameter.device)
    grad = parameter.grad
    if grad is None:
        return rows
    if grad.layout is torch.strided:
        return rows + 1
    rows[grad.coalesce().indices()[0]] = 1
    return rows


def sparse_of(dense: Tensor, rows: Tensor) -> Tensor:
    """Return the sparse gradient with the marked rows of a dense one.

    An optimizer for sparse gradients steps exactly these rows.
    """
    indices = rows.nonzero().reshape(1, -1)
    return torch.sparse_coo_tensor(
        indices, dense[indices[0]], dense.shape, is_coalesced=True, check_invariants=False
    )
