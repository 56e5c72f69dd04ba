"""Chimera: two 1F1B pipelines in opposite directions, each of which fills the other's bubbles."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import register
from penstock.schedule.gradient_sync import with_gradient_sync
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.placement import bidirectional

CONCATENATIONS = ("direct", "doubling")


@register(
    "chimera",
    synchronous=True,
    stages_per_rank="2",
    splits_backward=False,
    source="Li and Hoefler 2021, Chimera, sections 3.1 to 3.5: two pipelines, direct concatenation "
    "and forward doubling",
)
def chimera(stages: int, micro_batches: int, concatenation: str = "direct") -> Schedule:
    """Send half of every p micro-batches down the ranks, and half up; each rank has two stages.

    There are p stages on p ranks, with two copies of each stage. More than p micro-batches run as a
    sequence of units. *Direct*: units of p, with the forwards of a unit in the bubbles of the
    previous one. *Forward doubling*: units of 2p, whose forwards run two at a time, so that they
    take as long as a backward; for b = 2f.

    Facts for free links, p stages, m micro-batches, n = ceil(m / p) units, with d = np - m
    micro-batches missing in the last unit:
        makespan, f = b     (2m + p - 2 + d)f, direct
        makespan, b = 2f    3mf + (n + 1)(p - 2)f + df, direct; f less where n > 1 and d > 0
                            3mf + 1.5(p - 2)f, doubling
        in flight           on rank r, with q = min(r, p - 1 - r), of both stages together:
                            min(m, min(m, p)/2 + 1 + q), direct; 1.5p + 1 + q, doubling
        weights             two copies of every stage: rank s and rank p - 1 - s add up their
                            gradients

    The paper's third variant, backward halving, is not implemented: it cuts the activations of a
    forward for two backwards.

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
        ScheduleError: an argument is invalid.
    """
    _check_arguments(stages, micro_batches, concatenation)
    stage_0_slots = _doubling if concatenation == "doubling" else _direct
    slots: list[list[tuple[int, int, Op]]] = [[] for _ in range(stages)]
    for direction, placement in enumerate(bidirectional(stages)):
        for m, forward, backward in stage_0_slots(stages, micro_batches, direction):
            # A forward is on stage s after s slots; a backward is there s slots before stage 0.
            for stage, rank in enumerate(placement):
                slots[rank].append((forward + stage, m, Op(Kind.F, stage, m)))
                slots[rank].append((backward - stage, m, Op(Kind.B, stage, m)))
    programs = []
    for row in slots:
        # Of two forwards in one slot (doubling) that of the lower micro-batch comes first.
        row.sort()
        programs.append([op for *_, op in row])
    return Schedule(with_gradient_sync(programs))


def _check_arguments(stages: int, micro_batches: int, concatenation: str) -> None:
    """Check that `chimera` supports the numbers and the concatenation.

    Raises:
        ScheduleError: it does not.
    """
    if concatenation not in CONCATENATIONS:
        raise ScheduleError(
            f"chimera takes concatenation {' or '.join(map(repr, CONCATENATIONS))}, "
            f"not {concatenation!r}"
        )
    if stages % 2:
        raise ScheduleError(
            f"chimera puts two stages on every rank, s and {stages - 1} - s, which must differ: it "
            f"takes an even number of stages and got {stages}; gems takes any"
        )
    if micro_batches % 2:
        raise ScheduleError(
            "chimera sends half of the micro-batches each way: it takes an even number of them and "
            f"got {micro_batches}; gems takes any"
        )
    if concatenation == "doubling" and micro_batches % (2 * stages):
        raise ScheduleError(
            f"chimera in {stages} stages with concatenation='doubling' takes a multiple of "
            f"{2 * stages} micro-batches, not {micro_batches}; 'direct' takes any even number"
        )


def _direct(stages: int, micro_batches: int, direction: int) -> Iterator[tuple[int, int, int]]:
    """Yield the micro-batches of one direction for direct concatenation.

    Args:
        stages, micro_batches: their numbers.
        direction: 0 for the pipeline down the ranks, 1 for the one up.

    Yields:
        The micro-batch, and the slots of its forward and its backward on stage 0. A slot is as long
        as an op.
    """
    for unit, first in enumerate(range(0, micro_batches, stages)):
        half = min(stages, micro_batches - first) // 2
        for k in range(half):
            slot = 2 * (stages * unit + k)
            yield first + half * direction + k, slot, slot + 2 * stages - 1


def _doubling(stages: int, micro_batches: int, direction: int) -> Iterator[tuple[int, int, int]]:
    """Yield the micro-batches of one direction for forward doubling; otherwise as `_direct`.

    The slot of a forward holds two of them, and the second half of a unit follows the first.
    """
    half = stages // 2
    for unit, first in enumerate(range(0, micro_batches, 2 * stages)):
        # On a rank, the 2p forwards of a unit take p slots, and its 2p backwards 2p slots.
        unit_slot = 3 * stages * unit
        for k in range(stages):
            # Half of the first p micro-batches of the unit, then half of the other p.
            block, place = divmod(k, half)
            micro_batch = first + stages * block + half * direction + place
            # Every other slot: those between are for the forwards of the other direction.
            forward = unit_slot + 2 * (k // 2)
            yield micro_batch, forward, unit_slot + 2 * stages - 1 + 2 * k
