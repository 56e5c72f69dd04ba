"""Random schedules that are sound by construction: what a user may write, and no family would.

Ops are put down one by one, each when all it needs is down already, so there is an order of the whole that every program
follows. U of a stage goes to all its copies at once. Stages may share a rank, have copies, and split some of their backwards.
"""

from __future__ import annotations

import random

from hypothesis import strategies as st

from penstock.schedule.op import Kind, Op, Schedule


class _Builder:
    """Programs under construction and what of every (stage, micro-batch) is done."""

    def __init__(self, rng: random.Random, stages: int, ranks: int, micro_batches: int) -> None:
        self.rng, self.stages = rng, stages
        self.programs: list[list[Op]] = [[] for _ in range(ranks)]
        copies = [rng.sample(range(ranks), rng.randint(1, min(2, ranks))) for _ in range(stages)]
        self.home = {(s, m): rng.choice(copies[s]) for s in range(stages) for m in range(micro_batches)}
        self.hosts = [sorted({rank for (s, _), rank in self.home.items() if s == stage}) for stage in range(stages)]
        self.split = {place: rng.random() < 0.5 for place in self.home}
        self.done: set[Op] = set()
        self.version = [0] * stages

    def ready(self) -> list[Op]:
        """Ops that could stand next, except U."""
        found = []
        for s, m in self.home:
            forward, whole, inputs, weights = (Op(kind, s, m) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
            if forward not in self.done:
                if s == 0 or Op(Kind.F, s - 1, m) in self.done:
                    found.append(forward)
            elif whole not in self.done and inputs not in self.done:
                above = {Op(Kind.B, s + 1, m), Op(Kind.I, s + 1, m)}
                if s == self.stages - 1 or above & self.done:
                    found.append(inputs if self.split[s, m] else whole)
            elif inputs in self.done and weights not in self.done:
                found.append(weights)
        return found

    def place(self, op: Op) -> None:
        self.done.add(op)
        self.programs[self.home[op.stage, op.micro_batch]].append(op)

    def update(self, stage: int) -> None:
        self.version[stage] += 1
        for rank in self.hosts[stage]:
            self.programs[rank].append(Op(Kind.U, stage, self.version[stage]))


def build_custom(seed: int, stages: int, ranks: int, micro_batches: int, synchronous: bool) -> Schedule:
    """A sound schedule; the same for the same arguments."""
    rng = random.Random(seed)
    builder = _Builder(rng, stages, ranks, micro_batches)
    left = [sum(2 + builder.split[s, m] for s, m in builder.home if s == stage) for stage in range(stages)]
    waiting: list[int] = []
    eager = rng.random()
    while ready := builder.ready():
        if waiting and rng.random() < 0.3:
            builder.update(waiting.pop(rng.randrange(len(waiting))))
            continue
        # Mostly the deepest op first (few in flight), mostly the shallowest (many), or anything between.
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
    """Sound schedules of up to `most` stages, ranks and micro-batches; of both kinds unless `synchronous` says which."""
    return st.builds(
        build_custom,
        seed=st.integers(0, 2**32),
        stages=st.integers(1, most),
        ranks=st.integers(1, most),
        micro_batches=st.integers(1, most),
        synchronous=st.booleans() if synchronous is None else st.just(synchronous),
    )
