"""HetPipe: several pipelines with weights of their own, which exchange updates once per wave."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import register
from penstock.schedule.families.one_f_one_b import alternating
from penstock.schedule.families.pipedream import enough_batches, falling
from penstock.schedule.op import Program, Schedule
from penstock.schedule.streaming.streams import Stream, Waves
from penstock.schedule.updates import with_batch_updates


@register(
    "hetpipe",
    synchronous=False,
    stages_per_rank="1",
    splits_backward=False,
    weights="hetpipe",
    source="Park et al. 2020, HetPipe (arXiv 2005.14038), virtual workers and wave synchronous "
    "parallelism",
)
def hetpipe(
    stages: int,
    micro_batches: int,
    virtual_workers: int = 2,
    in_flight: int | None = None,
    distance: int = 0,
    batches: int | None = None,
) -> Schedule:
    """Run batch t on virtual worker t mod W, a pipeline of p ranks in the order of `pipedream`.

    A virtual worker has at most N_m micro-batches in flight, and updates its own weights after each
    of its batches. N_m batches are a wave: with its last update, a virtual worker sends the updates
    of the wave to the others (wave synchronous parallelism), and waits for their waves up to
    `distance` waves before.

    Facts for equal costs f and b and free links, p stages, m micro-batches, W virtual workers:
        per W batches       m(f + b) ceil(p/N_m): no bubble in the steady state, if N_m >= p
        in flight           N_m - s micro-batches on stage s, or with N_m < p, ceil((p - s)N_m/p)
        local staleness     at most the last N_m - 1 updates of its own virtual worker are missing
                            in the weights that a micro-batch reads
        global staleness    with m = 1, at most the last (D + 1)N_m + N_m - 2 of the others'
        versions            equal to the micro-batches in flight with m = 1 (rule `hetpipe`)

    >>> print(hetpipe(2, 1, batches=6))
    rank 0 | 0F0 0F2 0B0 0U1 0F4 0B2 0U2 0B4 0U3
    rank 1 | 1F0 1B0 1U1 1F2 1B2 1U2 1F4 1B4 1U3
    rank 2 | 0F1 0F3 0B1 0U1 0F5 0B3 0U2 0B5 0U3
    rank 3 | 1F1 1B1 1U1 1F3 1B3 1U2 1F5 1B5 1U3

    If `distance` is 0, the copies of a stage run a U whose version is a multiple of N_m together;
    see `updates.awaited_update`.

    Args:
        stages: number of stages.
        micro_batches: micro-batches per batch; the paper's minibatch is a batch of one.
        virtual_workers: number of pipelines (W); rank r of virtual worker w is rank w * stages + r.
        in_flight: N_m, at least 1; `stages` by default.
        distance: D, how many waves a virtual worker may be ahead of the others, at least 0.
        batches: number of batches in the programs; by default enough to show how they repeat.

    Raises:
        ScheduleError: a number is out of range.
    """
    wave_length = stages if in_flight is None else in_flight
    _check_integer("virtual_workers", virtual_workers, 1)
    _check_integer("in_flight", wave_length, 1)
    _check_integer("distance", distance, 0)
    if wave_length >= stages:
        ahead = [wave_length - stage for stage in range(stages)]
    else:
        ahead = falling(stages, wave_length)
    if batches is None:
        max_in_flight = virtual_workers * ahead[0]
        batches = enough_batches(max_in_flight, micro_batches, period=virtual_workers)
    stream = Stream(batches, "hetpipe", waves=Waves(wave_length, distance))

    def program(virtual_worker: int, stage: int) -> Program:
        worker_batches = range(virtual_worker, stream.batches, virtual_workers)
        numbers = [t * micro_batches + m for t in worker_batches for m in range(micro_batches)]
        return with_batch_updates(alternating(stage, numbers, ahead[stage]), micro_batches)

    programs = tuple(
        program(virtual_worker, stage)
        for virtual_worker in range(virtual_workers)
        for stage in range(stages)
    )
    return Schedule(programs, "hetpipe", synchronous=False, stream=stream)


def _check_integer(option: str, number: object, minimum: int) -> None:
    """Refuse an option that is not a whole number of `minimum` or more."""
    if isinstance(number, bool) or not isinstance(number, int) or number < minimum:
        raise ScheduleError(f"hetpipe takes {option} of {minimum} or more, not {number!r}")
