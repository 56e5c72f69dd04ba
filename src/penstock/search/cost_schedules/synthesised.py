"""The shortest program that a search finds for given costs."""

from __future__ import annotations

from dataclasses import fields

from penstock.schedule.op import Schedule
from penstock.schedule.options import option_error
from penstock.search.schedules import register
from penstock.simulate.costs import Costs


@register(
    "synthesised",
    synchronous=True,
    stages_per_rank="1, or as placement says",
    splits_backward=True,
    source="ours: list scheduling (Giffler and Thompson 1960), annealing on the critical path (Nowicki and Smutnicki 1996), "
    "bounds after Carlier 1982, proofs by OR-Tools' CP-SAT; in the place of the automatic "
    "schedules of Qi et al. 2024 (arXiv 2401.10241), section 3",
)
def synthesised(costs: Costs, micro_batches: int, **settings: object) -> Schedule:
    """The shortest schedule found for these costs within a limit on memory; never longer than the
    best schedule of the zoo.

    The search starts from every synchronous schedule of the zoo that has the requested placement
    and fits the limit, and from list scheduling by many rules. It continues by moving ops of the
    critical path and shifting due times. Whole backwards and halves (I and W) may be in one
    program; a split backward costs what I and W cost. The schedule's `options` carry `makespan`,
    `lower_bound`, `gap` (makespan / lower_bound - 1), `proved` and more: see `Synthesis`.

    >>> shortest = synthesised(Costs(forward=[1, 3, 1]), 3, max_rounds=0)
    >>> print(dict(shortest.options)["makespan"])
    28.0

    Args:
        costs: seconds per stage and boundary, `forward` with an entry for every stage.
        micro_batches: micro-batches per batch.
        settings: of these:
            memory_limit: the most that a rank may hold, one number for all or one per rank; None
                for no limit. A rank holds a micro-batch, once for each of its stages, from the
                start of F to the end of B or W there. It counts as the `activation_bytes` of the
                stage if the costs have them ("2 GiB" is fine then), else as 1. Weights do not
                count.
            placement: "linear", a stage on every rank; "interleaved", stage s on rank s mod
                `ranks`; "v", stages s and S - 1 - s on rank s; "bidirectional", every stage on
                ranks s and S - 1 - s, each micro-batch going one way; or "any", the best of these.
            ranks: number of ranks; by default half the stages for "interleaved". Other placements
                allow one number only.
            split: whether backwards may be split into I and W.
            exact: prove the optimum by OR-Tools' CP-SAT in the rest of the budget. If that does not
                suffice, the best program and CP-SAT's bound are returned, and `proved` is False.
            budget_s: budget of the search; 5 by default. The number of rounds follows from it, 20
                for every second, so that the same seed gives the same schedule on a busy machine.
                As a limit in seconds it is a hard stop: `options` then carry `cut_short`. The
                seconds in which the search compiles its loops, once on a machine, do not count. It
                ends earlier when the lower bound is reached.
            max_rounds: rounds after which it ends, in place of those that follow from the budget.
            seed: seed of the random numbers.

    Raises:
        ScheduleError: no program fits the limit, or the placement does not allow these numbers of
            stages, ranks and micro-batches.
        SettingError: the costs do not fit together, or a limit is a text that is no amount of
            bytes.
        MissingExtra: exact=True without OR-Tools (pip install 'penstock[search]').
    """
    # The search imports Numba, which lists and completion of schedules do not need.
    from penstock.synthesis.synthesise import Settings, synthesise

    try:
        search_settings = Settings(**settings)  # type: ignore[arg-type]  # checked by Settings
    except TypeError as error:
        valid_names = [field.name for field in fields(Settings)]
        raise option_error("synthesised", settings, valid_names, error) from error
    return synthesise(costs, micro_batches, search_settings).schedule
