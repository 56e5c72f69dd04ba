"""Lower bounds in seconds per step of one schedule, for many cuts at once.

The bound of `schedule_bound.schedule_bound_s` is a maximum of sums of stage seconds, so for a given
schedule it is linear in them: one matrix per schedule, one row of seconds per cut, and a product.
In contrast to that bound, updates, gradient syncs and the transfers along the ramps count too:

    forward of the stages before  |  its ops up to its  |  backward of the stages before
    that of its first op          |  last backward      |  that of its last backward, then U

A host's network card gives a sum of the same form, for each direction:

    forward up to the first stage  |  the bytes of all its  |  backward from that stage
    whose values it carries        |  messages              |

A cut whose bound exceeds the best time cannot win, whatever must be recomputed. Where micro-batches
have two sizes, all entries exist for both.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from typing import TypeVar

import numpy as np

from penstock.profile.device_profiles import scale_profile
from penstock.profile.profile import PHASES, Profile
from penstock.schedule.arrays import Array
from penstock.schedule.op import BACKWARD_STARTS, Kind, Op, Schedule
from penstock.schedule.streaming.period import period_of
from penstock.search.request import PlanRequest
from penstock.search.shapes import Shape
from penstock.simulate.gradient_sync import least_sum_seconds
from penstock.simulate.stage_seconds import micro_batch_sizes, prefix_seconds

Cached = TypeVar("Cached")

#: Columns of the matrix, in blocks of one entry per stage. "least backward" is the smaller of a
#: backward and an input gradient, "transfer" that of the boundary after the stage, and "card" the
#: seconds for which such a message occupies a network card.
COLUMNS = ("F", "B", "I", "W", "U", "least backward", "transfer", "card")
FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD, UPDATE, LEAST_BACKWARD, TRANSFER, CARD = range(8)

#: Bounds are reduced by this share, since sums of the same seconds in another order differ by their
#: rounding.
ROUNDING = 1e-9


def all_cuts(layers: int, stages: int) -> Array:
    """Return all cuts of `layers` layers into `stages` stages, one row of stage ends per cut, shape
    (cuts, stages + 1), the first column being 0.

    >>> all_cuts(3, 2).tolist()
    [[0, 1, 3], [0, 2, 3]]
    """
    inner = list(combinations(range(1, layers), stages - 1))
    ends = np.zeros((len(inner), stages + 1), np.int64)
    ends[:, 1:-1] = np.array(inner, np.int64).reshape(len(inner), stages - 1)
    ends[:, -1] = layers
    return ends


def stage_sums(ends: Array, layer_values: Sequence[float] | Array) -> Array:
    """Return the sums of a value of layers over the stages of every cut, shape (cuts, stages).

    Args:
        ends: cuts, or some neighbouring columns of them, as `all_cuts` returns them.
        layer_values: of every layer.
    """
    prefix = np.concatenate([[0], np.cumsum(layer_values)])
    sums: Array = prefix[ends[:, 1:]] - prefix[ends[:, :-1]]
    return sums


def lengths_of(ends: Array) -> tuple[int, ...]:
    """Return the lengths of the stages of one row of `all_cuts`."""
    return tuple(np.diff(ends).tolist())


@dataclass(frozen=True, eq=False)
class CutBounds:
    """Bounds of one schedule on one shape of the cluster.

    Attributes:
        request: the request; its cluster is the whole one.
        shape: the pipelines and their devices.
        schedule: the schedule of one pipeline.
        micro_batches: number of micro-batches, of all pipelines together.
    """

    request: PlanRequest
    shape: Shape
    schedule: Schedule
    micro_batches: int

    @cached_property
    def _size_of(self) -> list[float]:
        """Samples of every micro-batch of the first pipeline."""
        sizes = micro_batch_sizes(self.request.batch, self.schedule, self.micro_batches)
        return sizes[:: self.shape.pipelines]

    @cached_property
    def _sizes(self) -> list[float]:
        """The different sizes of micro-batches, the largest first."""
        return list(dict.fromkeys(self._size_of))

    def seconds(self, ends: Array) -> Array:
        """Return the bound of every cut, shape (cuts); cuts as `all_cuts` returns them."""
        blocks = [self._values(ends, samples) for samples in self._sizes]
        flat = np.stack(blocks, axis=1).reshape(len(ends), -1)
        bounds: Array = (flat @ self.matrix.T).max(axis=1, initial=0.0) * (1 - ROUNDING)
        return bounds

    def _values(self, ends: Array, samples: float) -> Array:
        """Return the entries of every cut for micro-batches of one size, shape (cuts, columns,
        stages).
        """
        values = np.zeros((len(ends), len(COLUMNS), self.schedule.stages))
        values[:, : len(PHASES)] = self._phase_seconds(ends, samples)
        # The first stage's I does nothing, and its W all that a B does (see `stage_seconds`).
        values[:, INPUT_GRAD, 0] = 0.0
        values[:, WEIGHT_GRAD, 0] = values[:, BACKWARD, 0]
        values[:, UPDATE] = self._update_seconds(ends)
        values[:, LEAST_BACKWARD] = np.minimum(values[:, BACKWARD], values[:, INPUT_GRAD])
        values[:, TRANSFER, :-1] = self._transfer_seconds(ends, samples)
        values[:, CARD, :-1] = self._card_seconds(ends, samples)
        return values

    @cached_property
    def matrix(self) -> Array:
        """How often each entry counts in each sum, shape (sums, sizes x columns x stages)."""
        schedule = self.schedule
        rows = []
        if schedule.stream is not None:
            period = period_of(schedule)
            for loop in period.loops:
                rows.append(self._row(loop) / period.batches)
            return np.array(rows)
        rows += _cached(
            schedule, f"_bound_rows_{self._size_of if len(self._sizes) > 1 else ''}", self._all_rows
        )
        if self._has_cards:
            rows += self._card_rows()
        return np.array(rows).reshape(len(rows), self._zeros().size)

    def _all_rows(self) -> list[Array]:
        """Return the sums that all ranks of a synchronous schedule give."""
        rows = []
        for program in self.schedule.programs:
            rows += self._rank_rows(program)
        return rows

    def _zeros(self) -> Array:
        """Return a sum of nothing, shape (sizes, columns, stages)."""
        return np.zeros((len(self._sizes), len(COLUMNS), self.schedule.stages))

    def _size_index(self, number: int) -> int:
        """Return the index of the size of a micro-batch, or of that whose slice it is."""
        if len(self._sizes) == 1:
            return 0
        slicing = self.schedule.slicing
        micro_batch = number if slicing is None else slicing.micro_batch_of[number]
        return self._sizes.index(self._size_of[micro_batch])

    @cached_property
    def _kinds_of_stage(self) -> list[list[int]]:
        """Per stage, one of the cluster's devices of each kind and slowdown that holds it."""
        kinds = []
        for ranks in self.schedule.ranks_of_stage:
            device_of: dict[int, int] = {}
            for rank in ranks:
                device = self._device(rank)
                device_of.setdefault(id(self._profile(device)), device)
            kinds.append(list(device_of.values()))
        return kinds

    def _device(self, rank: int) -> int:
        """Return the cluster's device of a rank of the schedule."""
        devices = self.shape.devices
        return devices[rank] if rank < len(devices) else rank

    def _profile(self, device: int) -> Profile:
        """Return the profile of a device while all pipelines are busy."""
        profile, cluster = self.request.profile_of(device), self.request.cluster
        return scale_profile(profile, cluster.slowdown(device, self._busy))

    @cached_property
    def _busy(self) -> frozenset[int]:
        """The devices that are busy at the same time."""
        count = self.shape.pipelines * self.schedule.ranks
        return frozenset(self.shape.devices[:count] or range(count))

    def _phase_seconds(self, ends: Array, samples: float) -> Array:
        """Return the seconds of the phases of every stage, on the fastest of its devices, shape
        (cuts, phases, stages).
        """
        seconds = np.zeros((len(ends), len(PHASES), self.schedule.stages))
        for stage, devices in enumerate(self._kinds_of_stage):
            first, end = ends[:, stage], ends[:, stage + 1]
            options = []
            for device in devices:
                sums = prefix_seconds(self._profile(device), samples)
                options.append(sums[:, end] - sums[:, first])
            seconds[:, :, stage] = (np.min(options, axis=0) if len(options) > 1 else options[0]).T
        return seconds

    def _update_seconds(self, ends: Array) -> Array:
        """Return the seconds of the update of every stage, with the sync of its gradients."""
        layer_bytes = [layer.parameter_bytes for layer in self.request.profile]
        stage_bytes = stage_sums(ends, layer_bytes)
        seconds = np.zeros(stage_bytes.shape)
        for stage, devices in enumerate(self._kinds_of_stage):
            profiles = [self._profile(device) for device in devices]
            fixed = min(profile.update_fixed_s for profile in profiles)
            per_byte = min(profile.update_s_per_byte for profile in profiles)
            # Many cuts give a stage the same layers: the sum is computed once for each size.
            sizes, place = np.unique(stage_bytes[:, stage], return_inverse=True)
            replicas = self._replicas(stage)
            of_size = []
            for size in sizes.tolist():
                update_s = fixed + size * per_byte if size else 0.0
                of_size.append(update_s + least_sum_seconds(replicas, size, self.request.cluster))
            seconds[:, stage] = np.array(of_size)[place]
        return seconds

    def _replicas(self, stage: int) -> list[int]:
        """Return the devices that sync the gradients of a stage; none where that is not simple."""
        ranks = self.schedule.ranks_of_stage[stage]
        stream = self.schedule.stream
        if stream is not None and stream.waves is not None:
            return []
        if self.shape.pipelines == 1:
            return [self._device(rank) for rank in ranks]
        if len(ranks) > 1:
            return []
        # Pipelines follow each other, also where a stream has fewer ranks than its shape.
        needed = self.shape.pipelines * self.schedule.ranks
        return [*self.shape.devices[ranks[0] : needed : self.schedule.ranks]]

    def _transfer_seconds(self, ends: Array, samples: float) -> Array:
        """Return the seconds of a message over every boundary, shape (cuts, stages - 1); 0 where
        micro-batches are sliced, or some of them do not cross ranks.
        """
        schedule, cluster = self.schedule, self.request.cluster
        seconds = np.zeros((len(ends), schedule.stages - 1))
        if schedule.slicing is not None:
            return seconds
        for stage, pairs in enumerate(self._pairs):
            if any(source == target for source, target in pairs):
                continue
            links = {cluster.link(self._device(low), self._device(high)) for low, high in pairs}
            message_bytes = samples * self._output_bytes[ends[:, stage + 1] - 1]
            # Micro-batches may take several links: the fastest, since this is part of a lower bound.
            times = [link.latency_s + message_bytes / link.bandwidth_bytes_per_s for link in links]
            seconds[:, stage] = np.min(times, axis=0)
        return seconds

    @cached_property
    def _output_bytes(self) -> Array:
        """Bytes of every layer's output for one sample."""
        return np.array([layer.output_bytes_per_sample for layer in self.request.profile], float)

    @cached_property
    def _pairs(self) -> list[set[tuple[int, int]]]:
        """Per boundary, the ranks of the two stages, of all micro-batches."""

        def make() -> list[set[tuple[int, int]]]:
            """Compute the pairs of ranks of every boundary between stages."""
            boundaries = range(self.schedule.stages - 1)
            return [set(self.schedule.boundary_ranks(stage)) for stage in boundaries]

        return _cached(self.schedule, "_boundary_pairs", make)

    @property
    def _has_cards(self) -> bool:
        """Whether messages between hosts wait for each other at the hosts' network cards."""
        schedule, cluster = self.schedule, self.request.cluster
        if schedule.slicing is not None or cluster.between.shared:
            return False
        devices = [cluster.devices[self._device(rank)] for rank in range(schedule.ranks)]
        return cluster.nodes > 1 and all(device.kind == "cpu" for device in devices)

    def _card_seconds(self, ends: Array, samples: float) -> Array:
        """Return the seconds for which a message over every boundary occupies the cards of two
        hosts, shape (cuts, stages - 1).
        """
        seconds: Array = samples * self._output_bytes[ends[:, 1:-1] - 1]
        return seconds / self.request.cluster.between.bandwidth_bytes_per_s

    def _card_rows(self) -> list[Array]:
        """Return one sum for every host's network card and direction: fill, its messages, drain.

        The card is busy with its messages one after another. Before the first of them, a
        micro-batch passes forward through all stages up to the first boundary whose messages the
        card carries; after the last one, a gradient passes back through these stages.
        """
        rows = []
        for messages in self._messages_of_card():
            first_boundary = min(stage for _, stage in messages)
            row = self._zeros()
            # The micro-batches of the first and the last message may have any size: the smallest
            # counts, which is the last.
            smallest = row[-1]
            smallest[FORWARD, : first_boundary + 1] = 1
            smallest[LEAST_BACKWARD, : first_boundary + 1] = 1
            smallest[TRANSFER, :first_boundary] = 2  # an activation and a gradient
            for (size, stage), count in messages.items():
                row[size, CARD, stage] = count
            rows.append(row.ravel())
        return rows

    def _messages_of_card(self) -> list[Counter[tuple[int, int]]]:
        """Return the number of messages between hosts by size index and boundary, for every host's
        network card and direction that has some.
        """
        schedule, cluster = self.schedule, self.request.cluster
        host_of = [cluster.node(self._device(rank)) for rank in range(schedule.ranks)]
        messages: dict[tuple[int, str], Counter[tuple[int, int]]] = defaultdict(Counter)
        for stage in range(schedule.stages - 1):
            for number, (rank, next_rank) in enumerate(schedule.boundary_ranks(stage)):
                host, next_host = host_of[rank], host_of[next_rank]
                if host == next_host:
                    continue
                # The activation goes from `host` to `next_host`, and the gradient back: the cards
                # of both hosts send one message and receive one.
                for card in product((host, next_host), ("sends", "receives")):
                    messages[card][self._size_index(number), stage] += 1
        return list(messages.values())

    def _rank_rows(self, program: Sequence[Op]) -> list[Array]:
        """Return the sums that one rank of a synchronous schedule gives: with its drain, and
        without.
        """
        work = [op for op in program if op.kind.value in COLUMNS]
        backward_places = [place for place, op in enumerate(work) if op.kind in BACKWARD_STARTS]
        if not backward_places:
            return []
        first, last_place = work[0], backward_places[-1]
        last = work[last_place]
        fill, drain = self._zeros(), self._zeros()
        size = self._size_index(first.micro_batch)
        fill[size, FORWARD, : first.stage] = _share(self.schedule, first)
        fill[size, TRANSFER, : first.stage] = 1
        size = self._size_index(last.micro_batch)
        drain[size, LEAST_BACKWARD, : last.stage] = _share(self.schedule, last)
        drain[size, TRANSFER, : last.stage] = 1
        # The last backward of this rank goes on to stage 0, which updates after it.
        if last.stage > 0:
            drain[0, UPDATE, 0] = 1
        whole = self._row(work) + fill.ravel()
        return [whole, self._row(work[: last_place + 1]) + (fill + drain).ravel()]

    def _row(self, ops: Sequence[Op]) -> Array:
        """Return how often each entry counts in the sum of these ops."""
        counts: dict[tuple[int, int, int], float] = defaultdict(float)
        for op in ops:
            if op.kind.value in COLUMNS:
                size = 0 if op.kind is Kind.U else self._size_index(op.micro_batch)
                place = size, COLUMNS.index(op.kind.value), op.stage
                counts[place] += _share(self.schedule, op)
        row = self._zeros()
        for place, count in counts.items():
            row[place] = count
        return row.ravel()


def _cached(schedule: Schedule, name: str, make: Callable[[], Cached]) -> Cached:
    """Return what `make` returns, computed once and cached on the schedule under this name."""
    cache = schedule.__dict__
    if name not in cache:
        cache[name] = make()
    value: Cached = cache[name]
    return value


def _share(schedule: Schedule, op: Op) -> float:
    """Return the share of its micro-batch that an op works on; 1 for updates."""
    return 1.0 if op.kind is Kind.U else schedule.shares[op.micro_batch]
