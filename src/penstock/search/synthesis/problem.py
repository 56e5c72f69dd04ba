"""What is asked: stages with their costs, on ranks with their limits, along one or two routes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.arrays import Array
from penstock.schedule.placement import linear, ring, vee
from penstock.search.synthesis.arrays import Spec
from penstock.simulate.amounts import Amounts
from penstock.simulate.costs import Costs
from penstock.units import parse_bytes

PLACEMENTS = ("linear", "interleaved", "v", "bidirectional")

#: Fields that are read here, per stage and per boundary.
_BY_STAGE = ("forward", "backward", "input_grad", "weight_grad", "update", "activation_bytes")
_BY_BOUNDARY = ("transfer", "transfer_back", "latency", "bandwidth", "boundary_bytes")

Limit = float | str | Sequence[float | str] | None


@dataclass(frozen=True)
class StageCosts:
    """Seconds and holdings per stage, every default filled in as `simulate` does it.

    Attributes:
        forward, inputs, weights, whole, update: seconds of F, I, W, B, U.
        up, down: seconds of a message from stage s to s + 1, and from s + 1 to s.
        hold: what a micro-batch holds on the stage: its `activation_bytes`, or 1 where costs carry
        no bytes. in_bytes: whether that is bytes.
    """

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    whole: tuple[float, ...]
    update: tuple[float, ...]
    up: tuple[float, ...]
    down: tuple[float, ...]
    hold: tuple[float, ...]
    in_bytes: bool

    @classmethod
    def of(cls, costs: Costs, stages: int) -> StageCosts:
        """The costs of so many stages.

        Raises:
            SettingError: they are for another number, or have no forward.
        """
        for name in _BY_STAGE:  # refuses what differs by micro-batch
            costs.spread(name, stages)
        for name in _BY_BOUNDARY:
            costs.spread(name, stages - 1)
        amounts = Amounts.of([costs], stages, range(1))
        forward, whole, inputs, weights = (_row(each, stages) for each in amounts.work())
        latency = amounts.get_or("latency")
        up, down = (_row(each + latency, stages - 1) for each in amounts.crossing())
        held = costs.spread("activation_bytes", stages)
        update = _row(amounts.get_or("update"), stages)
        return cls(
            forward,
            inputs,
            weights,
            whole,
            update,
            up,
            down,
            held or (1.0,) * stages,
            held is not None,
        )

    @property
    def turn(self) -> tuple[float, ...]:
        """Least seconds from the start of a stage's backward until its gradient leaves."""
        return tuple(map(min, self.inputs, self.whole))

    @property
    def back(self) -> tuple[float, ...]:
        """Least seconds of a stage's backward altogether."""
        return tuple(
            min(i + w, b) for i, w, b in zip(self.inputs, self.weights, self.whole, strict=True)
        )

    @property
    def seconds(self) -> tuple[tuple[float, ...], ...]:
        """Every row of seconds: F, I, W, B, U, up, down."""
        return self.forward, self.inputs, self.weights, self.whole, self.update, self.up, self.down

    def costs(self) -> Costs:
        """The same as `Costs`."""
        return Costs(
            forward=self.forward,
            backward=self.whole,
            input_grad=self.inputs,
            weight_grad=self.weights,
            update=self.update,
            transfer=self.up,
            transfer_back=self.down,
        )

    @property
    def may_join(self) -> bool:
        """Whether a whole backward is anywhere cheaper than its halves."""
        return any(
            b < (i + w) * (1 - 1e-12)
            for i, w, b in zip(self.inputs, self.weights, self.whole, strict=True)
        )

    def with_pairs(self, seconds: tuple[float, ...]) -> StageCosts:
        """The least that ops can be said to take where an F and a B together take so many seconds,
        by the stage of the F.
        """
        least, most = min(seconds), max(self.whole)
        forward = tuple(
            max(0.0, min(f, pair - most)) for f, pair in zip(self.forward, seconds, strict=True)
        )
        return replace(
            self,
            forward=forward,
            inputs=tuple(min(i, least) for i in self.inputs),
            whole=tuple(min(b, least) for b in self.whole),
        )

    def unsplit(self) -> StageCosts:
        """The same for programs without I and W."""
        return replace(self, inputs=self.whole, weights=(0.0,) * len(self.whole))


def _row(array: Array, count: int) -> tuple[float, ...]:
    """One number per stage or boundary."""
    return tuple(np.broadcast_to(array[0, :, 0], count).tolist())


@dataclass(frozen=True)
class Problem:
    """A search: costs, a placement, micro-batches, limits.

    Attributes:
        placement: "linear", "interleaved", "v" or "bidirectional".
        routes: per route the rank of every stage.
        limits: per rank, the most that may be held; infinite where there is none.
        split: whether backwards may be split.
    """

    placement: str
    costs: StageCosts
    micro_batches: int
    routes: tuple[tuple[int, ...], ...]
    limits: tuple[float, ...]
    split: bool = True

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.routes[0])

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.limits)

    @cached_property
    def held_on(self) -> tuple[tuple[int, ...], ...]:
        """Per rank the copies that it holds, ascending: copy = route x stages + stage."""
        return tuple(
            tuple(
                route * self.stages + stage
                for route, homes in enumerate(self.routes)
                for stage, home in enumerate(homes)
                if home == rank
            )
            for rank in range(self.ranks)
        )

    def spec(self, counts: Sequence[int]) -> Spec:
        """The problem as arrays, with so many micro-batches on each route."""
        c, stages = self.costs, self.stages
        width = max(map(len, self.held_on))
        rows, ways = [], []
        for route, homes in enumerate(self.routes):
            for s, rank in enumerate(homes):
                copy, up, down = route * stages + s, s + 1 < stages, s > 0
                ways.append((rank, copy + 1 if up else -1, copy - 1 if down else -1))
                rows.append(
                    (
                        c.forward[s],
                        c.inputs[s],
                        c.weights[s],
                        c.whole[s],
                        c.update[s],
                        c.up[s] if up else 0.0,
                        c.down[s - 1] if down else 0.0,
                        c.hold[s],
                    )
                )
        return Spec(
            np.array(counts, np.int64),
            np.array(
                [[*copies, *[-1] * (width - len(copies))] for copies in self.held_on], np.int64
            ),
            np.array(ways, np.int64),
            np.array(rows, np.float64),
            # Sums of bytes that are no whole numbers drift by the rounding of floats.
            np.array(self.limits, np.float64) * (1 + 1e-12),
        )


