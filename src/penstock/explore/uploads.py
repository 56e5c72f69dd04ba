"""From the files of a profile or a plan to a state of the page.

Nothing of a file is stored: its numbers become fields of the page, and so part of the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.cluster.cluster import cluster
from penstock.errors import FileError, PenstockError
from penstock.explore.choices import choice
from penstock.explore.evaluate import (
    BOUNDARY_COSTS,
    STAGE_BYTES,
    STAGE_SECONDS,
    evaluate,
    stages_per_rank,
)
from penstock.explore.state import (
    MAX_MICRO_BATCHES,
    MAX_RANKS,
    MAX_REPLICAS,
    RECOMPUTE,
    Choice,
    State,
)
from penstock.files.json_values import json_value
from penstock.partition.catalogue import partition
from penstock.plan.plan import Plan
from penstock.profile.profile import Profile
from penstock.simulate.plan_costs import stage_costs as profile_costs

#: Significant digits of seconds from a profile: measurements have no more, and links stay short.
_DIGITS = 5
_STAGE_COSTS = (*STAGE_SECONDS, *STAGE_BYTES)


@dataclass(frozen=True)
class Upload:
    """A state made from a file.

    Attributes:
        state: the state.
        message: what was read, and what was left out.
    """

    state: State
    message: str


def state_of_files(state: State, files: Sequence[tuple[str, str]]) -> Upload:
    """Return a state with the content of a profile, of a plan, or of both.

    A plan sets the schedule, ranks, micro-batches and recompute. A profile sets the costs: its
    layers are cut as the plan says, otherwise into one part per rank with balanced times.

    Args:
        state: what the page shows; fields that the files do not have stay.
        files: names and texts.

    Raises:
        FileError: a text is neither a profile nor a plan, or does not fit the page.
    """
    profile: Profile | None = None
    plan: Plan | None = None
    for name, text in files:
        if _is_plan(text, name):
            plan = Plan.parse(text, name)
        else:
            profile = Profile.parse(text, name)
    messages = []
    if plan is not None:
        state, message = _with_plan(state, plan)
        messages.append(message)
    if profile is not None:
        state, message = _with_profile(state, profile, plan)
        messages.append(message)
    elif plan is not None:
        messages.append("A plan has no costs per layer: open its profile too to see them.")
    return Upload(state, " ".join(messages))


def _is_plan(text: str, name: str) -> bool:
    """Return whether a text is a plan rather than a profile.

    Raises:
        FileError: it is neither.
    """
    content = json_value(text, name)
    keys = content if isinstance(content, dict) else {}
    if "programs" in keys:
        return True
    if "layers" in keys:
        return False
    raise FileError(
        f"{name} is neither a profile nor a plan: open a file that `penstock profile` or "
        "`penstock plan` wrote"
    )


def _with_plan(state: State, plan: Plan) -> tuple[State, str]:
    """Return a state with the schedule of a plan, and a message.

    Raises:
        FileError: the page cannot show the plan.
    """
    try:
        entry = choice(plan.schedule_name)
    except PenstockError as error:
        raise FileError(f"the page cannot show the plan: {error}") from error
    stored_replicas = dict(plan.schedule_options).get("replicas")
    replicas = (
        stored_replicas if isinstance(stored_replicas, tuple) else (int(stored_replicas or 1),)
    )
    field_names = {field.name for field in entry.fields} - {"replicas"}
    options = tuple(
        (name, value)
        for name, value in plan.schedule_options
        if name in field_names and value is not None
    )
    per_rank = stages_per_rank(entry.facts.name, entry.structural(options))
    ranks, rest = divmod(plan.stages, per_rank)
    within = (
        rest == 0
        and 1 <= ranks <= MAX_RANKS
        and plan.micro_batches <= MAX_MICRO_BATCHES
        and max(replicas) <= MAX_REPLICAS
    )
    if not within:
        raise FileError(
            f"the plan has {plan.stages} stages and {plan.micro_batches} micro-batches, which the "
            f"page cannot show: at most {MAX_RANKS} ranks and {MAX_MICRO_BATCHES} micro-batches"
        )
    limits = set(plan.memory_limits)
    new_state = replace(
        state,
        ranks=ranks,
        micro_batches=plan.micro_batches,
        replicas=replicas,
        a=Choice(entry.facts.name, options),
        recompute=plan.recompute.value if plan.recompute.value in RECOMPUTE else "never",
        memory_limit=min(limits) if limits else state.memory_limit,
        **_fitting_costs(state, ranks),
    )
    return new_state, _plan_message(plan, new_state)


def _plan_message(plan: Plan, state: State) -> str:
    """Return what the page says about a plan: its numbers, and what the page does not show of it.

    Args:
        plan: the plan.
        state: the state of the page that shows it.
    """
    message = f"Plan: {plan.schedule_name}, {plan.stages} stages on {plan.ranks} ranks."
    if plan.recompute.value not in RECOMPUTE:
        message += f" Its recompute policy {plan.recompute} is not shown."
    result = evaluate(state)[0].result
    if result is None or result.whole.programs != plan.schedule.programs:
        message += (
            " Its programs are not those that the name of its schedule gives here; `penstock "
            "draw` shows them as they are."
        )
    return message


def _fitting_costs(state: State, ranks: int) -> dict[str, Any]:
    """Return the costs to change because they were one per rank of another number of ranks."""
    changes: dict[str, Any] = {}
    for name in (*_STAGE_COSTS, *BOUNDARY_COSTS):
        values = getattr(state, name)
        if values is not None and len(values) > 1 and ranks != state.ranks:
            # Of all costs only that of the forward has to have a value.
            changes[name] = (1.0,) if name == "forward" else None
    return changes


def _with_profile(state: State, profile: Profile, plan: Plan | None) -> tuple[State, str]:
    """Return a state with the costs of a profile, and a message.

    Raises:
        FileError: the profile has too few layers, or is not that of the plan.
    """
    if plan is not None:
        if plan.layers != len(profile):
            raise FileError(
                f"the plan is for {plan.layers} layers and the profile has {len(profile)}: "
                "open the profile from which the plan was made"
            )
        lengths, batch = list(plan.lengths), plan.batch
    else:
        if len(profile) < state.ranks:
            raise FileError(
                f"the profile has {len(profile)} layers, fewer than the {state.ranks} ranks: "
                f"choose at most {len(profile)} ranks first"
            )
        lengths, batch = partition(profile, stages=state.ranks, by="bottleneck"), profile.batch
    samples = batch / state.micro_batches
    # The links of this machine have no effect: the page has fields for them.
    costs = profile_costs(
        profile,
        lengths,
        samples,
        cluster(f"local:{len(lengths)}"),
        micro_batches=state.micro_batches,
    )
    amounts: dict[str, Any] = {}
    for name in _STAGE_COSTS:
        amounts[name] = _rounded(name, costs.spread(name, len(lengths)))
    boundaries = _rounded("boundary_bytes", costs.spread("boundary_bytes", len(lengths) - 1))
    amounts["boundary_bytes"] = boundaries or state.boundary_bytes
    new_state = replace(state, **amounts)
    cut = ", ".join(map(str, lengths))
    message = (
        f"Profile: {len(profile)} layers in {len(lengths)} parts of {cut} layers, with "
        f"{samples:g} of {batch} samples per micro-batch."
    )
    if new_state.b is not None and len(lengths) not in (state.ranks, _stages(state, new_state.b)):
        message += f" {new_state.b.schedule} has another number of stages, and is left out."
        new_state = replace(new_state, b=None)
    return new_state, message


def _stages(state: State, selected: Choice) -> int:
    """Return the number of stages of a schedule with the ranks of the page."""
    entry = choice(selected.schedule)
    options = tuple({**dict(entry.defaults), **dict(selected.options)}.items())
    return state.ranks * stages_per_rank(selected.schedule, entry.structural(options))


def _rounded(name: str, values: Sequence[float] | None) -> tuple[float, ...] | None:
    """Return whole bytes, or seconds with few digits; None if there are no values."""
    if not values:
        return None
    if name.endswith("_bytes"):
        return tuple(float(round(value)) for value in values)
    return tuple(float(f"{value:.{_DIGITS}g}") for value in values)
