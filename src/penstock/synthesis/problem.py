"""The synthesis problem: stages with costs on ranks with limits, along one or two routes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.arrays import Array
from penstock.schedule.placement import linear, ring, vee
from penstock.simulate.cost_arrays import Amounts
from penstock.simulate.costs import PER_BOUNDARY, Costs
from penstock.synthesis.arrays import Spec
from penstock.units import parse_bytes

PLACEMENTS = ("linear", "interleaved", "v", "bidirectional")

#: Fields of `Costs` that are read beside those per boundary.
_BY_STAGE = ("forward", "backward", "input_grad", "weight_grad", "update", "activation_bytes")

Limit = float | str | Sequence[float | str] | None


@dataclass(frozen=True)
class StageCosts:
    """Seconds and memory per stage, with all defaults filled in as `simulate` does it.

    Attributes:
        forward, input_grad, weight_grad, backward, update: seconds of F, I, W, B, U.
        up, down: seconds of a message from stage s to s + 1, and from s + 1 to s.
        memory: what a micro-batch holds on the stage: its `activation_bytes`, or 1 if the costs
            have none.
        in_bytes: whether `memory` is in bytes.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]
    up: tuple[float, ...]
    down: tuple[float, ...]
    memory: tuple[float, ...]
    in_bytes: bool

    @classmethod
    def of(cls, costs: Costs, stages: int) -> StageCosts:
        """Return the costs of `stages` stages.

        Raises:
            SettingError: they are for another number, have no forward, or differ by micro-batch.
        """
        # `spread` refuses costs that differ by micro-batch.
        for name in _BY_STAGE:
            costs.spread(name, stages)
        for name in PER_BOUNDARY:
            costs.spread(name, stages - 1)
        amounts = Amounts.of([costs], stages, range(1))
        forward, backward, input_grad, weight_grad = amounts.work()
        latency = amounts.get_or("latency")
        up, down = amounts.crossing()
        activation_bytes = costs.spread("activation_bytes", stages)
        return cls(
            forward=_row(forward, stages),
            input_grad=_row(input_grad, stages),
            weight_grad=_row(weight_grad, stages),
            backward=_row(backward, stages),
            update=_row(amounts.get_or("update"), stages),
            up=_row(up + latency, stages - 1),
            down=_row(down + latency, stages - 1),
            memory=activation_bytes or (1.0,) * stages,
            in_bytes=activation_bytes is not None,
        )

    @property
    def until_gradient(self) -> tuple[float, ...]:
        """Per stage, least seconds from the start of its backward until its gradient leaves."""
        return tuple(map(min, self.input_grad, self.backward))

    @property
    def least_backward(self) -> tuple[float, ...]:
        """Per stage, least seconds of a whole or split backward."""
        return tuple(min(split, whole) for split, whole in self._split_and_whole())

    def _split_and_whole(self) -> Iterator[tuple[float, float]]:
        """Yield per stage the seconds of a split and of a whole backward."""
        for i, w, b in zip(self.input_grad, self.weight_grad, self.backward, strict=True):
            yield i + w, b

    @property
    def seconds(self) -> tuple[tuple[float, ...], ...]:
        """All rows of seconds: F, I, W, B, U, up, down."""
        return (
            self.forward,
            self.input_grad,
            self.weight_grad,
            self.backward,
            self.update,
            self.up,
            self.down,
        )

    def costs(self) -> Costs:
        """Return the same as `Costs`."""
        return Costs(
            forward=self.forward,
            backward=self.backward,
            input_grad=self.input_grad,
            weight_grad=self.weight_grad,
            update=self.update,
            transfer=self.up,
            transfer_back=self.down,
        )

    def with_pairs(self, seconds: tuple[float, ...]) -> StageCosts:
        """Return lower bounds of the costs if an F and a B together take `seconds`, by the stage of
        the F.
        """
        # The B of a pair may be of any stage, and no F and B may together exceed the seconds of
        # their pair. So an F takes what the longest B leaves of its pair, but at least 0; and a B
        # takes no longer than the shortest pair, which it may have to itself.
        least, most = min(seconds), max(self.backward)
        forward = tuple(
            max(0.0, min(f, pair - most)) for f, pair in zip(self.forward, seconds, strict=True)
        )
        return replace(
            self,
            forward=forward,
            input_grad=tuple(min(i, least) for i in self.input_grad),
            backward=tuple(min(b, least) for b in self.backward),
        )

    def unsplit(self) -> StageCosts:
        """Return the same for programs without I and W."""
        return replace(self, input_grad=self.backward, weight_grad=(0.0,) * len(self.backward))


