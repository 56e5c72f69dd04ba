"""Times of steps: systems take turns, medians over rounds, ratios within a round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kit.section import words_of

Step = Callable[[], object]

ROUNDS = 7
#: Steps before those that count: allocators, autotuning and compilers are quiet then.
WARM = 3
#: A round of a system takes about so long, and counts at least `LEAST_STEPS` steps: 21 over all
#: rounds.
ROUND_S = 0.08
LEAST_STEPS, MOST_STEPS = 3, 30


@dataclass(frozen=True)
class Times:
    """Seconds of a step, the mean over the steps of one round.

    Attributes:
        wall_s: from an idle device to an idle device.
        host_s: until the last launch was handed over.
        device_s: between events before the first and behind the last launch; None without a GPU.
    """

    wall_s: float
    host_s: float
    device_s: float | None


@dataclass
class Series:
    """The rounds of one system. `error`: why it was dropped."""

    rounds: list[Times] = field(default_factory=list)
    error: str | None = None

    def median_s(self, column: str = "wall_s") -> float | None:
        """Over rounds."""
        values = [getattr(times, column) for times in self.rounds]
        counted = [value for value in values if value is not None]
        return statistics.median(counted) if counted else None


def time_steps(step: Step, steps: int, device: torch.device) -> Times:
    """Time some steps; the device is idle before and behind them."""
    on_gpu = device.type == "cuda"
    begin = end = None
    if on_gpu:
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        begin.record()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    host_s = time.perf_counter() - started
    if begin is None or end is None:
        return Times(host_s / steps, host_s / steps, None)
    end.record()
    torch.cuda.synchronize(device)
    wall_s = time.perf_counter() - started
    return Times(wall_s / steps, host_s / steps, begin.elapsed_time(end) / 1e3 / steps)


def time_in_turns(
    steps: Mapping[str, Step],
    device: torch.device,
    *,
    smoke: bool,
    seconds_left: Callable[[], float],
) -> dict[str, Series]:
    """Rounds of all systems, one after the other in each round.

    Args:
        steps: what takes one step, by system. One that raises is dropped.
        device: where they compute.
        smoke: one round of one step.
        seconds_left: no further round begins when there are none.
    """
    series = {name: Series() for name in steps}
    counts = {name: _warm(step, device, series[name], smoke=smoke) for name, step in steps.items()}
    for number in range(1 if smoke else ROUNDS):
        if number and seconds_left() <= 0:
            break
        for name, step in steps.items():
            if series[name].error is None:
                _round(series[name], step, counts[name], device)
    return series


def _warm(step: Step, device: torch.device, series: Series, *, smoke: bool) -> int:
    """Warm up; returns how many steps a round has."""
    try:
        if smoke:
            step()
            return 1
        for _ in range(WARM):
            step()
        pace_s = time_steps(step, 1, device).wall_s
    except Exception as error:  # noqa: BLE001 - one system is lost
        series.error = words_of(error)
        return 0
    return max(LEAST_STEPS, min(MOST_STEPS, round(ROUND_S / max(pace_s, 1e-6))))


def _round(series: Series, step: Step, count: int, device: torch.device) -> None:
    try:
        series.rounds.append(time_steps(step, count, device))
    except Exception as error:  # noqa: BLE001 - likewise
        series.error = words_of(error)


def columns(series: Series, reference: Series | None) -> dict[str, Any]:
    """A row's figures: milliseconds, quartiles, and the ratio to the reference in the same round."""
    wall = [times.wall_s * 1e3 for times in series.rounds]
    if not wall:
        return {}
    row: dict[str, Any] = {"ms": statistics.median(wall), "rounds": len(wall)}
    if len(wall) > 1:
        low, _, high = statistics.quantiles(wall, n=4, method="inclusive")
        row["ms_quartiles"] = [low, high]
    for column in ("host_s", "device_s"):
        seconds = series.median_s(column)
        if seconds is not None:
            row[column.replace("_s", "_ms")] = seconds * 1e3
    if reference is not None and reference.rounds:
        pairs = zip(series.rounds, reference.rounds, strict=False)
        row["ratio_to_plain"] = statistics.median(one.wall_s / other.wall_s for one, other in pairs)
    return row


def seconds_of(
    work: Step, device: torch.device, *, times: int = 20, rounds: int = 3, warm: int = 3
) -> float:
    """Seconds of one call, the median of rounds of `times` calls, device's time where there is a
    GPU.
    """
    for _ in range(warm):
        work()
    results = [time_steps(work, times, device) for _ in range(rounds)]
    seconds = [result.wall_s if result.device_s is None else result.device_s for result in results]
    return statistics.median(seconds)
