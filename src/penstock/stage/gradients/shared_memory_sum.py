"""Sum of the gradients of replicas on one host, in memory that their processes share.

Every replica copies its gradients into a segment that all others have opened. Replica i then sums
piece i of all segments, in the order of the ranks, and stores the sum in piece i of its own
segment, from where the others copy it. Each gradient is copied twice and read once for the sum;
messages through `transport.same_host` copy it as often, and sum it in every replica.

    replica 0   [ a0 | a1 ]  ──▶  [ a0 + b0 | a1      ]  ──▶  gradients of both replicas:
    replica 1   [ b0 | b1 ]  ──▶  [ b0      | a1 + b1 ]       [ a0 + b0 | a1 + b1 ]

The order of a sum is that of the ranks, as in `ReplicaGroup`'s sums by messages, so that results
are the same to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.errors import RunError, SettingError
from penstock.ranks.buckets import gradient_flags
from penstock.shared_memory.segment import LINE, Segment
from penstock.stage.gradients.gradient_layout import GradientLayout
from penstock.stage.gradients.replica_messages import ReplicaMessages
from penstock.transport.update_messages import UpdateMessage

#: Opens the segment that another rank has made as a file descriptor.
OpenSegment = Callable[[int, int], Segment]

#: Elements that are summed at a time for three or more replicas: partial sums stay in the cache.
_CHUNK = 1 << 16

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Copy:
    """Where a replica reads the sum of one gradient.

    Attributes:
        source: the memory: the segment of the replica that has summed it, or the own segment.
        parts: if several replicas have summed parts of it, targets in the own segment and sources.
    """

    source: Tensor
    parts: tuple[tuple[Tensor, Tensor], ...] = ()


class SharedArea:
    """The segments of all replicas for the gradients of some parameters.

    Attributes:
        parameters: the parameters.
        layout: the places of their gradients.
        local: for each parameter, its place in this rank's segment.
        copies: for each parameter, where its sum is.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: GradientLayout,
        segments: Sequence[Segment],
        position: int,
    ) -> None:
        self.parameters = tuple(parameters)
        self.layout = layout
        self._segments = segments  # keeps the memory mapped
        # The first line of a segment is its head.
        memories = [segment.bytes[LINE:] for segment in segments]
        self._position = position
        self._flats = [layout.flats(memory) for memory in memories]
        views = [layout.views(memory) for memory in memories]
        self.local = views[position]
        self.copies = [self._copy(index, views) for index in range(len(parameters))]

    def piece(self, region: int, position: int) -> tuple[int, int]:
        """Return the first element and the end of a replica's piece of a region."""
        return self.layout.regions[region].piece(position, len(self._segments))

    def summed(self, region: int, position: int) -> Tensor:
        """Return the piece of a region that a replica has summed, where it is."""
        first, end = self.piece(region, position)
        return self._flats[position][region][first:end]

    def sum_piece(self) -> None:
        """Sum this rank's piece of every region, in the order of the ranks, in place."""
        for region in range(len(self.layout.regions)):
            first, end = self.piece(region, self._position)
            terms = [flats[region][first:end] for flats in self._flats]
            _sum_into(terms[self._position], terms)

    def _copy(self, index: int, views: Sequence[Sequence[Tensor]]) -> _Copy:
        """Return where the sum of a parameter's gradient is."""
        place = self.layout.places[index]
        parts: list[tuple[Tensor, Tensor]] = []
        owner = self._position
        for position, flats in enumerate(self._flats):
            first, end = self.piece(place.region, position)
            first = max(first, place.start)
            end = min(end, place.start + place.count)
            if first >= end:
                continue
            owner = position
            target = self._flats[self._position][place.region][first:end]
            parts.append((target, flats[place.region][first:end]))
        # The sum is in the memory of the one replica in whose piece the gradient lies, or is put
        # together in this replica's memory from the pieces of several.
        if len(parts) < 2:
            return _Copy(views[owner][index])
        foreign = tuple(part for part in parts if part[0].data_ptr() != part[1].data_ptr())
        return _Copy(views[self._position][index], foreign)


