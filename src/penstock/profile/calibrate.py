"""Fit the roofline's efficiencies to a profile that was measured: the same device, or one like it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np

from penstock.cluster.device import Device
from penstock.errors import SettingError
from penstock.profile.counts import Family, ModelCounts, Work
from penstock.profile.profile import Profile
from penstock.profile.roofline import PHASES, WINOGRAD_TRAFFIC, Efficiency, Roof

#: Unknowns: three costs that are there whatever the size, then seconds at the bandwidth and at each
#: family's peak over the ideal.
_FIXED: Final = ("launch", "fill_s", "call_s")
_SHARES: Final = (
    "memory",
    "matrix",
    "convolution",
    "winograd",
    "grouped_convolution",
    "attention",
    "recurrent",
    "other",
)
_MEMORY: Final = len(_FIXED)
_WINOGRAD: Final = len(_FIXED) + _SHARES.index("winograd")


def _column(family: Family) -> int:
    return len(_FIXED) + _SHARES.index("convolution" if family == "convolution_3x3" else family)


#: Rounds of choosing each op's roof and solving for the unknowns. It stands still after about ten.
_ROUNDS = 60
#: How strongly an unknown that the measurements say little of is held where it was, relative to one
#: measurement.
_HOLD = 0.05
#: What the three that are no shares may well be off by: nobody knows a host's own cost before it is
#: measured.
_SPREAD: Final = (10.0, 1e-4, 1e-4)
#: No unknown goes below these times what it is in the beginning: a share of ten times the usual is
#: no share.
_FLOOR = 0.1


@final
@dataclass(frozen=True)
class Sample:
    """Ops that were timed together, at how many samples, and the seconds they took."""

    works: tuple[Work, ...]
    samples: float
    seconds: float


def calibrated(
    counts: ModelCounts, measured: Profile, device: Device, *, dtype: str = "float32"
) -> Efficiency:
    """The efficiencies with which a roofline on `device` comes nearest to what was measured.

    Source: least squares of relative errors over layers, phases and sizes. Each op is on one of two
    roofs, so that seconds are linear in the unknowns once the roofs are known: roofs by the last
    solution, a solution by the roofs, and so on; the best of several starts.

    Args:
        counts: of the model that was measured.
        measured: of the same model.
        device: the one it was measured on: with a peak and a bandwidth, at which it will be used as
        well. dtype: in which it was measured.

    Raises:
        SettingError: the profile is of another model, has nothing timed, or the device lacks a
        figure.
    """
    if counts.fingerprint != measured.fingerprint:
        raise SettingError(
            f"the counts are of a chain with fingerprint {counts.fingerprint}, the profile is of "
            f"{measured.fingerprint}: calibrate with counts of the model that was measured"
        )
    found = [
        Sample(layer.work(phase), size, seconds)
        for layer, profile in zip(counts, measured, strict=True)
        for phase in PHASES
        for size, seconds in zip(
            getattr(profile, phase).sizes, getattr(profile, phase).median_s, strict=True
        )
    ]
    return fitted(
        found,
        Roof.of(device, dtype, counts.dtype_bytes),
        source=f"a profile on {measured.device or device.name}",
    )


def fitted(
    measured: Sequence[Sample], roof: Roof, *, start: Efficiency | None = None, source: str = ""
) -> Efficiency:
    """The efficiencies that come nearest to `measured` at `roof`. Families of products that were
    not measured are taken to be as much better or worse than in `start` as those that were, on
    average.

    Raises:
        SettingError: nothing that launches anything was timed.
    """
    told = [sample for sample in measured if sample.works and sample.seconds > 0]
    if not told:
        raise SettingError("nothing to calibrate with: no timed layer launches anything")
    begin = Efficiency() if start is None else start
    table = _Table.of(told, roof)
    first = np.array(
        [getattr(begin, name) for name in _FIXED] + [1 / getattr(begin, name) for name in _SHARES]
    )
    best = table.fit(first)
    # Families that were hardly measured, or not at all, are held to be as much better or worse than
    # usual as the others are.
    usual = first.copy()
    usual[_MEMORY + 1 :] *= table.pace(best, first)
    best = table.fit(usual)
    values = dict(zip(_FIXED, best[: len(_FIXED)].tolist(), strict=True))
    values |= {
        name: 1 / value for name, value in zip(_SHARES, best[len(_FIXED) :].tolist(), strict=True)
    }
    return replace(begin, **values, source=source or begin.source)


@final
@dataclass(frozen=True)
class _Table:
    """Every op as a row: the sample it was timed in, and its ideal seconds on both roofs."""

    sample: np.ndarray
    family: np.ndarray  # the unknown that the op's peak is divided by
    winograd: np.ndarray  # whether it can go Winograd's way
    compute_s: np.ndarray
    memory_s: np.ndarray
    fixed: np.ndarray  # per sample, what launch, fill_s and call_s are multiplied by
    seconds: np.ndarray
    weight: np.ndarray

    @classmethod
    def of(cls, told: Sequence[Sample], roof: Roof) -> _Table:
        rows = [
            (number, work, sample.samples)
            for number, sample in enumerate(told)
            for work in sample.works
        ]
        fixed = [
            (
                roof.launch_s * sum(work.launches for work in sample.works),
                sum(work.launches for work in sample.works if work.family != "other"),
                1.0,
            )
            for sample in told
        ]
        seconds = np.array([sample.seconds for sample in told])
        # Relative errors, but for layers so short that they do not matter: there the clock is what
        # is measured.
        weight = 1 / (seconds + 0.005 * seconds.mean())
        return cls(
            np.array([number for number, _, _ in rows]),
            np.array([_column(work.family) for _, work, _ in rows]),
            np.array([roof.winograd and work.family == "convolution_3x3" for _, work, _ in rows]),
            np.array([work.flops_at(samples) / roof.flops_per_s for _, work, samples in rows]),
            np.array(
                [
                    work.bytes_at(samples) * roof.narrower / roof.bytes_per_s
                    for _, work, samples in rows
                ]
            ),
            np.array(fixed),
            seconds,
            weight,
        )

    def matrix(self, guess: np.ndarray) -> np.ndarray:
        """Per sample, what each unknown is multiplied by, if every op is on the roof that `guess`
        puts it on.
        """
        compute, memory = self.compute_s * guess[self.family], self.memory_s * guess[_MEMORY]
        short_way = self.compute_s * guess[_WINOGRAD] + WINOGRAD_TRAFFIC * memory
        short = self.winograd & (short_way < np.maximum(compute, memory))
        on_memory = ~short & (memory >= compute)
        found = np.zeros((len(self.seconds), len(guess)))
        found[:, : len(_FIXED)] = self.fixed
        np.add.at(
            found,
            (self.sample, np.where(short, _WINOGRAD, self.family)),
            np.where(on_memory, 0.0, self.compute_s),
        )
        np.add.at(
            found,
            (self.sample, np.full_like(self.sample, _MEMORY)),
            self.memory_s * np.where(short, WINOGRAD_TRAFFIC, on_memory),
        )
        return found

    def fit(self, hold: np.ndarray) -> np.ndarray:
        """The unknowns with the least error, of several starts around `hold`."""
        best, least = hold, float("inf")
        for slower_peak, slower_memory in ((1, 1), (10, 1), (1, 10), (0.1, 1), (1, 0.1)):
            guess = hold.copy()
            guess[_MEMORY] *= slower_memory
            guess[_MEMORY + 1 :] *= slower_peak
            for _ in range(_ROUNDS):
                solved = self.solve(guess, hold)
                error = self.error(solved)
                if error < least:
                    best, least = solved, error
                if np.allclose(solved, guess, rtol=1e-9):
                    break
                guess = solved
        return best

    def pace(self, best: np.ndarray, first: np.ndarray) -> float:
        """How much slower than usual the products were, on average by their work: those that were
        not seen are taken to be as much.
        """
        work = np.bincount(
            self.family, self.compute_s * (self.family != _column("other")), minlength=len(best)
        )
        done = work > 0
        return (
            float(np.exp(np.average(np.log(best[done] / first[done]), weights=work[done])))
            if done.any()
            else 1.0
        )

    def error(self, guess: np.ndarray) -> float:
        """Sum of the squares of the relative errors."""
        return float((((self.matrix(guess) @ guess - self.seconds) * self.weight) ** 2).sum())

    def solve(self, guess: np.ndarray, hold: np.ndarray) -> np.ndarray:
        """The unknowns with the least error for the roofs of `guess`, none below its floor."""
        scale = np.concatenate([_SPREAD, hold[_MEMORY:]])
        matrix = np.vstack(
            [self.matrix(guess) * scale * self.weight[:, None], _HOLD * np.eye(len(guess))]
        )
        wanted = np.concatenate([self.seconds * self.weight, _HOLD * hold / scale])
        floor = np.array([0.0] * len(_FIXED) + [_FLOOR] * len(_SHARES))
        free = np.ones(len(guess), bool)
        solved = floor.copy()
        while free.any():
            rest = wanted - matrix[:, ~free] @ floor[~free]
            solved[free] = np.linalg.lstsq(matrix[:, free], rest, rcond=None)[0]
            below = free & (solved < floor)
            if not below.any():
                break
            free &= ~below
            solved[below] = floor[below]
        found: np.ndarray = solved * scale
        return found
