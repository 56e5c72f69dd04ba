"""HetPipe: virtual workers, each a pipeline, that exchange their updates in waves."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.op import Schedule
from penstock.weights.catalogue import register
from penstock.weights.rule_types import Place, Reads


def _check(schedule: Schedule) -> None:
    """Check that the schedule is a stream with waves."""
    stream = schedule.stream
    if stream is None or stream.waves is None or stream.pipelines > 1:
        raise ScheduleError(
            "weight rule 'hetpipe' is for copies of stages that exchange their updates in waves, "
            f"and {schedule.name} has none: take the schedule 'hetpipe'"
        )


@register(
    "hetpipe",
    synchronous=False,
    arithmetic="waves",
    extra=1.0,
    check=_check,
    source="Park et al. 2020, HetPipe, sections 4 and 5: pipelined model parallelism, wave "
    "synchronous parallel",
)
def hetpipe(place: Place) -> Reads:
    """Read the newest version of the virtual worker in the forward, and the same in the backward.

    A wave is Nm = s_local + 1 batches of a virtual worker, the maximum that it has in flight. With
    the last U of its c-th wave, from 0, it sends ũ, the sum of the wave's own updates, and applies
    those of the others up to wave c - D; D >= 0 is the distance. So at most s_local of the earlier
    batches of its own virtual worker are missing in a batch's weights, and at most

        s_global = (D + 1)(s_local + 1) + s_local - 1

    of any other's, counted up to its own number; `verify` reports both. In 1F1B with one
    micro-batch per batch, stage s of p keeps p - s versions, as with `stash`, and in addition the
    weights at the beginning of the wave. Each virtual worker has an optimizer of its own.

    The paper's parameter servers add ũ in the order of arrival; here sums are added in the order of
    ranks, so that runs can be repeated. A virtual worker applies at the end of its own wave what
    the paper's pulls when the distance forces it to. Refused: more batches in flight than a wave
    has.
    """
    return Reads(place.at_forward, place.at_forward)
