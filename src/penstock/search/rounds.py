"""Programs made round by round: a forward goes down the stages, then an input gradient comes up;
weight gradients fill gaps.

The heuristic of Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 3,
with the answers of its authors' scheduler where the text leaves a choice. Every stage plays on its
own clock, so that it is known when the next forward or gradient arrives, and how long the rank
would wait:

    warm-up   | every stage: F0; then as many F as memory holds and as end before the first gradient
              comes; I0
    a round   | stage 0, 1, …, p - 1: W for lack of memory, W in the gap before the F arrives, F
              | stage p - 1, …, 1, 0: W in the gap before the gradient arrives, I
    at last   | the W left over

Three questions have no answer that is best for all costs; a `Style` answers them, and the caller
tries all eight.

Rules: no stage has run fewer forwards than the next one, so whatever an op needs stands before it
in the order in which ops are made here: the programs have no cycle. And whenever a forward is due,
running all W that can run makes room for it, since the warm-up left as many whole micro-batches in
flight as memory holds at most, and every round takes one in and lets one go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, product

from penstock.schedule.op import Kind, Op, Program
from penstock.search.stage_seconds import StageSeconds

#: What sums of fractions of a micro-batch may be off by.
_DUST = 1e-9


@dataclass(frozen=True)
class Style:
    """Answers to three questions.

    Attributes:
        punctual: the warm-up takes no forward that would still run when the first gradient arrives.
        gradient_first: a stage lets a forward be when the next stage has two to go on with and will
        send a gradient before
            this forward is done; unless waiting would make it the stage that has waited longest.
        eager: a W that takes longer than the gap fills it always, not only when waiting would make
        this the stage that has
            waited longest.
    """

    punctual: bool
    gradient_first: bool
    eager: bool


STYLES = tuple(Style(*answers) for answers in product((True, False), repeat=3))


@dataclass(frozen=True)
class Memory:
    """Per stage, what it may hold, in its whole micro-batches and at least 1; and the fraction of
    one that is kept from I to W.
    """

    limits: Sequence[float]
    kept: Sequence[float]


@dataclass(frozen=True)
class Draft:
    """Per stage, the kinds of its ops in order, and the seconds from the start of its first op to
    the end of its last.

    The micro-batches of each kind count up from 0, so that kinds are all there is to say.
    """

    orders: tuple[tuple[Kind, ...], ...]
    spans_s: tuple[float, ...]
    makespan_s: float

    def programs(self) -> tuple[Program, ...]:
        """The ops, updates not included."""
        return tuple(tuple(_numbered(stage, order)) for stage, order in enumerate(self.orders))


def _numbered(stage: int, order: Sequence[Kind]) -> Iterator[Op]:
    numbers = {kind: count() for kind in (Kind.F, Kind.I, Kind.W)}
    for kind in order:
        yield Op(kind, stage, next(numbers[kind]))


def draft(seconds: StageSeconds, micro_batches: int, memory: Memory, style: Style) -> Draft:
    """What the heuristic makes in one style."""
    rounds = _Rounds(seconds, micro_batches, memory, style)
    rounds.warm_up()
    for _ in range(1, micro_batches):
        rounds.forwards()
        rounds.gradients()
    rounds.rest()
    spans = tuple(line.free - line.start for line in rounds.lines)
    return Draft(
        tuple(tuple(line.order) for line in rounds.lines),
        spans,
        max(line.free for line in rounds.lines),
    )


class _Line:
    """One stage: its program so far, and its clock."""

    __slots__ = ("forwards", "free", "gradients", "idle", "order", "start", "weights")

    def __init__(self) -> None:
        self.order: list[Kind] = []
        self.forwards: list[float] = []  # when each F and I ends
        self.gradients: list[float] = []
        self.weights = 0  # how many W have run
        self.start = 0.0
        self.free = 0.0  # when the last op ends
        self.idle = 0.0  # seconds without work since the start


class _Rounds:
    """All stages."""

    def __init__(
        self, seconds: StageSeconds, micro_batches: int, memory: Memory, style: Style
    ) -> None:
        self.seconds, self.micro_batches, self.memory, self.style = (
            seconds,
            micro_batches,
            memory,
            style,
        )
        self.stages = len(seconds.forward)
        self.lines = [_Line() for _ in range(self.stages)]
        self.most_idle = 0.0

    def warm_up(self) -> None:
        """All ops up to the first I of every stage."""
        for stage in range(self.stages):
            self._forward(stage)
        for stage, more in enumerate(self._ahead()):
            for _ in range(more):
                self._forward(stage)
        for stage in reversed(range(self.stages)):
            self._gradient(stage)

    def _ahead(self) -> list[int]:
        """How many forwards each stage runs after its first and before its first I."""
        counts = [0] * self.stages
        first_gradient = 0.0
        for stage in reversed(range(self.stages)):
            seconds, clock = self.seconds.forward[stage], self.lines[stage].free
            due = first_gradient + self.seconds.down[stage][0] if stage + 1 < self.stages else clock
            most = min(self.micro_batches, self.memory.limits[stage] + _DUST)
            number = 1
            while number + 1 <= most and (
                clock + seconds[number] <= due if self.style.punctual else clock < due
            ):
                clock += seconds[number]
                number += 1
            counts[stage] = number - 1
            first_gradient = max(clock, due) + self.seconds.input_grad[stage][0]
        for stage in range(1, self.stages):
            # One fewer than the stage before, which would else wait for its own gradient behind
            # this stage's forwards. Where
            # all have run there, all can run here.
            most = (
                counts[stage - 1]
                if counts[stage - 1] + 1 == self.micro_batches
                else max(0, counts[stage - 1] - 1)
            )
            counts[stage] = min(counts[stage], most)
        return counts

    def forwards(self) -> None:
        """A round's way down: F on the last stages, as many of them as should."""
        first = self.stages
        while (
            first
            and len(self.lines[first - 1].forwards) < self.micro_batches
            and not self._lets_be(first - 1)
        ):
            first -= 1
        for stage in range(first, self.stages):
            while self._held(stage) + 1 > self.memory.limits[stage] + _DUST:
                self._weight(stage)
            self._fill(stage, self._forward_due(stage))
            self._forward(stage)

    def gradients(self) -> None:
        """A round's way up: I on every stage."""
        for stage in reversed(range(self.stages)):
            self._fill(stage, self._gradient_due(stage))
            if stage == 0 and len(self.lines[0].forwards) == self.micro_batches:
                self._all_weights(0)  # nobody waits for the I of stage 0
            self._gradient(stage)

    def rest(self) -> None:
        """The W left over."""
        for stage in range(self.stages):
            self._all_weights(stage)

    def _lets_be(self, stage: int) -> bool:
        """Whether this stage runs no forward in this round, though it has some left."""
        if not self.style.gradient_first or stage + 1 == self.stages:
            return False
        line, after, seconds = self.lines[stage], self.lines[stage + 1], self.seconds
        forward, gradient = len(after.forwards), len(after.gradients)
        if len(line.forwards) < forward + 2:
            return False
        due = (
            after.free
            + seconds.forward[stage + 1][forward]
            + seconds.input_grad[stage + 1][gradient]
        )
        due += seconds.down[stage][gradient]
        if line.free >= due:
            return True
        if line.free + seconds.forward[stage][len(line.forwards)] + self._room_s(stage) <= due:
            return False
        return due - line.free <= self.most_idle - line.idle

    def _room_s(self, stage: int) -> float:
        """Seconds of the W that make room for a forward."""
        line, over = self.lines[stage], self._held(stage) + 1 - self.memory.limits[stage] - _DUST
        number = line.weights
        while (
            number < len(line.gradients)
            and over > (number - line.weights) * self.memory.kept[stage]
        ):
            number += 1
        return sum(self.seconds.weight_grad[stage][line.weights : number])

    def _waiting(self, stage: int) -> int:
        """W that can run: those whose I has."""
        return len(self.lines[stage].gradients) - self.lines[stage].weights

    def _held(self, stage: int) -> float:
        """Micro-batches in memory, those that wait for W as the fraction that they keep."""
        line = self.lines[stage]
        return (
            len(line.forwards)
            - len(line.gradients)
            + self.memory.kept[stage] * self._waiting(stage)
        )

    def _fill(self, stage: int, due: float) -> None:
        """W in the gap until `due`."""
        line, seconds = self.lines[stage], self.seconds.weight_grad[stage]
        while line.weights < len(line.gradients) and line.free < due:
            whole = line.free + seconds[line.weights] <= due
            if not (whole or self.style.eager or due - line.free > self.most_idle - line.idle):
                break
            self._weight(stage)

    def _forward_due(self, stage: int) -> float:
        """When the next F's activation is there."""
        if stage == 0:
            return 0.0
        number = len(self.lines[stage].forwards)
        return self.lines[stage - 1].forwards[number] + self.seconds.up[stage - 1][number]

    def _gradient_due(self, stage: int) -> float:
        """When the next I's gradient is there."""
        if stage + 1 == self.stages:
            return 0.0
        number = len(self.lines[stage].gradients)
        return self.lines[stage + 1].gradients[number] + self.seconds.down[stage][number]

    def _forward(self, stage: int) -> None:
        line, due = self.lines[stage], self._forward_due(stage)
        number = len(line.forwards)
        if number == 0:
            line.start = line.free = due
        self._play(line, Kind.F, due, self.seconds.forward[stage][number])
        line.forwards.append(line.free)

    def _gradient(self, stage: int) -> None:
        line = self.lines[stage]
        self._play(
            line,
            Kind.I,
            self._gradient_due(stage),
            self.seconds.input_grad[stage][len(line.gradients)],
        )
        line.gradients.append(line.free)

    def _weight(self, stage: int) -> None:
        line = self.lines[stage]
        self._play(line, Kind.W, 0.0, self.seconds.weight_grad[stage][line.weights])
        line.weights += 1

    def _all_weights(self, stage: int) -> None:
        for _ in range(self._waiting(stage)):
            self._weight(stage)

    def _play(self, line: _Line, kind: Kind, due: float, seconds: float) -> None:
        """An op, once its rank is free and what it needs is there."""
        line.order.append(kind)
        if due > line.free:
            line.idle += due - line.free
            self.most_idle = max(self.most_idle, line.idle)
            line.free = due
        line.free += seconds
