"""Random sound schedules in which every stage has one home: what the runtime must play, though no
family would write it.

A random topological order of all ops is dealt out to the ranks; ranks may hold several stages, in
any order, or none.
"""

from __future__ import annotations

import random

from hypothesis import strategies as st

from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.rules import needs
from penstock.schedule.slicing import Slicing


def random_schedule(
    seed: int, stages: int, ranks: int, micro_batches: int, slicing: Slicing | None = None
) -> Schedule:
    """A schedule with some backwards split into I and W; the same for the same arguments.
    `micro_batches` counts slices, if any.
    """
    rng = random.Random(seed)
    home = [rng.randrange(ranks) for _ in range(stages)]
    waiting = []
    for stage in range(stages):
        for m in range(micro_batches):
            kinds = rng.choice([(Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W)])
            waiting += [Op(kind, stage, m) for kind in kinds]
    left = [sum(op.stage == stage for op in waiting) for stage in range(stages)]
    eager = (
        rng.random()
    )  # how often the deepest op goes first: few micro-batches in flight, or many
    programs: list[list[Op]] = [[] for _ in range(ranks)]
    done: set[Op] = set()
    while waiting:
        ready = [
            op for op in waiting if all(done & set(group) for group in needs(op, stages, slicing))
        ]
        ready.sort(key=lambda op: (op.kind is Kind.F, op.micro_batch, op.stage))
        op = ready[0] if rng.random() < eager else rng.choice(ready)
        waiting.remove(op)
        done.add(op)
        programs[home[op.stage]].append(op)
        left[op.stage] -= 1
        if left[op.stage] == 0:
            programs[home[op.stage]].append(Op(Kind.U, op.stage, 1))
    return Schedule(tuple(map(tuple, programs)), f"random-{seed}", slicing=slicing)


def random_schedules(
    most_stages: int = 5, most_ranks: int = 4, most_micro_batches: int = 5
) -> st.SearchStrategy[Schedule]:
    """Schedules of up to these numbers."""
    return st.builds(
        random_schedule,
        st.integers(0, 2**32),
        st.integers(1, most_stages),
        st.integers(1, most_ranks),
        st.integers(1, most_micro_batches),
    )


def random_slicings(
    along: str, most_slices: int = 3, most_micro_batches: int = 3
) -> st.SearchStrategy[Slicing]:
    """Micro-batches cut into up to that number of slices, each in its own way."""
    weights = st.lists(st.integers(1, 4), min_size=1, max_size=most_slices)
    rows = st.lists(
        weights.map(lambda row: tuple(weight / sum(row) for weight in row)),
        min_size=1,
        max_size=most_micro_batches,
    )
    return rows.map(lambda shares: Slicing(along, tuple(shares)))


def random_sliced_schedules(
    along: str, most_stages: int = 5, most_ranks: int = 4
) -> st.SearchStrategy[Schedule]:
    """Schedules of up to these numbers that cut their micro-batches."""
    seeds, stages, ranks = (
        st.integers(0, 2**32),
        st.integers(1, most_stages),
        st.integers(1, most_ranks),
    )
    return random_slicings(along).flatmap(
        lambda slicing: st.builds(
            random_schedule, seeds, stages, ranks, st.just(len(slicing.share)), st.just(slicing)
        )
    )
