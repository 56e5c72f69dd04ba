"""Reference count of versions, which rereads the program for every op; and random streams."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.streaming.streams import Stream
from penstock.weights.rule_types import Place, Reads


def batch_of(schedule: Schedule, program, i: int) -> int:
    """The batch of the op in place i; of a U, that of the last gradient of its stage before it."""
    kind, stage, number = program[i]
    if kind is Kind.U:
        number = [
            op.micro_batch
            for op in program[:i]
            if op.stage == stage and op.kind in (Kind.B, Kind.W)
        ][-1]
    return number // schedule.micro_batches if schedule.stream else 0


def copy_of(schedule: Schedule, program, i: int) -> tuple[int, int]:
    """Stage and copy of the weights that the op in place i works on."""
    return program[i].stage, batch_of(schedule, program, i) % (
        schedule.stream.pipelines if schedule.stream else 1
    )


def newest(schedule: Schedule, program, i: int) -> int:
    """Updates that the copy of the weights of the op in place i has had before it."""
    copy = copy_of(schedule, program, i)
    return sum(
        op.kind is Kind.U and copy_of(schedule, program, j) == copy
        for j, op in enumerate(program[:i])
    )


def places(schedule: Schedule) -> dict[tuple[int, int], Place]:
    """The place of each micro-batch on each stage."""
    place_of, first = {}, {}
    for program in schedule.programs:
        for i, op in enumerate(program):
            if op.kind is Kind.F and op.stage == 0:
                first[op.micro_batch] = newest(schedule, program, i)
    for program in schedule.programs:
        for i, op in enumerate(program):
            if op.kind is not Kind.F:
                continue
            _, stage, number = op
            batch = batch_of(schedule, program, i)
            mates = [
                j
                for j, other in enumerate(program)
                if other.kind is Kind.F
                and other.stage == stage
                and batch_of(schedule, program, j) == batch
            ]
            backs = [
                j
                for j, other in enumerate(program)
                if other.kind in (Kind.B, Kind.I)
                and other.stage == stage
                and batch_of(schedule, program, j) == batch
            ]
            (backward,) = [j for j in backs if program[j].micro_batch == number]
            place_of[stage, number] = Place(
                stage,
                schedule.stages,
                batch,
                mates.index(i),
                len(mates),
                newest(schedule, program, i),
                newest(schedule, program, backward),
                newest(schedule, program, mates[0]),
                newest(schedule, program, backs[0]),
                first[number],
            )
    return place_of


def ages(schedule: Schedule, reads: dict[tuple[int, int], Reads]) -> list[list[int]]:
    """Per stage and in the order of the micro-batches, updates between what a forward reads and its
    gradient.
    """
    age_of = {}
    for program in schedule.programs:
        for i, (kind, stage, number) in enumerate(program):
            if kind in (Kind.B, Kind.W):
                age_of[stage, number] = newest(schedule, program, i) - reads[stage, number].forward
    return [
        [age_of[key] for key in sorted(age_of) if key[0] == stage]
        for stage in range(schedule.stages)
    ]


def version_counts(schedule: Schedule, reads: dict[tuple[int, int], Reads]) -> tuple[int, ...]:
    """Per stage, the most versions on a rank at once: what is in flight reads, the next F and all
    after it, and the newest.
    """
    most = [0] * schedule.stages
    for program in schedule.programs:
        for i, op in enumerate(program):
            if op.kind is not Kind.U:
                continue
            kept_versions: set[tuple[int, int]] = set()
            for copy in ((op.stage, turn) for turn in range(schedule.stream.pipelines)):
                mine = [
                    j for j, other in enumerate(program) if copy_of(schedule, program, j) == copy
                ]
                last = sum(program[j].kind is Kind.U for j in mine if j <= i)
                started = [
                    program[j].micro_batch for j in mine if j <= i and program[j].kind is Kind.F
                ]
                ended = [
                    program[j].micro_batch
                    for j in mine
                    if j <= i and program[j].kind in (Kind.B, Kind.W)
                ]
                flying = [reads[op.stage, number] for number in set(started) - set(ended)]
                to_come = [
                    reads[op.stage, program[j].micro_batch].forward
                    for j in mine
                    if j > i and program[j].kind is Kind.F
                ]
                needed = {version for read in flying for version in (read.forward, read.backward)}
                kept_versions |= {
                    (copy[1], version)
                    for version in range(last + 1)
                    if version == last or version in needed or (to_come and version >= to_come[0])
                }
            most[op.stage] = max(most[op.stage], len(kept_versions))
    return tuple(most)


class _Builder:
    """A stream under construction: ops are put down one by one, each when all that it needs is
    down.
    """

    def __init__(
        self, seed: int, stages: int, micro_batches: int, batches: int, pipelines: int
    ) -> None:
        self.rng = random.Random(seed)
        self.p, self.m, self.batches = stages, micro_batches, batches
        ranks = self.rng.randint(1, stages + 1)
        hosts = [
            self.rng.sample(range(ranks), self.rng.randint(1, min(2, ranks, micro_batches)))
            for _ in range(stages)
        ]
        self.home = {
            (s, n): hosts[s][n % micro_batches % len(hosts[s])]
            for s in range(stages)
            for n in range(batches * micro_batches)
        }
        self.hosts = [sorted(host) for host in hosts]
        self.split = {place: self.rng.random() < 0.3 for place in self.home}
        self.programs: list[list[Op]] = [[] for _ in range(ranks)]
        self.done: set[Op] = set()
        self.stream = Stream(batches, "stash", pipelines)

    def has(self, *ops: tuple[Kind, int, int]) -> bool:
        """Whether one of them is down."""
        return any(Op(*op) in self.done for op in ops)

    def ready(self) -> list[Op]:
        """What could stand next. Gradients of a batch wait for the U of the batch before."""
        ready_ops = []
        for s, n in self.home:
            last, turn = s == self.p - 1, n < self.m or self.has((Kind.U, s, n // self.m))
            if not self.has((Kind.F, s, n)):
                if s == 0 or self.has((Kind.F, s - 1, n)):
                    ready_ops.append(Op(Kind.F, s, n))
            elif not self.has((Kind.B, s, n), (Kind.I, s, n)):
                if turn and (last or self.has((Kind.B, s + 1, n), (Kind.I, s + 1, n))):
                    ready_ops.append(Op(Kind.I if self.split[s, n] else Kind.B, s, n))
            elif self.has((Kind.I, s, n)) and not self.has((Kind.W, s, n)) and turn:
                ready_ops.append(Op(Kind.W, s, n))
        for s in range(self.p):
            t = next(t for t in range(self.batches + 1) if not self.has((Kind.U, s, t + 1)))
            if t < self.batches and all(
                self.has((Kind.B, s, n), (Kind.W, s, n))
                for n in range(t * self.m, t * self.m + self.m)
            ):
                ready_ops.append(Op(Kind.U, s, t + 1))
        return ready_ops

    def schedule(self) -> Schedule:
        """All of it."""
        eager = self.rng.random()
        while ready := self.ready():
            ready.sort(key=lambda op: (op.kind is Kind.F, op.micro_batch, op.stage, op.kind))
            op = ready[0] if self.rng.random() < eager else self.rng.choice(ready)
            self.done.add(op)
            ranks = self.hosts[op.stage] if op.kind is Kind.U else [self.home[op[1:]]]
            for rank in ranks:
                self.programs[rank].append(op)
        return Schedule(
            tuple(map(tuple, self.programs)), "random", synchronous=False, stream=self.stream
        )


def streams(pipelines: int = 1) -> st.SearchStrategy[Schedule]:
    """Sound streams of a few stages, ranks, micro-batches and batches, in orders that no family
    has.
    """
    return st.builds(
        lambda *args: _Builder(*args).schedule(),
        st.integers(0, 2**32),
        st.integers(1, 4),
        st.integers(1, 3),
        st.integers(1, 5),
        st.integers(1, pipelines),
    )
