"""Zero-bubble programs built round by round: one forward on every stage, then one input gradient on
every stage, with weight gradients in the gaps.

The heuristic of Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 3,
with the choices of its authors' scheduler where the text leaves one open. Every stage has its own
clock, so that it is known when the next activation or gradient arrives and how long the rank would
wait:

    warm-up    every stage: F0; then further F as far as memory allows and they end before the first
               gradient arrives; I0
    a round    stage 0, 1, …, p - 1: W to free memory, W in the gap before the activation arrives, F
               stage p - 1, …, 1, 0: W in the gap before the gradient arrives, I
    the end    the remaining W

Three choices have no answer that is best for all costs; a `Style` answers them, and the caller
tries all eight.

No deadlock is possible: no stage has run fewer forwards than the next one, so that the inputs of an
op are made before it in the order in which ops are made here. And memory suffices: whenever a
forward is due, running all W that can run makes room for it, since the warm-up leaves at most that
number of whole micro-batches in flight which memory holds, and every round adds one and frees one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, product

from penstock.schedule.op import Kind, Op, Program
from penstock.search.stage_seconds import StageSeconds

#: Tolerance for the rounding of sums of fractions of a micro-batch.
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Style:
    """Answers to the three choices of the heuristic.

    Attributes:
        punctual: the warm-up takes no forward that would still run when the first gradient arrives.
        gradient_first: a stage skips a forward in a round if the next stage has two activations to
            continue with and will send a gradient before this forward would end; unless waiting
            would make this the stage that has waited longest.
        eager: a W that takes longer than the gap is always run, not only if waiting would make this
            the stage that has waited longest.
    """

    punctual: bool
    gradient_first: bool
    eager: bool


STYLES = tuple(Style(*answers) for answers in product((True, False), repeat=3))


@dataclass(frozen=True)
class Memory:
    """The memory of every stage, in whole micro-batches.

    Attributes:
        limits: per stage, the number of micro-batches that it may hold, at least 1.
        fraction_after_input_grad: per stage, the fraction of a micro-batch that it holds from I to
            W.
    """

    limits: Sequence[float]
    fraction_after_input_grad: Sequence[float]


@dataclass(frozen=True)
class Draft:
    """The programs of all stages with their times.

    The micro-batches of each kind count up from 0, so that the kinds determine the ops.

    Attributes:
        orders: per stage, the kinds of its ops in order.
        spans_s: per stage, seconds from the start of its first op to the end of its last.
        makespan_s: seconds until the last op ends.
    """

    orders: tuple[tuple[Kind, ...], ...]
    spans_s: tuple[float, ...]
    makespan_s: float

    def programs(self) -> tuple[Program, ...]:
        """Return the ops of every stage, without updates."""
        return tuple(tuple(_numbered(stage, order)) for stage, order in enumerate(self.orders))


def _numbered(stage: int, order: Sequence[Kind]) -> Iterator[Op]:
    """Yield the ops of a stage, with micro-batches counted per kind."""
    numbers = {kind: count() for kind in (Kind.F, Kind.I, Kind.W)}
    for kind in order:
        yield Op(kind, stage, next(numbers[kind]))


def draft(seconds: StageSeconds, micro_batches: int, memory: Memory, style: Style) -> Draft:
    """Run the heuristic in one style."""
    rounds = _Rounds(seconds, micro_batches, memory, style)
    rounds.warm_up()
    for _ in range(1, micro_batches):
        rounds.forwards()
        rounds.gradients()
    rounds.finish()
    return Draft(
        orders=tuple(tuple(state.order) for state in rounds.states),
        spans_s=tuple(state.free - state.start for state in rounds.states),
        makespan_s=max(state.free for state in rounds.states),
    )


class _StageState:
    """One stage: its program so far, and its clock.

    Attributes:
        order: the kinds of its ops so far.
        forwards: end of each F.
        gradients: end of each I.
        weights: number of W so far.
        start: start of the first op.
        free: end of the last op.
        idle: seconds without work since the start.
    """

    __slots__ = ("forwards", "free", "gradients", "idle", "order", "start", "weights")

    def __init__(self) -> None:
        self.order: list[Kind] = []
        self.forwards: list[float] = []
        self.gradients: list[float] = []
        self.weights = 0
        self.start = 0.0
        self.free = 0.0
        self.idle = 0.0


class _Rounds:
    """The heuristic at work: the state of all stages, and the rules for their next ops."""

    def __init__(
        self, seconds: StageSeconds, micro_batches: int, memory: Memory, style: Style
    ) -> None:
        self.seconds = seconds
        self.micro_batches = micro_batches
        self.memory = memory
        self.style = style
        self.stages = len(seconds.forward)
        self.states = [_StageState() for _ in range(self.stages)]
        self.most_idle = 0.0

    def warm_up(self) -> None:
        """Run all ops up to the first I of every stage."""
        for stage in range(self.stages):
            self._forward(stage)
        for stage, forwards in enumerate(self._warm_up_forwards()):
            for _ in range(forwards):
                self._forward(stage)
        for stage in reversed(range(self.stages)):
            self._gradient(stage)

    def _warm_up_forwards(self) -> list[int]:
        """Return the number of forwards that each stage runs after its first and before its first
        I.
        """
        counts = [0] * self.stages
        first_gradient = 0.0
        for stage in reversed(range(self.stages)):
            seconds, clock = self.seconds.forward[stage], self.states[stage].free
            due = first_gradient + self.seconds.down[stage][0] if stage + 1 < self.stages else clock
            most = min(self.micro_batches, self.memory.limits[stage] + _TOLERANCE)
            number = 1
            while number + 1 <= most and (
                clock + seconds[number] <= due if self.style.punctual else clock < due
            ):
                clock += seconds[number]
                number += 1
            counts[stage] = number - 1
            first_gradient = max(clock, due) + self.seconds.input_grad[stage][0]
        for stage in range(1, self.stages):
            # One fewer than the stage before: else that would wait for its gradient until this
            # stage has run its forwards. If all forwards have run there, all can run here.
            most = counts[stage - 1]
            if most + 1 < self.micro_batches:
                most = max(0, most - 1)
            counts[stage] = min(counts[stage], most)
        return counts

    def forwards(self) -> None:
        """Run the forwards of a round, on all stages behind the last one that skips its forward or
        has none left.
        """
        first = self.stages
        while (
            first
            and len(self.states[first - 1].forwards) < self.micro_batches
            and not self._skips_forward(first - 1)
        ):
            first -= 1
        for stage in range(first, self.stages):
            while self._in_memory(stage) + 1 > self.memory.limits[stage] + _TOLERANCE:
                self._weight(stage)
            self._fill(stage, self._forward_due(stage))
            self._forward(stage)

    def gradients(self) -> None:
        """Run the input gradients of a round, on every stage."""
        for stage in reversed(range(self.stages)):
            self._fill(stage, self._gradient_due(stage))
            if stage == 0 and len(self.states[0].forwards) == self.micro_batches:
                self._all_weights(0)  # no stage waits for the I of stage 0
            self._gradient(stage)

    def finish(self) -> None:
        """Run the remaining W."""
        for stage in range(self.stages):
            self._all_weights(stage)

    def _skips_forward(self, stage: int) -> bool:
        """Return whether this stage runs no forward in this round, although some are left."""
        if not self.style.gradient_first or stage + 1 == self.stages:
            return False
        state, next_state = self.states[stage], self.states[stage + 1]
        seconds = self.seconds
        forward, gradient = len(next_state.forwards), len(next_state.gradients)
        # The next stage would soon have nothing to continue with.
        if len(state.forwards) < forward + 2:
            return False
        next_gradient_end = (
            next_state.free
            + seconds.forward[stage + 1][forward]
            + seconds.input_grad[stage + 1][gradient]
        )
        due = next_gradient_end + seconds.down[stage][gradient]
        if state.free >= due:
            return True
        forward_end = (
            state.free
            + seconds.forward[stage][len(state.forwards)]
            + self._seconds_to_make_room(stage)
        )
        if forward_end <= due:
            return False
        # Unless waiting would make this the stage that has waited longest, see `Style`.
        return due - state.free <= self.most_idle - state.idle

    def _seconds_to_make_room(self, stage: int) -> float:
        """Return the seconds of the W that make room for a forward."""
        state = self.states[stage]
        excess = self._in_memory(stage) + 1 - self.memory.limits[stage] - _TOLERANCE
        number = state.weights
        while (
            number < len(state.gradients)
            and excess > (number - state.weights) * self.memory.fraction_after_input_grad[stage]
        ):
            number += 1
        return sum(self.seconds.weight_grad[stage][state.weights : number])

    def _runnable_weights(self, stage: int) -> int:
        """Return the number of W that can run: those whose I has run."""
        return len(self.states[stage].gradients) - self.states[stage].weights

    def _in_memory(self, stage: int) -> float:
        """Return the micro-batches in memory; one that waits for W counts as a fraction."""
        state = self.states[stage]
        return (
            len(state.forwards)
            - len(state.gradients)
            + self.memory.fraction_after_input_grad[stage] * self._runnable_weights(stage)
        )

    def _fill(self, stage: int, due: float) -> None:
        """Run W in the gap until `due`."""
        state, seconds = self.states[stage], self.seconds.weight_grad[stage]
        while state.weights < len(state.gradients) and state.free < due:
            fits_gap = state.free + seconds[state.weights] <= due
            if not (fits_gap or self.style.eager or due - state.free > self.most_idle - state.idle):
                break
            self._weight(stage)

    def _forward_due(self, stage: int) -> float:
        """Return when the activation for the next F arrives."""
        if stage == 0:
            return 0.0
        number = len(self.states[stage].forwards)
        return self.states[stage - 1].forwards[number] + self.seconds.up[stage - 1][number]

    def _gradient_due(self, stage: int) -> float:
        """Return when the gradient for the next I arrives."""
        if stage + 1 == self.stages:
            return 0.0
        number = len(self.states[stage].gradients)
        return self.states[stage + 1].gradients[number] + self.seconds.down[stage][number]

    def _forward(self, stage: int) -> None:
        """Run the next F of a stage."""
        state, due = self.states[stage], self._forward_due(stage)
        number = len(state.forwards)
        if number == 0:
            # The wait before the first op is outside of the span, and not idle time.
            state.start = state.free = due
        self._append(state, Kind.F, due, self.seconds.forward[stage][number])
        state.forwards.append(state.free)

    def _gradient(self, stage: int) -> None:
        """Run the next I of a stage."""
        state = self.states[stage]
        self._append(
            state,
            Kind.I,
            self._gradient_due(stage),
            self.seconds.input_grad[stage][len(state.gradients)],
        )
        state.gradients.append(state.free)

    def _weight(self, stage: int) -> None:
        """Run the next W of a stage."""
        state = self.states[stage]
        # W has no input from another stage.
        self._append(state, Kind.W, 0.0, self.seconds.weight_grad[stage][state.weights])
        state.weights += 1

    def _all_weights(self, stage: int) -> None:
        """Run all W of a stage that can run."""
        for _ in range(self._runnable_weights(stage)):
            self._weight(stage)

    def _append(self, state: _StageState, kind: Kind, due: float, seconds: float) -> None:
        """Append an op that starts once its rank is free and its input has arrived at `due`."""
        state.order.append(kind)
        if due > state.free:
            state.idle += due - state.free
            self.most_idle = max(self.most_idle, state.idle)
            state.free = due
        state.free += seconds
