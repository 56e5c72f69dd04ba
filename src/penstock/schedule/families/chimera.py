"""Chimera: two 1F1B pipelines in opposite directions over the same ranks, each in the other's
bubbles.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import register
from penstock.schedule.meetings import with_meetings
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.placement import both_ways

CONCATENATIONS = ("direct", "doubling")


@register(
    "chimera",
    synchronous=True,
    stages_per_rank="2",
    splits_backward=False,
    source="Li and Hoefler 2021, Chimera, sections 3.1 to 3.5: two pipelines, direct concatenation and forward doubling",
)
def chimera(stages: int, micro_batches: int, concatenation: str = "direct") -> Schedule:
    """Of every p micro-batches the first half goes down the ranks and the second half up; p stages,
    on p ranks, twice.

    More than p micro-batches are units in a row. *Direct*: units of p, the next one's forwards in
    the last one's bubbles. *Forward doubling*: units of 2p, whose forwards run two by two, so that
    they take as long as a backward; for b = 2f.

    Facts for free links, p stages, m micro-batches, n = ceil(m / p) units, the last of them lacking
    d = np - m micro-batches:
        makespan, f = b     (2m + p - 2 + d)f, direct
        makespan, b = 2f    3mf + (n + 1)(p - 2)f + df, direct; f less where n > 1 and d > 0
                            3mf + 1.5(p - 2)f, doubling
        in flight           on rank r, with q = min(r, p - 1 - r), of both stages together:
                            min(m, min(m, p)/2 + 1 + q), direct; 1.5p + 1 + q, doubling
        weights             two copies of every stage: rank s and rank p - 1 - s add up their
                            gradients

    The paper's third way, backward halving, is not here: it cuts activations of a forward for two
    backwards.

    >>> print(chimera(2, 4))
    rank 0 | 0F0 1F1 1B1 0B0 0F2 1F3 1B3 0B2 1U1 0U1
    rank 1 | 0F1 1F0 1B0 0B1 0F3 1F2 1B2 0B3 1U1 0U1

    >>> print(chimera(2, 4, concatenation="doubling"))
    rank 0 | 0F0 0F2 1F1 1F3 1B1 0B0 1B3 0B2 1U1 0U1
    rank 1 | 0F1 0F3 1F0 1F2 1B0 0B1 1B2 0B3 1U1 0U1

    Args:
        stages: number of stages and of ranks, even.
        micro_batches: micro-batches per batch, even; for doubling a multiple of 2 `stages`.
        concatenation: "direct" or "doubling".

    Raises:
        ScheduleError: the numbers are others.
    """
    if concatenation not in CONCATENATIONS:
        raise ScheduleError(
            f"chimera takes concatenation {' or '.join(map(repr, CONCATENATIONS))}, not {concatenation!r}"
        )
    if stages % 2:
        raise ScheduleError(
            f"chimera puts two stages on every rank, s and {stages - 1} - s, which must differ: it takes an even "
            f"number of stages and got {stages}; gems takes any"
        )
    if micro_batches % 2:
        raise ScheduleError(
            f"chimera sends half of the micro-batches each way: it takes an even number of them and got "
            f"{micro_batches}; gems takes any"
        )
    doubling = concatenation == "doubling"
    if doubling and micro_batches % (2 * stages):
        raise ScheduleError(
            f"chimera in {stages} stages with concatenation='doubling' takes a multiple of {2 * stages} "
            f"micro-batches, not {micro_batches}; 'direct' takes any even number"
        )
    slots: list[list[tuple[int, int, Op]]] = [[] for _ in range(stages)]
    for way, placement in enumerate(both_ways(stages)):
        for micro_batch, forward, backward in (_doubling if doubling else _direct)(
            stages, micro_batches, way
        ):
            for stage, rank in enumerate(placement):
                slots[rank].append((forward + stage, micro_batch, Op(Kind.F, stage, micro_batch)))
                slots[rank].append((backward - stage, micro_batch, Op(Kind.B, stage, micro_batch)))
    return Schedule(with_meetings([[op for *_, op in sorted(row)] for row in slots]))


def _direct(stages: int, micro_batches: int, way: int) -> Iterator[tuple[int, int, int]]:
    """The micro-batches of one way, each with the slots of its forward and its backward on stage 0,
    of an op each.
    """
    for unit, first in enumerate(range(0, micro_batches, stages)):
        half = min(stages, micro_batches - first) // 2
        for k in range(half):
            slot = 2 * (stages * unit + k)
            yield first + half * way + k, slot, slot + 2 * stages - 1


def _doubling(stages: int, micro_batches: int, way: int) -> Iterator[tuple[int, int, int]]:
    """Likewise, where a forward's slot holds two of them, and a unit's second half follows its
    first.
    """
    half = stages // 2
    for unit, first in enumerate(range(0, micro_batches, 2 * stages)):
        for j in range(stages):
            micro_batch = first + stages * (j // half) + half * way + j % half
            yield (
                micro_batch,
                3 * stages * unit + 2 * (j // 2),
                3 * stages * unit + 2 * stages - 1 + 2 * j,
            )
