"""Explain a difference between predicted and measured step by what was measured.

A prediction is the profile's seconds, put together by the simulator. Where a step takes clearly
longer or shorter, the conditions differed between profile and run. Each condition that was recorded
in both is compared, and its effect on the step is estimated from its own figures; it counts as a
cause if it explains a fair part of the difference. Nothing is guessed: without such a condition the
text says that no cause was measured, and what was compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.event import Timeline
from penstock.profile.conditions import Conditions
from penstock.units import format_bytes, format_seconds

#: Relative differences up to this need no explanation: repeated runs differ by as much.
LARGE_DIFFERENCE = 0.1
#: A condition is a cause if its estimated effect is at least this part of the difference.
_LEAST_PART = 0.2
#: Other programs are named also without an estimate if they used this much more of the cores.
_LEAST_OTHER_SHARE = 0.1
#: Largest share of the time that ranks are taken to have lost, so that its effect stays finite.
_MOST_LOST = 0.9


@dataclass(frozen=True)
class Cause:
    """A condition that differed between profile and run.

    Attributes:
        text: what differed, with its figures.
        effect: estimated relative change of the step, such as 0.2 for 20 % longer; None if the
            figures allow no estimate.
    """

    text: str
    effect: float | None


@dataclass(frozen=True)
class Difference:
    """A step that took longer or shorter than predicted by more than `LARGE_DIFFERENCE`.

    Attributes:
        predicted_s, measured_s: seconds of a step.
        parts: where in the step the time is, as a sentence; empty if unknown.
        causes: what was measured that explains it, the largest effect first.
        compared: names of the conditions that were recorded in both.
        recorded: whether profile and run recorded their conditions.
    """

    predicted_s: float
    measured_s: float
    parts: str
    causes: tuple[Cause, ...]
    compared: tuple[str, ...]
    recorded: bool

    @property
    def change(self) -> float:
        """Relative difference; above 0 if the step took longer than predicted."""
        return self.measured_s / self.predicted_s - 1

    def __str__(self) -> str:
        direction = "longer" if self.change > 0 else "shorter"
        measured, predicted = format_seconds(self.measured_s), format_seconds(self.predicted_s)
        change = f"{abs(self.change):.0%} {direction} than predicted"
        sentences = [f"The step was {change}: {measured} instead of {predicted}."]
        if self.parts:
            sentences.append(self.parts)
        sentences.append(self.reason)
        return " ".join(sentences)

    @property
    def reason(self) -> str:
        """The sentences on the causes."""
        if not self.recorded:
            return (
                "Its cause is unknown: the conditions of the machine were not recorded both when "
                "the model was profiled and in the run."
            )
        if not self.causes:
            compared = ", ".join(self.compared)
            return (
                "No cause was measured: these were compared between profile and run, and explain "
                f"less than a fifth of it: {compared}."
            )
        texts = "; ".join(cause.text for cause in self.causes)
        label = "Measured cause" if len(self.causes) == 1 else "Measured causes"
        effects = [cause.effect for cause in self.causes if cause.effect is not None]
        sentence = f"{label}: {texts}."
        if effects:
            # The conditions overlap: a core that other programs use is also waited for. So their
            # effects are not added.
            largest = max(effects, key=abs)
            direction = "longer" if largest > 0 else "shorter"
            sentence += f" This alone can make a step about {abs(largest):.0%} {direction}."
        return sentence


def explain_difference(
    predicted_s: float,
    measured_s: float,
    timelines: tuple[Timeline | None, Timeline | None],
    conditions: tuple[Conditions | None, Conditions | None],
    timeline_step_s: float | None = None,
) -> Difference | None:
    """Explain the difference between a predicted and a measured step; None if it is small.

    Args:
        predicted_s, measured_s: seconds of a step.
        timelines: the predicted and the measured one; None if unknown, or if they are not of one
            step each.
        conditions: of the profile and of the run; None if they were not recorded.
        timeline_step_s: seconds of the step of the measured timeline; None if unknown.
    """
    if predicted_s <= 0 or abs(measured_s / predicted_s - 1) <= LARGE_DIFFERENCE:
        return None
    change = measured_s / predicted_s - 1
    profile, run = conditions
    parts = ""
    if timelines[0] is not None and timelines[1] is not None:
        parts = _parts(timelines[0], timelines[1], timeline_step_s)
    if profile is None or run is None:
        return Difference(predicted_s, measured_s, parts, (), (), recorded=False)
    causes: list[Cause] = []
    compared: list[str] = []
    for name, compare in _COMPARISONS:
        cause = compare(profile, run)
        if cause is None:
            continue
        compared.append(name)
        if _explains(cause, change):
            causes.append(cause)
    causes.sort(key=lambda cause: -abs(cause.effect or 0.0))
    return Difference(predicted_s, measured_s, parts, tuple(causes), tuple(compared), recorded=True)


def _explains(cause: Cause, change: float) -> bool:
    """Return whether a cause explains a fair part of a difference."""
    if cause.effect is None:
        # Comparisons return no estimate only where the condition was clearly worse in the run.
        return change > 0
    return cause.effect * change > 0 and abs(cause.effect) >= _LEAST_PART * abs(change)


def _parts(predicted: Timeline, measured: Timeline, step_s: float | None) -> str:
    """Return where the time of a step is, as a sentence; empty if the timelines do not match.

    The rank is the one whose ops differ most: a step cannot be shorter than its longest rank. Time
    outside the ops is that of the step which the timeline has, and not of the median step.
    """
    if predicted.ranks != measured.ranks or not predicted.ranks:
        return ""
    pairs = list(zip(predicted.busy, measured.busy, strict=True))
    differences = [abs(after - before) for before, after in pairs]
    rank = differences.index(max(differences))
    before, after = pairs[rank]
    idle_before, idle_after = predicted.makespan - before, measured.makespan - after
    busy = f"{format_seconds(after)} (predicted {format_seconds(before)})"
    idle = f"{format_seconds(max(idle_after, 0))} (predicted {format_seconds(max(idle_before, 0))})"
    parts = [f"the ops of rank {rank} took {busy}", f"it was idle for {idle}"]
    if step_s is None:
        return f"In the step, {', '.join(parts)}."
    outside_s = step_s - measured.makespan
    if outside_s > 0.01 * step_s:
        parts.append(f"{format_seconds(outside_s)} were outside all ops (predicted 0 s)")
    return f"In a recorded step of {format_seconds(step_s)}, {', '.join(parts)}."


def _core_wait(profile: Conditions, run: Conditions) -> Cause | None:
    """Compare how long ranks waited for a core while they were ready to run."""
    if profile.core_wait is None or run.core_wait is None:
        return None
    # Ranks beyond the cores wait for each other, which the prediction counts (`Device.together`).
    shared = max(run.processes / run.cores, 1.0) / max(profile.processes / profile.cores, 1.0)
    effect = (1 + run.core_wait) / (1 + profile.core_wait) / shared - 1
    text = (
        f"ranks waited {run.core_wait:.2f} s for a core per second of CPU time, "
        f"{profile.core_wait:.2f} s when profiled"
    )
    return Cause(text, effect)


def _other_load(profile: Conditions, run: Conditions) -> Cause | None:
    """Compare the cores that other programs used.

    What they take from the ranks is measured as waiting for a core; where that is not reported, it
    is estimated as what is left of the cores that the ranks could use.
    """
    if profile.other_cores is None or run.other_cores is None:
        return None
    text = (
        f"other programs used {run.other_cores:.1f} of {run.cores} cores, "
        f"{profile.other_cores:.1f} of {profile.cores} when profiled"
    )
    more = run.other_cores / run.cores - profile.other_cores / profile.cores
    if profile.core_wait is not None and run.core_wait is not None:
        waited = _core_wait(profile, run)
        assert waited is not None
        # They also share caches and memory with the ranks: without waiting there is no estimate.
        same_direction = (waited.effect or 0.0) * more > 0
        effect = waited.effect if same_direction and abs(more) >= _LEAST_OTHER_SHARE else 0.0
        if effect and abs(effect) >= 0.01:
            return Cause(text, effect)
        is_clearly_more = more >= _LEAST_OTHER_SHARE
        return Cause(text, None if is_clearly_more else 0.0)
    return Cause(text, _slowdown(run) / _slowdown(profile) - 1)


def _slowdown(conditions: Conditions) -> float:
    """Return by which factor other programs slow the ranks down, if cores are shared fairly."""
    assert conditions.other_cores is not None
    demand = min(float(conditions.processes), float(conditions.cores))  # cores the ranks can use
    # Limited to a tenth of the cores, so that the factor stays finite.
    free = max(conditions.cores - conditions.other_cores, 0.1 * conditions.cores)
    return max(demand / free, 1.0)


def _stolen(profile: Conditions, run: Conditions) -> Cause | None:
    """Compare the cores that the hypervisor gave to other virtual machines."""
    if profile.stolen_cores is None or run.stolen_cores is None:
        return None
    before = min(profile.stolen_cores / profile.cores, _MOST_LOST)
    after = min(run.stolen_cores / run.cores, _MOST_LOST)
    text = (
        f"the hypervisor gave {after:.0%} of the cores to other virtual machines, {before:.0%} "
        "when profiled"
    )
    return Cause(text, _effect_of_lost_time(before, after))


def _clock(profile: Conditions, run: Conditions) -> Cause | None:
    """Compare the clock frequency of the cores, and how often heat has reduced it."""
    if not profile.clock_hz or not run.clock_hz:
        return None
    text = (
        f"the cores ran at {run.clock_hz / 1e9:.2f} GHz, at {profile.clock_hz / 1e9:.2f} GHz "
        "when profiled"
    )
    if run.heat_throttles_per_s:
        text += f", and heat slowed them down {run.heat_throttles_per_s:.1f} times a second"
    return Cause(text, profile.clock_hz / run.clock_hz - 1)


def _compute_speed(profile: Conditions, run: Conditions) -> Cause | None:
    """Compare the time of a product of matrices of fixed size."""
    return _fixed_work(profile.product_s, run.product_s, "a product of matrices")


def _copy_speed(profile: Conditions, run: Conditions) -> Cause | None:
    """Compare the time of a copy of a block of fixed size."""
    return _fixed_work(profile.copy_s, run.copy_s, "a copy in memory")


def _fixed_work(before_s: float | None, after_s: float | None, work: str) -> Cause | None:
    """Compare the seconds that the same work took at the end of the profile and of the run."""
    if not before_s or not after_s:
        return None
    text = (
        f"{work} of the same size took {format_seconds(after_s)}, {format_seconds(before_s)} when "
        "profiled"
    )
    return Cause(text, after_s / before_s - 1)


def _quota(profile: Conditions, run: Conditions) -> Cause | None:
    """Compare the time in which the CPU quota stopped the ranks."""
    if profile.quota_throttled is None or run.quota_throttled is None:
        return None
    before = min(profile.quota_throttled, _MOST_LOST)
    after = min(run.quota_throttled, _MOST_LOST)
    text = (
        f"the CPU quota of the container stopped the ranks for {after:.0%} of the time, "
        f"{before:.0%} when profiled"
    )
    return Cause(text, _effect_of_lost_time(before, after))


def _memory(profile: Conditions, run: Conditions) -> Cause | None:
    """Compare the time in which tasks waited for memory, with the bytes that were swapped."""
    if profile.memory_stall is None or run.memory_stall is None:
        return None
    before = min(profile.memory_stall, _MOST_LOST)
    after = min(run.memory_stall, _MOST_LOST)
    text = f"tasks waited for memory {after:.0%} of the time, {before:.0%} when profiled"
    if run.swap_bytes_per_s:
        text += f", and {format_bytes(run.swap_bytes_per_s)} a second were swapped"
    return Cause(text, _effect_of_lost_time(before, after))


def _effect_of_lost_time(before: float, after: float) -> float:
    """Return the change of a step whose ranks cannot run for a share of the time, by that share."""
    return (1 - before) / (1 - after) - 1


def _page_faults(profile: Conditions, run: Conditions) -> Cause | None:
    """Compare the time of page faults: their number, by the measured time of one."""
    if profile.page_faults_per_s is None or run.page_faults_per_s is None:
        return None
    if run.page_fault_s is None:
        return None
    difference = run.page_faults_per_s - profile.page_faults_per_s
    text = (
        f"a rank had {run.page_faults_per_s:,.0f} page faults a second, "
        f"{profile.page_faults_per_s:,.0f} when profiled, of {format_seconds(run.page_fault_s)} "
        "each"
    )
    return Cause(text, difference * run.page_fault_s)


def _processes(profile: Conditions, run: Conditions) -> Cause | None:
    """Compare how many ranks of a host were busy, up to its cores."""
    before = min(profile.processes, profile.cores)
    after = min(run.processes, run.cores)
    text = (
        f"{run.processes} ranks shared the host's caches and memory, {profile.processes} when "
        "profiled"
    )
    return Cause(text, None if after > before else 0.0)


#: What is compared, by its name in messages.
_COMPARISONS: tuple[tuple[str, Callable[[Conditions, Conditions], Cause | None]], ...] = (
    ("other programs", _other_load),
    ("waiting for a core", _core_wait),
    ("the hypervisor's share", _stolen),
    ("clock and heat", _clock),
    ("the time of a matrix product", _compute_speed),
    ("the time of a copy in memory", _copy_speed),
    ("CPU quota", _quota),
    ("memory pressure and swap", _memory),
    ("page faults", _page_faults),
    ("busy ranks", _processes),
)