def _sum_into(target: Tensor, terms: Sequence[Tensor]) -> None:
    """Store the sum of all terms, added from left to right, in one of them."""
    if len(terms) == 2:
        # The sum of two numbers does not depend on their order.
        other = terms[1] if target is terms[0] else terms[0]
        target.add_(other)
        return
    for start in range(0, len(target), _CHUNK):
        chunks = [term[start : start + _CHUNK] for term in terms]
        total = chunks[0] + chunks[1]
        for chunk in chunks[2:]:
            total += chunk
        target[start : start + _CHUNK] = total


class SharedMemorySum:
    """The sum of a stage's gradients over replicas in processes of one host.

    Args:
        messages: those among the replicas, which say when memory may be read.
        open_segment: see `OpenSegment`.
    """

    def __init__(self, messages: ReplicaMessages, open_segment: OpenSegment) -> None:
        self._messages = messages
        self._open_segment = open_segment
        self._area: SharedArea | None = None
        self._unavailable: tuple[nn.Parameter, ...] | None = None
        self._started = False
        # Whether others may still copy sums out of this rank's segment.
        self._in_use = False

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's segment."""
        return 0 if self._area is None else self._area.layout.nbytes

    def existing_area(self, parameters: Sequence[nn.Parameter]) -> SharedArea | None:
        """Return the segments that `area` has made for some parameters, if it has."""
        area = self._area
        return area if area is not None and same_parameters(area.parameters, parameters) else None

    def area(self, parameters: Sequence[nn.Parameter]) -> SharedArea | None:
        """Return the segments for some parameters; None if there is no memory for them.

        All replicas call it with the same parameters. The first call for some parameters waits for
        the other replicas.
        """
        area = self.existing_area(parameters)
        if area is not None:
            return area
        if self._unavailable is not None and same_parameters(self._unavailable, parameters):
            return None
        self._await_copies()
        self._area = self._make_area(parameters)
        self._unavailable = tuple(parameters) if self._area is None else None
        return self._area

    def start(self, area: SharedArea) -> None:
        """Copy the gradients, which are complete, into shared memory, and tell the others."""
        if self._started:
            return
        self._await_copies()
        targets, gradients, missing = [], [], []
        for parameter, view in zip(area.parameters, area.local, strict=True):
            # Memory of an earlier step is still there: where no gradient is added, it must be
            # zeroed.
            if parameter.grad is None:
                missing.append(view)
            else:
                targets.append(view)
                gradients.append(dense(parameter, self._messages.stage))
        with torch.no_grad():
            if targets:
                torch._foreach_copy_(targets, gradients)
            if missing:
                torch._foreach_zero_(missing)
        self._messages.send(UpdateMessage.READY, [gradient_flags(area.parameters)])
        self._started = True

    def finish(
        self, area: SharedArea, needed: Callable[[nn.Parameter], bool] | None = None
    ) -> tuple[list[int], list[Tensor | None]]:
        """Wait for the gradients of all replicas, and return their sums.

        Args:
            area: the memory.
            needed: whether this rank needs the sum of a parameter; by default it needs all.

        Returns:
            For each parameter the number of replicas that have a gradient, and the sum: in the
            memory of the gradient if this rank has one, None if it is not needed.
        """
        counts = self._sum(area)
        # No replica copies a sum before all have summed their pieces.
        self._messages.exchange(UpdateMessage.SUMMED, self._empty_rows())
        sums = self._copy_out(area, needed)
        self._release()
        return counts, sums

    def _sum(self, area: SharedArea) -> list[int]:
        """Sum this rank's piece of the gradients, which stays in shared memory.

        Returns:
            For each parameter the number of replicas that have a gradient.
        """
        self.start(area)
        flags = gradient_flags(area.parameters).to(torch.int64)
        for (row,) in self._messages.receive(UpdateMessage.READY).values():
            flags = flags + row
        self._started = False
        with torch.no_grad():
            area.sum_piece()
        return [int(count) for count in flags.tolist()]

    def _release(self) -> None:
        """Tell the others that this rank reads nothing more from their segments."""
        self._messages.send(UpdateMessage.COPIED, [torch.empty(0)])
        self._in_use = True

    def forget(self) -> None:
        """Drop the state of an unfinished sum."""
        self._started = False

    def _copy_out(
        self, area: SharedArea, needed: Callable[[nn.Parameter], bool] | None
    ) -> list[Tensor | None]:
        """Copy the sums that are needed to the gradients of this rank; return them."""
        sums: list[Tensor | None] = []
        targets, sources = [], []
        for parameter, copy in zip(area.parameters, area.copies, strict=True):
            if needed is not None and not needed(parameter):
                sums.append(None)
                continue
            for target, source in copy.parts:
                target.copy_(source)
            grad = parameter.grad
            total = torch.empty_like(parameter) if grad is None else grad
            targets.append(total)
            sources.append(copy.source)
            sums.append(total)
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
        return sums

    def _await_copies(self) -> None:
        """Wait until no other rank reads from this rank's segment any more."""
        if self._in_use:
            self._messages.receive(UpdateMessage.COPIED)
            self._in_use = False

    def _empty_rows(self) -> list[list[Tensor]]:
        return [[torch.empty(0)] for _ in self._messages.ranks]

    def _make_area(self, parameters: Sequence[nn.Parameter]) -> SharedArea | None:
        """Make this rank's segment and open those of the others."""
        layout = GradientLayout(parameters)
        segment: Segment | None = None
        try:
            segment = Segment.make(LINE + layout.nbytes)
        except OSError as error:
            _LOG.info(
                "stage %d: gradients of replicas are summed in messages: no shared memory for "
                "%d bytes (%s)",
                self._messages.stage,
                layout.nbytes,
                error,
            )
        # Sent without memory too: if one replica has none, all fall back to messages together.
        descriptor = torch.tensor([-1 if segment is None else segment.fd])
        rows = self._messages.exchange(
            UpdateMessage.SEGMENT, [[descriptor]] * len(self._messages.ranks)
        )
        descriptors = [int(row[0]) for row in rows]
        segments: list[Segment] = []
        if segment is not None and min(descriptors) >= 0:
            for rank, number in zip(self._messages.ranks, descriptors, strict=True):
                local = rank == self._messages.rank
                segments.append(segment if local else self._open(rank, number))
        # A segment can be opened as long as its maker has not closed the file.
        self._messages.exchange(UpdateMessage.SUMMED, self._empty_rows())
        if segment is not None:
            segment.close()
        if not segments:
            return None
        return SharedArea(parameters, layout, segments, self._messages.position)

    def _open(self, rank: int, number: int) -> Segment:
        """Open the segment of another rank.

        Raises:
            RunError: that fails.
        """
        try:
            return self._open_segment(rank, number)
        except OSError as error:
            raise RunError(
                f"rank {self._messages.rank} cannot open the shared memory of rank {rank} for the "
                f"gradients of stage {self._messages.stage}: {error}"
            ) from error


def dense(parameter: nn.Parameter, stage: int) -> Tensor:
    """Return the gradient of a parameter, which is not sparse.

    Raises:
        SettingError: it is.
    """
    grad = parameter.grad
    assert grad is not None
    if grad.layout is not torch.strided:
        raise SettingError(
            f"a gradient of stage {stage}, of shape {tuple(grad.shape)}, is {grad.layout}, and "
            "copies of the stage can add up sparse gradients of nn.Embedding(sparse=True) and "
            "nn.EmbeddingBag(sparse=True) only. Make it dense, or use a schedule with one copy of "
            "each stage, such as schedule='1f1b'"
        )
    return grad


def same_parameters(first: Sequence[nn.Parameter], second: Sequence[nn.Parameter]) -> bool:
    """Whether two sequences hold the same parameters."""
    return len(first) == len(second) and all(map(lambda a, b: a is b, first, second))
