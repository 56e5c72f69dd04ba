"""The largest schedule that is generated or read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Final

from penstock.errors import ScheduleError

#: Stages x micro-batches of a schedule at most: 10 million ops of forward and backward.
MAX_FORWARDS: Final = 5_000_000
#: Bytes of an op and its place in a program, as measured with tracemalloc on CPython 3.11.
_OP_BYTES: Final = 100
#: Options that multiply the number of micro-batches in a schedule.
_FACTORS: Final = ("batches", "slices", "pipelines", "virtual_workers")


def check_size(
    name: str, stages: int, micro_batches: int, options: Mapping[str, object] | None = None
) -> None:
    """Refuse a schedule that would not fit into memory, before it is generated.

    Args:
        name: of the schedule, for the message.
        stages, micro_batches: its numbers of stages and of micro-batches.
        options: of the schedule; some multiply the number of micro-batches.

    Raises:
        ScheduleError: it has more than `MAX_FORWARDS` forwards.
    """
    factors = [(options or {}).get(option) for option in _FACTORS]
    repeats = prod(factor for factor in factors if isinstance(factor, int) and factor > 0)
    forwards = stages * micro_batches * repeats
    if forwards > MAX_FORWARDS:
        times = f" x {repeats:,} (batches or slices)" if repeats > 1 else ""
        raise ScheduleError(
            f"{name} with {stages:,} stages x {micro_batches:,} micro-batches{times} has at least "
            f"{2 * forwards:.3g} ops, which take {2 * forwards * _OP_BYTES / 1e9:.3g} GB: stages x "
            f"micro-batches may be {MAX_FORWARDS:,} at most. Use larger micro-batches, or fewer "
            "stages"
        )


def check_ops(name: str, programs: Iterable[Iterable[tuple[str, int, int]]]) -> None:
    """Refuse programs whose ops name more stages and micro-batches than a schedule can have.

    Args:
        name: of the schedule, for the message.
        programs: of each rank, its ops as (kind, stage, micro-batch).

    Raises:
        ScheduleError: they do.
    """
    stages = micro_batches = 0
    for program in programs:
        for _, stage, micro_batch in program:
            stages = max(stages, stage + 1)
            micro_batches = max(micro_batches, micro_batch + 1)
    check_size(name, stages, micro_batches)
