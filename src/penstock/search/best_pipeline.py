"""The best pipeline beside a plan that is none, such as data parallelism."""

from __future__ import annotations

import math

from penstock.schedule.op import Schedule
from penstock.search.cut_search.explore_cuts import explore_cuts
from penstock.search.instantiate import Evaluated, best
from penstock.search.plan_search import PlanSearch
from penstock.search.search_space import Configuration, SearchSpace

#: Maximum number of ops simulated in the usual budget to find a pipeline, where the search skipped
#: all that could not win.
WORK = 150_000


def is_pipeline(schedule: Schedule) -> bool:
    """Return whether the ranks hold different stages: no rank holds the whole model.

    Replicas of one stage are no pipeline; neither is Chimera on two ranks, each of which holds both
    stages.
    """
    return all(len(stages) < schedule.stages for stages in schedule.stages_of_rank)


def best_pipeline(search: PlanSearch, space: SearchSpace, chosen: Evaluated) -> Evaluated | None:
    """Return the fastest pipeline that fits, if `chosen` is none; else None.

    Pipelines that cannot win are mostly not simulated: the most promising ones are simulated here,
    for comparison only.
    """
    if is_pipeline(chosen.placed.schedule):
        return None
    only_pipelines = PlanSearch(search.request)
    only_pipelines.allow(WORK)
    feasible_pipelines = [entry for entry in search.feasible if is_pipeline(entry.placed.schedule)]
    only_pipelines.feasible = list(feasible_pipelines)
    only_pipelines.best_s = min((entry.step_s for entry in feasible_pipelines), default=math.inf)
    configurations = _pipeline_configurations(search, space)
    # One of every schedule first: each is compared before the budget is spent on cuts of a few.
    first_of: dict[str, Configuration] = {}
    for configuration in configurations:
        first_of.setdefault(configuration.schedule, configuration)
    for configuration in first_of.values():
        if only_pipelines.is_over:
            break
        only_pipelines.evaluate_configuration(configuration)
    explore_cuts(only_pipelines, configurations)
    pipelines = [entry for entry in only_pipelines.feasible if is_pipeline(entry.placed.schedule)]
    return best(pipelines) if pipelines else None


def _pipeline_configurations(search: PlanSearch, space: SearchSpace) -> list[Configuration]:
    """Return the configurations of a search space whose ranks hold different stages."""
    # On two ranks each rank of these holds the whole model.
    two_copies = {facts.name for facts in search.request.families() if facts.stages_per_rank == "2"}
    configurations = []
    for configuration in space.configurations:
        ranks, stages = configuration.shape.ranks, configuration.stages
        is_copied = ranks == stages == 2 and configuration.schedule in two_copies
        if ranks > 1 and not is_copied:
            configurations.append(configuration)
    return configurations


def pipeline_note(chosen: Evaluated, pipeline: Evaluated) -> str:
    """Return why `chosen`, which is no pipeline, is faster than the best pipeline."""
    schedule = chosen.placed.schedule
    bubble, pipeline_bubble = (
        0.0 if entry.steady_state is None else entry.steady_state.bubble_ratio
        for entry in (chosen, pipeline)
    )
    limit = f"the pipeline is limited by {pipeline.bottleneck}"
    if schedule.ranks == 1:
        return f"one rank alone is faster: {limit}"
    return (
        "the plan above is faster because each of its ranks holds the whole model: no activations "
        f"cross, and a rank idles for {bubble:.0%} of the step instead of {pipeline_bubble:.0%}; "
        f"{limit}"
    )