def _row(array: Array, count: int) -> tuple[float, ...]:
    """Return one number per stage or boundary."""
    return tuple(np.broadcast_to(array[0, :, 0], count).tolist())


@dataclass(frozen=True)
class Problem:
    """Costs, a placement, micro-batches and limits.

    Attributes:
        placement: "linear", "interleaved", "v" or "bidirectional".
        costs: the costs of the stages.
        micro_batches: number of micro-batches.
        routes: per route the rank of every stage.
        limits: per rank, its memory; infinite without a limit.
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
    def copies_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """Per rank the copies that it holds, ascending: copy = route x stages + stage."""
        copies: list[list[int]] = [[] for _ in range(self.ranks)]
        for route, stage_ranks in enumerate(self.routes):
            for stage, rank in enumerate(stage_ranks):
                copies[rank].append(route * self.stages + stage)
        return tuple(map(tuple, copies))

    def spec(self, counts: Sequence[int]) -> Spec:
        """Return the problem as arrays, with `counts` micro-batches on each route."""
        c, stages = self.costs, self.stages
        width = max(map(len, self.copies_of_rank))
        costs, receivers = [], []
        for route, stage_ranks in enumerate(self.routes):
            for s, rank in enumerate(stage_ranks):
                copy, has_next, has_previous = route * stages + s, s + 1 < stages, s > 0
                receivers.append(
                    (rank, copy + 1 if has_next else -1, copy - 1 if has_previous else -1)
                )
                costs.append(
                    (
                        c.forward[s],
                        c.input_grad[s],
                        c.weight_grad[s],
                        c.backward[s],
                        c.update[s],
                        c.up[s] if has_next else 0.0,
                        c.down[s - 1] if has_previous else 0.0,
                        c.memory[s],
                    )
                )
        padded = [[*copies, *[-1] * (width - len(copies))] for copies in self.copies_of_rank]
        return Spec(
            np.array(counts, np.int64),
            np.array(padded, np.int64),
            np.array(receivers, np.int64),
            np.array(costs, np.float64),
            # Sums of bytes that are no whole numbers drift by the rounding of floats.
            np.array(self.limits, np.float64) * (1 + 1e-12),
        )


def routes_of(placement: str, stages: int, ranks: int | None) -> tuple[tuple[int, ...], ...]:
    """Return per route the rank of every stage.

    Raises:
        ScheduleError: the placement does not allow these numbers of stages and ranks.
    """
    if placement not in PLACEMENTS:
        raise ScheduleError(
            f"synthesised knows no placement {placement!r}: take one of {', '.join(PLACEMENTS)}, "
            "any"
        )
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise ScheduleError(f"synthesised needs at least 1 of ranks and got {ranks!r}")
    if placement == "interleaved":
        return (_interleaved_route(stages, ranks),)
    if placement == "v" and stages % 2:
        raise ScheduleError(
            "placement 'v' has two stages on every rank, so it takes an even number of stages, "
            f"not {stages}"
        )
    if placement == "bidirectional" and stages < 2:
        raise ScheduleError(
            "placement 'bidirectional' needs 2 stages or more, for its two copies to stand on "
            "different ranks"
        )
    needed = stages // 2 if placement == "v" else stages
    if ranks not in (None, needed):
        raise ScheduleError(
            f"placement {placement!r} of {stages} stages has {needed} ranks, not {ranks}: leave "
            "ranks out, or take another placement"
        )
    if placement == "v":
        return (vee(stages, needed),)
    route = linear(stages)
    return (route, route[::-1]) if placement == "bidirectional" else (route,)


def _interleaved_route(stages: int, ranks: int | None) -> tuple[int, ...]:
    """Return the rank of every stage if stages are assigned to ranks in turn; by default to half as
    many ranks as stages.

    Raises:
        ScheduleError: the ranks do not divide the stages, or have only one each.
    """
    ring_size = ranks or stages // 2
    if not ring_size or stages % ring_size or stages == ring_size:
        raise ScheduleError(
            f"placement 'interleaved' deals {stages} stages out evenly, two or more to a rank, "
            f"which {ring_size or 'no'} ranks cannot hold: give ranks=, a divisor of {stages} "
            "below it"
        )
    return ring(stages, ring_size)


def limits_of(memory_limit: Limit, ranks: int, costs: StageCosts) -> tuple[float, ...]:
    """Return one limit for every rank.

    Raises:
        ScheduleError: there are more or fewer limits than ranks, or one is not above 0.
        SettingError: a text is no amount of bytes.
    """
    if memory_limit is None:
        return (math.inf,) * ranks
    if isinstance(memory_limit, Sequence) and not isinstance(memory_limit, str):
        limits = tuple(memory_limit)
    else:
        limits = (memory_limit,) * ranks
    if len(limits) != ranks:
        raise ScheduleError(
            f"memory_limit has {len(limits)} entries, but there are {ranks} ranks: give one "
            "number, or one per rank"
        )
    return tuple(_limit_number(limit, costs) for limit in limits)


def _limit_number(limit: float | str, costs: StageCosts) -> float:
    """Return a limit as a number, in the unit of the costs' memory.

    Raises:
        ScheduleError: it is a text although the costs have no bytes, or is not above 0.
        SettingError: it is a text that is no amount of bytes.
    """
    if isinstance(limit, str) and not costs.in_bytes:
        raise ScheduleError(
            f"memory_limit {limit!r} is in bytes, but the costs carry no activation_bytes: add "
            "them, or give the number of micro-batches that a rank may hold"
        )
    number = parse_bytes(limit) if isinstance(limit, str) else limit
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number > 0:
        raise ScheduleError(f"memory_limit is above 0, not {limit!r}")
    return float(number)


def check_fits(problem: Problem) -> None:
    """Check that every rank can hold what one micro-batch alone needs: then a program exists that
    runs one micro-batch at a time.

    Raises:
        ScheduleError: a rank cannot; the message has the one that exceeds its limit most.
    """
    exceeded = []
    for rank, copies in enumerate(problem.copies_of_rank):
        sizes = [problem.costs.memory[copy % problem.stages] for copy in copies]
        # On one route a micro-batch is on all stages of the rank at once; of two it takes only one.
        need = sum(sizes) if len(problem.routes) == 1 else max(sizes)
        # A limit of exactly what is needed must not fail by rounding.
        if need > problem.limits[rank] * (1 + 1e-12):
            exceeded.append((need - problem.limits[rank], rank, need))
    if exceeded:
        _, rank, need = max(exceeded)
        unit = "bytes" if problem.costs.in_bytes else "micro-batches over all its stages"
        stages = sorted({copy % problem.stages for copy in problem.copies_of_rank[rank]})
        raise ScheduleError(
            f"no program fits memory_limit with placement {problem.placement!r}: rank {rank} "
            f"(stages {', '.join(map(str, stages))}) needs {need:g} {unit} for one micro-batch "
            f"alone and has {problem.limits[rank]:g}; raise its limit to {need:g}"
        )


@dataclass(frozen=True)
class Constraints:
    """Constraints on programs: placement, memory of the ranks, number of ranks, and whether
    backwards may be split.
    """

    placement: str
    memory_limit: Limit = None
    ranks: int | None = None
    split: bool = True


def problem_for(costs: StageCosts, micro_batches: int, constraints: Constraints) -> Problem:
    """Return the problem of one placement.

    Raises:
        ScheduleError: the placement is impossible, or one micro-batch does not fit.
    """
    placement = constraints.placement
    routes = routes_of(placement, len(costs.forward), constraints.ranks)
    if len(routes) > micro_batches:
        raise ScheduleError(
            f"placement {placement!r} sends micro-batches both ways: it takes 2 or more, not "
            f"{micro_batches}"
        )
    limits = limits_of(constraints.memory_limit, 1 + max(map(max, routes)), costs)
    problem = Problem(
        placement,
        costs if constraints.split else costs.unsplit(),
        micro_batches,
        routes,
        limits,
        constraints.split,
    )
    check_fits(problem)
    return problem
