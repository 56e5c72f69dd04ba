"""1F1B (one forward, one backward): warm up, alternate, drain."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import register
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.replicas import round_robin, start_up


@register(
    "1f1b",
    aliases=("dapple", "pipedream-flush", "1f1b-as", "1f1b-sno"),
    synchronous=True,
    stages_per_rank="1",
    splits_backward=False,
    source="Narayanan et al. 2021, PipeDream-Flush, section 3.4; Fan et al. 2021, DAPPLE, policy "
    "A; Zhao et al. 2020, BaPipe, 1F1B-AS and 1F1B-SNO; with warm_up: Chen et al. 2023, AvgPipe, "
    "advance forward propagation; with replicas per stage: Narayanan et al. 2019, PipeDream, "
    "section 3.2, 1F1B-RR, with a flush",
)
def one_f_one_b(
    stages: int,
    micro_batches: int,
    warm_up: Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
) -> Schedule:
    """Run K_s forwards on stage s, then alternate backwards and forwards, then drain.

    K_s is p - s, or `warm_up[s]`. It selects a member of a family of schedules
    (docs/literature/one-f-one-b.md):
        K_s = 1                 naive
        K_s = p - s             1F1B
        K_s = 2(p - s) - 1      eager 1F1B, which hides the time of transfers: `eager-1f1b`
        K_s = m                 GPipe

    Facts for equal costs f and b and free links, p stages, m micro-batches:
        makespan            (m + p - 1)(f + b), with any K_s of p - s or more that decreases from
                            stage to stage
        in flight           min(m, K_s) on stage s
    With c seconds per transfer, and K_s = p - s (BaPipe's 1F1B-SNO):
        makespan            (m + p - 1)(f + b) + (m + p - 2 - ceil((m - 1) / p)) 2c

    >>> print(one_f_one_b(3, 4))
    rank 0 | 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0U1
    rank 1 | 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 1U1
    rank 2 | 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2U1
    >>> print(one_f_one_b(3, 4, warm_up=(4, 2, 2)))
    rank 0 | 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 0U1
    rank 1 | 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 1U1
    rank 2 | 2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3 2U1

    With k ranks for stage s, which take its micro-batches in turn (PipeDream's 1F1B-RR), K_s is
    PipeDream's start-up rule: k(w + 1), w = floor((R - 1 - ranks before) / k) of R ranks, so that
    each rank runs w + 1 ahead.

    >>> print(one_f_one_b(2, 4, replicas=(2, 1)))
    rank 0 | 0F0 0F2 0B0 0B2 0U1
    rank 1 | 0F1 0F3 0B1 0B3 0U1
    rank 2 | 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1U1

    Args:
        stages: number of stages.
        micro_batches: micro-batches per batch.
        warm_up: forwards that each stage runs before its first backward, at least 1, and not more
            than on the previous stage. Numbers above that of micro-batches count as all of them.
            With `replicas`, the sum over the stage's ranks.
        replicas: number of ranks of each stage; one by default.

    Raises:
        ScheduleError: `warm_up` has another length, or would deadlock.
    """
    if warm_up is None:
        warm_up = start_up(replicas or (1,) * stages)
    ahead = forwards_ahead("1f1b", stages, warm_up, micro_batches)
    programs = []
    for stage, number in enumerate(ahead):
        ops = alternating(stage, range(micro_batches), number)
        programs.append((*ops, Op(Kind.U, stage, 1)))
    schedule = Schedule(tuple(programs), "1f1b")
    return schedule if replicas is None else round_robin(schedule, replicas)


def alternating(stage: int, micro_batches: Sequence[int], ahead: int) -> list[Op]:
    """Return the 1F1B program of one stage, without updates.

    It has `ahead` forwards, then one backward and one forward in turn, then the remaining
    backwards.

    >>> print(*alternating(0, [1, 3, 5], ahead=2))
    0F1 0F3 0B1 0F5 0B3 0B5
    """
    ops = [Op(Kind.F, stage, m) for m in micro_batches[:ahead]]
    for place, m in enumerate(micro_batches):
        ops.append(Op(Kind.B, stage, m))
        if ahead + place < len(micro_batches):
            ops.append(Op(Kind.F, stage, micro_batches[ahead + place]))
    return ops


def forwards_ahead(
    name: str, stages: int, warm_up: Sequence[int], micro_batches: int | None = None
) -> list[int]:
    """Check `warm_up` and limit it to the number of micro-batches.

    Args:
        name: the schedule, for messages.
        stages: number of stages.
        warm_up: forwards that each stage runs before its first backward.
        micro_batches: number of micro-batches; None for a stream, which has no end.

    Raises:
        ScheduleError: `warm_up` does not have one number per stage, or would deadlock.
    """
    if len(warm_up) != stages:
        raise ScheduleError(
            f"{name} in {stages} stages takes a warm_up of {stages} numbers, one per stage, "
            f"not {len(warm_up)}"
        )
    for stage, number in enumerate(warm_up):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ScheduleError(
                f"{name} runs at least 1 forward before the first backward, but warm_up has "
                f"{number!r} for stage {stage}"
            )
    ahead = [number if micro_batches is None else min(micro_batches, number) for number in warm_up]
    for stage in range(1, stages):
        # Stage s - 1 runs forward K_{s-1} only after its first backward, which waits for the first
        # backward of stage s.
        if ahead[stage] > ahead[stage - 1]:
            raise ScheduleError(
                f"{name} would deadlock: stage {stage} needs {ahead[stage]} forwards before its "
                f"first backward, but stage {stage - 1} passes on {ahead[stage - 1]} before it "
                "waits for that backward; warm_up must not increase from one stage to the next"
            )
    return ahead