def routes_of(placement: str, stages: int, ranks: int | None) -> tuple[tuple[int, ...], ...]:
    """Per route the rank of every stage.

    Raises:
        ScheduleError: the placement cannot have so many stages on so many ranks.
    """
    if placement not in PLACEMENTS:
        raise ScheduleError(
            f"synthesised knows no placement {placement!r}: take one of {', '.join(PLACEMENTS)}, any"
        )
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise ScheduleError(f"synthesised needs at least 1 of ranks and got {ranks!r}")
    if placement == "interleaved":
        over = ranks or stages // 2
        if not over or stages % over or stages == over:
            raise ScheduleError(
                f"placement 'interleaved' deals {stages} stages out evenly, two or more to a rank, which "
                f"{over or 'no'} ranks cannot hold: give ranks=, a divisor of {stages} below it"
            )
        return (ring(stages, over),)
    if placement == "v" and stages % 2:
        raise ScheduleError(
            f"placement 'v' has two stages on every rank, so it takes an even number of stages, not {stages}"
        )
    if placement == "bidirectional" and stages < 2:
        raise ScheduleError(
            "placement 'bidirectional' needs 2 stages or more, for its two copies to stand on different ranks"
        )
    needed = stages // 2 if placement == "v" else stages
    if ranks not in (None, needed):
        raise ScheduleError(
            f"placement {placement!r} of {stages} stages has {needed} ranks, not {ranks}: leave ranks out, or "
            "take another placement"
        )
    if placement == "v":
        return (vee(stages, needed),)
    return (
        (linear(stages), linear(stages)[::-1])
        if placement == "bidirectional"
        else (linear(stages),)
    )


def limits_of(memory_limit: Limit, ranks: int, costs: StageCosts) -> tuple[float, ...]:
    """One limit for every rank.

    Raises:
        ScheduleError: there are more or fewer, or one is not above 0.
        SettingError: a text is no amount of bytes.
    """
    if memory_limit is None:
        return (math.inf,) * ranks
    each = (
        memory_limit
        if isinstance(memory_limit, Sequence) and not isinstance(memory_limit, str)
        else (memory_limit,) * ranks
    )
    if len(each) != ranks:
        raise ScheduleError(
            f"memory_limit has {len(each)} entries, but there are {ranks} ranks: give one number, or one per rank"
        )
    limits = []
    for given in each:
        if isinstance(given, str) and not costs.in_bytes:
            raise ScheduleError(
                f"memory_limit {given!r} is in bytes, but the costs carry no activation_bytes: add them, or give "
                "the number of micro-batches that a rank may hold"
            )
        number = parse_bytes(given) if isinstance(given, str) else given
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not number > 0:
            raise ScheduleError(f"memory_limit is above 0, not {given!r}")
        limits.append(float(number))
    return tuple(limits)


def check_fits(problem: Problem) -> None:
    """Every rank can hold what one micro-batch alone needs: then some program exists, one
    micro-batch at a time.

    Raises:
        ScheduleError: a rank cannot; the message has the worst.
    """
    short = []
    for rank, copies in enumerate(problem.held_on):
        holds = [problem.costs.hold[copy % problem.stages] for copy in copies]
        need = sum(holds) if len(problem.routes) == 1 else max(holds)
        if need > problem.limits[rank] * (1 + 1e-12):
            short.append((need - problem.limits[rank], rank, need))
    if short:
        _, rank, need = max(short)
        what = "bytes" if problem.costs.in_bytes else "micro-batches over all its stages"
        stages = sorted({copy % problem.stages for copy in problem.held_on[rank]})
        raise ScheduleError(
            f"no program fits memory_limit with placement {problem.placement!r}: rank {rank} (stages {', '.join(map(str, stages))})"
            f" needs {need:g} {what} for one micro-batch alone and has {problem.limits[rank]:g}; raise its limit to {need:g}"
        )


@dataclass(frozen=True)
class Room:
    """Where programs may stand: a placement, what ranks may hold, how many there are, and whether
    backwards may be split.
    """

    placement: str
    memory_limit: Limit = None
    ranks: int | None = None
    split: bool = True


def problem_for(costs: StageCosts, micro_batches: int, room: Room) -> Problem:
    """The problem of one placement.

    Raises:
        ScheduleError: nothing can be placed so, or nothing fits.
    """
    routes = routes_of(room.placement, len(costs.forward), room.ranks)
    if len(routes) > micro_batches:
        raise ScheduleError(
            f"placement {room.placement!r} sends micro-batches both ways: it takes 2 or more, not {micro_batches}"
        )
    limits = limits_of(room.memory_limit, 1 + max(map(max, routes)), costs)
    problem = Problem(
        room.placement,
        costs if room.split else costs.unsplit(),
        micro_batches,
        routes,
        limits,
        room.split,
    )
    check_fits(problem)
    return problem
