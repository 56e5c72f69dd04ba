"""HetPipe: virtual workers, pipelines of their own, that tell each other in waves what they have
changed.
"""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.op import Schedule
from penstock.weights.catalogue import register
from penstock.weights.reads import Place, Reads


def _check(schedule: Schedule) -> None:
    stream = schedule.stream
    if stream is None or stream.waves is None or stream.pipelines > 1:
        raise ScheduleError(
            f"weight rule 'hetpipe' is for copies of stages that tell each other in waves what they have changed, and "
            f"{schedule.name} has none: take the schedule 'hetpipe'"
        )


@register(
    "hetpipe",
    synchronous=False,
    arithmetic="waves",
    extra=1.0,
    check=_check,
    source="Park et al. 2020, HetPipe, sections 4 and 5: pipelined model parallelism, wave synchronous parallel",
)
def hetpipe(place: Place) -> Reads:
    """In its virtual worker a forward reads the newest version, and its backward that same one.

    A wave is Nm = s_local + 1 batches of a virtual worker, as many as it has in flight at most.
    With its c-th wave's last U, from 0, it hands on ũ, the sum of the wave's own updates, and takes
    in those of the others up to wave c - D; D >= 0 is the distance. So a batch lacks at most
    s_local of its own virtual worker's batches before it, and at most

        s_global = (D + 1)(s_local + 1) + s_local - 1

    of any other's, counted up to its own number; `verify` reports both. In 1F1B with one
    micro-batch per batch, stage s of p keeps p - s versions, as with `stash`; the weights at the
    wave's beginning come on top. Each virtual worker has an optimizer of its own.

    The paper's parameter servers add ũ in the order in which they come; here sums are added in the
    order of ranks, so that runs can be repeated, and a virtual worker takes in at its own wave's
    end what the paper's pulls when the distance forces it to. Refused: more batches in flight than
    a wave has.
    """
    return Reads(place.at_forward, place.at_forward)
