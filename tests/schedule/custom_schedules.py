"""Random schedules that are sound by construction, as a user might write them."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import strategies as st

from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.streaming.streams import Stream, Waves
from penstock.schedule.updates import awaited_update


class _Builder:
    """Programs under construction and what of every (stage, micro-batch) is done."""

    def __init__(self, rng: random.Random, stages: int, ranks: int, micro_batches: int) -> None:
        self.rng, self.stages = rng, stages
        self.programs: list[list[Op]] = [[] for _ in range(ranks)]
        copies = [rng.sample(range(ranks), rng.randint(1, min(2, ranks))) for _ in range(stages)]
        self.home = {
            (s, m): rng.choice(copies[s]) for s in range(stages) for m in range(micro_batches)
        }
        self.hosts = [
            sorted({rank for (s, _), rank in self.home.items() if s == stage})
            for stage in range(stages)
        ]
        self.split = {place: rng.random() < 0.5 for place in self.home}
        self.done: set[Op] = set()
        self.version = [0] * stages

    def ready(self) -> list[Op]:
        """Return the ops that can come next, except U."""
        ready_ops = []
        for s, m in self.home:
            forward, whole, inputs, weights = (
                Op(kind, s, m) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
            )
            if forward not in self.done:
                if s == 0 or Op(Kind.F, s - 1, m) in self.done:
                    ready_ops.append(forward)
            elif whole not in self.done and inputs not in self.done:
                above = {Op(Kind.B, s + 1, m), Op(Kind.I, s + 1, m)}
                if s == self.stages - 1 or above & self.done:
                    ready_ops.append(inputs if self.split[s, m] else whole)
            elif inputs in self.done and weights not in self.done:
                ready_ops.append(weights)
        return ready_ops

    def place(self, op: Op) -> None:
        self.done.add(op)
        self.programs[self.home[op.stage, op.micro_batch]].append(op)

    def update(self, stage: int) -> None:
        self.version[stage] += 1
        for rank in self.hosts[stage]:
            self.programs[rank].append(Op(Kind.U, stage, self.version[stage]))


def build_custom(
    seed: int, stages: int, ranks: int, micro_batches: int, synchronous: bool
) -> Schedule:
    """A sound schedule; the same for the same arguments."""
    rng = random.Random(seed)
    builder = _Builder(rng, stages, ranks, micro_batches)
    left = [
        sum(2 + builder.split[s, m] for s, m in builder.home if s == stage)
        for stage in range(stages)
    ]
    waiting: list[int] = []
    eager = rng.random()
    while ready := builder.ready():
        if waiting and rng.random() < 0.3:
            builder.update(waiting.pop(rng.randrange(len(waiting))))
            continue
        # Mostly the deepest op first (few in flight), mostly the shallowest (many), or anything
        # between.
        ready.sort(key=lambda op: (op.kind is Kind.F, op.micro_batch, op.stage))
        op = ready[0] if rng.random() < eager else rng.choice(ready)
        builder.place(op)
        left[op.stage] -= 1
        if left[op.stage] == 0:
            waiting.append(op.stage)
        elif not synchronous and rng.random() < 0.3:
            builder.update(op.stage)
    for stage in waiting:
        builder.update(stage)
    return Schedule(tuple(map(tuple, builder.programs)), "custom", synchronous)


def custom_schedules(synchronous: bool | None = None, most: int = 5) -> st.SearchStrategy[Schedule]:
    """Sound schedules of up to `most` stages, ranks and micro-batches; of both kinds unless
    `synchronous` says which.
    """
    return st.builds(
        build_custom,
        seed=st.integers(0, 2**32),
        stages=st.integers(1, most),
        ranks=st.integers(1, most),
        micro_batches=st.integers(1, most),
        synchronous=st.booleans() if synchronous is None else st.just(synchronous),
    )


class _StreamBuilder(_Builder):
    """The same for a stream: batch t is on copy t mod `copies` of every stage, each copy on ranks
    of its own.
    """

    def __init__(
        self, rng: random.Random, stages: int, ranks: int, stream: Stream, size: int
    ) -> None:
        self.copies = 1 if stream.waves is None else rng.randint(1, 4)
        super().__init__(rng, stages, ranks * self.copies, stream.batches * self.copies * size)
        self.stream, self.size = replace(stream, batches=stream.batches * self.copies), size
        rank_of_stage = [rng.randrange(ranks) for _ in range(stages)]
        self.home = {
            (s, m): m // size % self.copies * ranks + rank_of_stage[s] for s, m in self.home
        }
        self.hosts = [
            [copy * ranks + rank_of_stage[s] for copy in range(self.copies)] for s in range(stages)
        ]
        self.updated: set[tuple[int, Op]] = set()

    def in_turn(self, op: Op) -> bool:
        """Whether the batch before a gradient's on its copy has had its update; and of a forward
        that of a wave before.
        """
        waves, place = self.stream.waves, op.micro_batch // self.size // self.copies
        behind = 0 if op.kind is not Kind.F else waves.length - 1 if waves else place
        host = self.hosts[op.stage][op.micro_batch // self.size % self.copies]
        return place - behind < 1 or (host, Op(Kind.U, op.stage, place - behind)) in self.updated

    def ready_updates(self) -> list[tuple[Op, list[int]]]:
        """Return the updates that can come next, with the ranks that must run them."""
        updates = []
        for stage, hosts in enumerate(self.hosts):
            due = [
                (rank, Op(Kind.U, stage, batch // self.copies + 1))
                for batch in range(self.stream.batches)
                for rank in [hosts[batch % self.copies]]
                if self.finished(stage, batch)
            ]
            for rank, update in (place for place in due if place not in self.updated):
                awaited = awaited_update(update, self.stream)
                if awaited == update and all((host, update) in due for host in hosts):
                    updates.append((update, hosts))
                elif awaited is None or (
                    awaited != update and all((host, awaited) in self.updated for host in hosts)
                ):
                    updates.append((update, [rank]))
        return updates

    def finished(self, stage: int, batch: int) -> bool:
        """Return whether all gradients of a batch are done."""
        numbers = range(batch * self.size, (batch + 1) * self.size)
        return all(
            Op(Kind.W if self.split[stage, m] else Kind.B, stage, m) in self.done for m in numbers
        )


def build_stream(seed: int, stages: int, ranks: int, size: int, waves: bool) -> Schedule:
    """A sound stream of a few batches of `size` micro-batches, with copies if it has waves; in
    general it repeats nothing.
    """
    rng = random.Random(seed)
    stream = Stream(
        rng.randint(1, 5),
        "hetpipe" if waves else "stash",
        waves=Waves(rng.randint(1, 2), rng.randint(0, 2)) if waves else None,
    )
    builder = _StreamBuilder(rng, stages, ranks, stream, size)
    eager = rng.random()
    while (
        ready := [op for op in builder.ready() if builder.in_turn(op)]
    ) or builder.ready_updates():
        updates = builder.ready_updates()
        if updates and (not ready or rng.random() < 0.5):
            update, hosts = rng.choice(updates)
            for rank in hosts:
                builder.programs[rank].append(update)
                builder.updated.add((rank, update))
            continue
        ready.sort(key=lambda op: (op.kind is Kind.F, op.micro_batch, op.stage))
        builder.place(ready[0] if rng.random() < eager else rng.choice(ready))
    return Schedule(
        tuple(map(tuple, builder.programs)), "custom", synchronous=False, stream=builder.stream
    )


def custom_streams(waves: bool | None = None, most: int = 3) -> st.SearchStrategy[Schedule]:
    """Sound streams of up to `most` stages, ranks per copy and micro-batches per batch; of both
    kinds unless `waves` says which.
    """
    numbers = st.integers(1, most)
    return st.builds(
        build_stream,
        st.integers(0, 2**32),
        numbers,
        numbers,
        numbers,
        st.booleans() if waves is None else st.just(waves),
    )
