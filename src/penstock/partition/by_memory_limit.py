"""The exact partition under a memory limit, from a profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

import numpy as np

from penstock.errors import PartitionError
from penstock.partition.bottleneck import transfer_of
from penstock.partition.by_time import samples_of
from penstock.partition.catalogue import register
from penstock.partition.limited import bytes_per_stage, least_excess, limited
from penstock.partition.validation import check_costs, check_number, refuse_unknown
from penstock.profile.profile import Profile
from penstock.units import format_bytes


class Options(TypedDict, total=False):
    """Keyword arguments of `by_limit`; its docstring describes them."""

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
    """Minimise the bottleneck under memory limits with `limited`.

    Costs are the layers' forward and backward seconds, and their bytes.

    A layer occupies its weights, their gradients, the optimizer state and buffers, and in addition
    its activations for every micro-batch in flight.

    Options:
        memory_limit: bytes of a rank, or one number per stage. None is no limit.
        in_flight: per stage, the maximum number of micro-batches in flight. None is that of 1F1B:
            the number of stages from this one to the last.
        micro_batch: samples; None is the largest size that was measured.
        optimizer_states: optimizer state per parameter: 0 for SGD, 1 with momentum (the default), 2
            for Adam.
        bandwidth_bytes_per_s, latency_s, overlap: as in `bottleneck`.

    Raises:
        PartitionError: no cut fits (the message describes the nearest one), or an option is out of
            range.
    """
    refuse_unknown("limited", options, OPTIONS)
    samples = samples_of(profile, options.get("micro_batch"))
    states = check_number("optimizer_states", options.get("optimizer_states", 1), zero=True)
    # A parameter, its gradient, and the optimizer's state.
    fixed_bytes = [layer.parameter_bytes * (2 + states) + layer.buffer_bytes for layer in profile]
    saved_bytes = [layer.activation_bytes_per_sample * samples for layer in profile]
    requested_in_flight = options.get("in_flight")
    if requested_in_flight is None:
        in_flight = [float(stages - stage) for stage in range(stages)]
    else:
        in_flight = check_costs(requested_in_flight, "in_flight", stages).tolist()
    limits = _limits(options.get("memory_limit"), stages)
    links = {
        name: options[name] for name in ("bandwidth_bytes_per_s", "latency_s") if name in options
    }
    transfer = transfer_of(profile, samples, links)  # type: ignore[arg-type]
    lengths = limited(
        profile.step_seconds(samples),
        transfer,
        fixed_bytes,
        saved_bytes,
        in_flight,
        limits,
        overlap=options.get("overlap", True),
    )
    if lengths is not None:
        return lengths
    nearest = least_excess(fixed_bytes, saved_bytes, in_flight, limits)
    required = bytes_per_stage(nearest, fixed_bytes, saved_bytes, in_flight)
    worst = int(np.argmax(np.subtract(required, limits)))
    raise PartitionError(
        f"no cut into {stages} stages fits: in the nearest one, {nearest}, stage {worst} needs "
        f"{format_bytes(required[worst])} and has {format_bytes(limits[worst])}. Use more stages, "
        f"a smaller micro-batch or fewer micro-batches in flight"
    )


def _limits(memory_limit: float | Sequence[float] | None, stages: int) -> list[float]:
    """Return the memory limit of every stage's rank in bytes."""
    if memory_limit is None:
        return [np.inf] * stages
    is_list = isinstance(memory_limit, Sequence) and not isinstance(memory_limit, str)
    if is_list or np.ndim(memory_limit):
        entries: Sequence[float] = memory_limit  # type: ignore[assignment]
        limits = [check_number("memory_limit", entry) for entry in entries]
        if len(limits) != stages:
            raise PartitionError(
                f"memory_limit has {len(limits)} entries, but {stages} stages are requested"
            )
        return limits
    return [check_number("memory_limit", memory_limit)] * stages
