"""The exact cut among those that fit in memory, from a profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

import numpy as np

from penstock.errors import PartitionError
from penstock.partition.bottleneck import transfer_of
from penstock.partition.by_time import samples_of
from penstock.partition.catalogue import register
from penstock.partition.checks import check_costs, check_number, refuse_unknown
from penstock.partition.limited import bytes_per_stage, least_excess, limited
from penstock.profile.profile import Profile
from penstock.units import format_bytes


class Options(TypedDict, total=False):
    """What `by_limit` takes besides the profile and the number of stages; its docstring explains
    each.
    """

    memory_limit: float | Sequence[float] | None
    in_flight: Sequence[float] | None
    micro_batch: float | None
    optimizer_states: int
    bandwidth_bytes_per_s: float | None
    latency_s: float
    overlap: bool


OPTIONS = tuple(Options.__annotations__)


@register(
    "limited",
    options=OPTIONS,
    source="Penstock; the recurrence of Narayanan et al. 2019, PipeDream, section 3.1",
)
def by_limit(profile: Profile, stages: int, **options: Unpack[Options]) -> list[int]:
    """Stage lengths that `limited` finds for the layers' forward and backward seconds and bytes.

    A layer holds its weights, their gradients, the optimizer's numbers and buffers, and keeps its
    activations for every micro-batch in flight.

    Options:
        memory_limit: bytes that each rank has, or one number for each stage. None is no limit.
        in_flight: micro-batches that each stage has in flight at most. None is 1F1B's: as many as
        there are stages from it on. micro_batch: samples; None is the largest size that was
        measured. optimizer_states: numbers that the optimizer keeps for each parameter: 0 for SGD,
        1 with momentum (if not given), 2 for
            Adam.
        bandwidth_bytes_per_s, latency_s, overlap: as of `bottleneck`.

    Raises:
        PartitionError: no cut fits (the message says what comes nearest), or an option is out of
        its range.
    """
    refuse_unknown("limited", options, OPTIONS)
    samples, flying, room = (
        samples_of(profile, options.get("micro_batch")),
        options.get("in_flight"),
        options.get("memory_limit"),
    )
    states = check_number("optimizer_states", options.get("optimizer_states", 1), zero=True)
    holds = [layer.parameter_bytes * (2 + states) + layer.buffer_bytes for layer in profile]
    kept = [layer.activation_bytes_per_sample * samples for layer in profile]
    in_flight = (
        [float(stages - stage) for stage in range(stages)]
        if flying is None
        else check_costs(flying, "in_flight", stages).tolist()
    )
    limits = _limits(room, stages)
    links = {
        name: options[name] for name in ("bandwidth_bytes_per_s", "latency_s") if name in options
    }
    transfer = transfer_of(profile, samples, links)  # type: ignore[arg-type]
    found = limited(
        profile.step_seconds(samples),
        transfer,
        holds,
        kept,
        in_flight,
        limits,
        overlap=options.get("overlap", True),
    )
    if found is not None:
        return found
    nearest = least_excess(holds, kept, in_flight, limits)
    need = bytes_per_stage(nearest, holds, kept, in_flight)
    worst = int(np.argmax(np.subtract(need, limits)))
    raise PartitionError(
        f"no cut into {stages} stages fits: even in {nearest}, which comes nearest, stage {worst} needs {format_bytes(need[worst])} and has "
        f"{format_bytes(limits[worst])}. More stages, a smaller micro-batch or fewer micro-batches in flight would help"
    )


def _limits(room: float | Sequence[float] | None, stages: int) -> list[float]:
    """Bytes of every stage's rank."""
    if room is None:
        return [np.inf] * stages
    if isinstance(room, Sequence) or np.ndim(room):
        each = [check_number("memory_limit", value) for value in room]  # type: ignore[union-attr]
        if len(each) != stages:
            raise PartitionError(
                f"memory_limit has {len(each)} entries, and {stages} stages are asked for"
            )
        return each
    return [check_number("memory_limit", room)] * stages
