"""HetPipe: several pipelines, each with weights of its own, that tell each other only once in a
wave.
"""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import register
from penstock.schedule.families.one_f_one_b import alternating
from penstock.schedule.families.pipedream import enough_batches, falling
from penstock.schedule.op import Program, Schedule
from penstock.schedule.stream import Stream, Waves
from penstock.schedule.updates import with_updates_of_batches


@register(
    "hetpipe",
    synchronous=False,
    stages_per_rank="1",
    splits_backward=False,
    weights="hetpipe",
    source="Park et al. 2020, HetPipe (arXiv 2005.14038), virtual workers and wave synchronous parallelism",
)
def hetpipe(
    stages: int,
    micro_batches: int,
    virtual_workers: int = 2,
    in_flight: int | None = None,
    distance: int = 0,
    batches: int | None = None,
) -> Schedule:
    """Batch t runs on virtual worker t mod W, a pipeline of p ranks of its own, in the order of
    `pipedream`.

    A virtual worker has at most N_m micro-batches in flight, and updates its own weights after each
    of its batches. N_m batches are a wave: with the last update of each the virtual workers hand
    each other what they have learned in it (wave synchronous parallelism), and wait for what the
    others have learned up to `distance` waves before.

    Facts for equal costs f and b and free links, p stages, m micro-batches, W virtual workers:
        per W batches       m(f + b) ceil(p/N_m): no bubble once it is full, if N_m >= p
        in flight           N_m - s micro-batches on stage s, or with N_m < p, ceil((p - s)N_m/p)
        local staleness     a micro-batch reads all but the last N_m - 1 updates of its own virtual
                            worker, or fewer
        global staleness    with m = 1, all but the last (D + 1)N_m + N_m - 2 of the others', or
                            fewer
        versions            as many as micro-batches in flight with m = 1 (rule `hetpipe`)

    >>> print(hetpipe(2, 1, batches=6))
    rank 0 | 0F0 0F2 0B0 0U1 0F4 0B2 0U2 0B4 0U3
    rank 1 | 1F0 1B0 1U1 1F2 1B2 1U2 1F4 1B4 1U3
    rank 2 | 0F1 0F3 0B1 0U1 0F5 0B3 0U2 0B5 0U3
    rank 3 | 1F1 1B1 1U1 1F3 1B3 1U2 1F5 1B5 1U3

    The U of a stage with a version that is a multiple of N_m is a meeting of its copies if
    `distance` is 0; see `updates.met_by`.

    Args:
        stages: number of stages.
        micro_batches: micro-batches per batch; the paper's minibatch is a batch of one.
        virtual_workers: pipelines (W); rank r of virtual worker w is rank w * stages + r.
        in_flight: N_m, at least 1; `stages` if not given.
        distance: D, how many waves a virtual worker may be ahead of the others, at least 0.
        batches: how many of them the programs run; enough to show how they repeat, if not given.

    Raises:
        ScheduleError: the numbers are others.
    """
    most = stages if in_flight is None else in_flight
    for word, number, least in (
        ("virtual_workers", virtual_workers, 1),
        ("in_flight", most, 1),
        ("distance", distance, 0),
    ):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ScheduleError(f"hetpipe takes {word} of {least} or more, not {number!r}")
    ahead = [most - stage for stage in range(stages)] if most >= stages else falling(stages, most)
    count = (
        enough_batches(virtual_workers * ahead[0], micro_batches, period=virtual_workers)
        if batches is None
        else batches
    )
    stream = Stream(count, "hetpipe", waves=Waves(most, distance))

    def program(virtual_worker: int, stage: int) -> Program:
        own = range(virtual_worker, stream.batches, virtual_workers)
        numbers = [batch * micro_batches + m for batch in own for m in range(micro_batches)]
        return with_updates_of_batches(alternating(stage, numbers, ahead[stage]), micro_batches)

    programs = tuple(
        program(virtual_worker, stage)
        for virtual_worker in range(virtual_workers)
        for stage in range(stages)
    )
    return Schedule(programs, "hetpipe", synchronous=False, stream=stream)
