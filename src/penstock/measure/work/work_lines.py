"""Work of ops as a line over the number of samples, from counts at two numbers of samples."""

from __future__ import annotations

from dataclasses import replace

from penstock.measure.work.op_work import OpWork
from penstock.profile.counts import Work

#: Micro-batch sizes at which ops are counted. Not 1: with a single sample, batch norm may have
#: nothing to normalise.
SIZES = (2, 4)


def fit_lines(small: list[OpWork], large: list[OpWork]) -> tuple[Work, ...]:
    """Return the work of ops for any number of samples; equal ops are one entry.

    Args:
        small, large: the ops of a phase at either of `SIZES`, in the order of execution.
    """
    if [work.op for work in small] != [work.op for work in large]:
        # The layer runs different code for different sizes: add its ops up by name.
        names = dict.fromkeys(work.op for work in (*small, *large))
        small = [_total_of_op(name, small) for name in names]
        large = [_total_of_op(name, large) for name in names]
    repeats: dict[Work, int] = {}
    for small_work, large_work in zip(small, large, strict=True):
        line = _line(small_work, large_work)
        repeats[line] = repeats.get(line, 0) + 1
    return tuple(_multiply(work, count) for work, count in repeats.items())


def _line(small: OpWork, large: OpWork) -> Work:
    """Return the line through the work of one op at both sizes."""
    small_size, large_size = SIZES
    added = large_size - small_size
    flops_per_sample = max((large.flops - small.flops) / added, 0.0)
    bytes_per_sample = max((large.bytes - small.bytes) / added, 0.0)
    return Work(
        large.op,
        large.family,
        large.launches,
        large.flops - large_size * flops_per_sample,
        flops_per_sample,
        large.bytes - large_size * bytes_per_sample,
        bytes_per_sample,
    )


def _multiply(work: Work, count: int) -> Work:
    """Return `count` equal ops as one."""
    return replace(
        work,
        launches=count * work.launches,
        flops=count * work.flops,
        flops_per_sample=count * work.flops_per_sample,
        bytes=count * work.bytes,
        bytes_per_sample=count * work.bytes_per_sample,
    )


def _total_of_op(name: str, ops: list[OpWork]) -> OpWork:
    """Return the work of all calls of one op, as one."""
    works = [work for work in ops if work.op == name]
    family = works[0].family if works else "other"
    return OpWork(
        name,
        family,
        max(sum(work.launches for work in works), 1),
        sum(work.flops for work in works),
        sum(work.bytes for work in works),
    )
