"""Fit the roofline's efficiencies to a profile measured on the same device, or on one like it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np

from penstock.cluster.device import Device
from penstock.errors import SettingError
from penstock.profile.counts import Family, ModelCounts, Work
from penstock.profile.profile import PHASES, Profile, Timing
from penstock.profile.roofline import WINOGRAD_TRAFFIC, Efficiency, Roof

#: The unknowns of the fit: three fixed costs, then ratios of real to ideal seconds, at the memory's
#: bandwidth and at each family's peak.
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
    """Return the index of the unknown of a family."""
    return len(_FIXED) + _SHARES.index("convolution" if family == "convolution_3x3" else family)


#: Rounds of choosing each op's roof and solving for the unknowns; it converges after about ten.
_ROUNDS = 60
#: Weight of the regularisation that keeps poorly determined unknowns near their start, relative to
#: one measurement.
_REGULARISATION = 0.05
#: Scale of expected changes of the three fixed costs, which are unknown before a host is measured.
_FIXED_SCALE: Final = (10.0, 1e-4, 1e-4)
#: Lower bound of the other unknowns, relative to their start: a share of ten times the usual one is
#: not plausible.
_FLOOR = 0.1


@final
@dataclass(frozen=True)
class Sample:
    """Ops that were timed together: the ops, the number of samples, and their seconds."""

    works: tuple[Work, ...]
    samples: float
    seconds: float


def _fixed_factors(sample: Sample, roof: Roof) -> tuple[float, float, float]:
    """Return the factors of launch, fill_s and call_s in the seconds of a sample."""
    launches = sum(work.launches for work in sample.works)
    products = sum(work.launches for work in sample.works if work.family != "other")
    return roof.launch_s * launches, products, 1.0


def calibrated(
    counts: ModelCounts, measured: Profile, device: Device, *, dtype: str = "float32"
) -> Efficiency:
    """Return the efficiencies with which a roofline on `device` is closest to the measurements.

    Source: least squares of relative errors over layers, phases and sizes. Each op is on one of two
    roofs, so that seconds are linear in the unknowns once the roofs are known: choose roofs by the
    last solution, solve for these roofs, and so on; the best of several starts.

    Args:
        counts: of the model that was measured.
        measured: profile of the same model.
        device: the device it was measured on, with the peak and bandwidth that will also be used
            for estimates.
        dtype: in which it was measured.

    Raises:
        SettingError: the profile is of a different model or contains no times, or a figure of the
            device is missing.
    """
    if counts.fingerprint != measured.fingerprint:
        raise SettingError(
            f"the counts are of a chain with fingerprint {counts.fingerprint}, the profile is of "
            f"{measured.fingerprint}: calibrate with counts of the model that was measured"
        )
    samples: list[Sample] = []
    for layer, profile in zip(counts, measured, strict=True):
        for phase in PHASES:
            timing: Timing = getattr(profile, phase)
            for size, seconds in zip(timing.sizes, timing.median_s, strict=True):
                samples.append(Sample(layer.work(phase), size, seconds))
    roof = Roof.of(device, dtype, counts.dtype_bytes)
    return fit_efficiency(samples, roof, source=f"a profile on {measured.device or device.name}")


def fit_efficiency(samples: Sequence[Sample], roof: Roof, *, source: str = "") -> Efficiency:
    """Return the efficiencies that are closest to the measured `samples` at `roof`.

    Families of products that were not measured are assumed to differ from the default by the
    average factor of those that were.

    Raises:
        SettingError: no op was timed.
    """
    timed = [sample for sample in samples if sample.works and sample.seconds > 0]
    if not timed:
        raise SettingError("nothing to calibrate with: no timed layer launches an op")
    start = Efficiency()
    equations = _Equations.of(timed, roof)
    initial = np.array(
        [getattr(start, name) for name in _FIXED] + [1 / getattr(start, name) for name in _SHARES]
    )
    best = equations.fit(initial)
    # Fit again from a start in which all families are slower by the average factor of the measured
    # ones, which then applies to families with few measurements or none.
    scaled = initial.copy()
    scaled[_MEMORY + 1 :] *= equations.average_slowdown(best, initial)
    best = equations.fit(scaled)
    values = dict(zip(_FIXED, best[: len(_FIXED)].tolist(), strict=True))
    for name, value in zip(_SHARES, best[len(_FIXED) :].tolist(), strict=True):
        values[name] = 1 / value
    return replace(start, **values, source=source or start.source)


@final
@dataclass(frozen=True)
class _Equations:
    """The equations of the fit: every op as a row, and every sample as an equation.

    Attributes:
        sample: per op, the index of the sample in which it was timed.
        family: per op, the unknown of its family.
        winograd: per op, whether Winograd's algorithm applies.
        compute_s, memory_s: per op, ideal seconds on both roofs.
        fixed: per sample, the factors of launch, fill_s and call_s.
        seconds: per sample, measured.
        weight: per sample.
    """

    sample: np.ndarray
    family: np.ndarray
    winograd: np.ndarray
    compute_s: np.ndarray
    memory_s: np.ndarray
    fixed: np.ndarray
    seconds: np.ndarray
    weight: np.ndarray

    @classmethod
    def of(cls, samples: Sequence[Sample], roof: Roof) -> _Equations:
        """Create the equations of samples at a roof."""
        sample_of, family, winograd, flops, bytes_moved = [], [], [], [], []
        for index, sample in enumerate(samples):
            for work in sample.works:
                sample_of.append(index)
                family.append(_column(work.family))
                winograd.append(roof.winograd and work.family == "convolution_3x3")
                flops.append(work.flops_at(sample.samples))
                bytes_moved.append(work.bytes_at(sample.samples))
        seconds = np.array([sample.seconds for sample in samples])
        # Relative errors, except for layers so short that they do not matter: their times consist
        # of the clock's own cost.
        weight = 1 / (seconds + 0.005 * seconds.mean())
        return cls(
            sample=np.array(sample_of),
            family=np.array(family),
            winograd=np.array(winograd),
            compute_s=np.array(flops) / roof.flops_per_s,
            memory_s=np.array(bytes_moved) * roof.narrower / roof.bytes_per_s,
            fixed=np.array([_fixed_factors(sample, roof) for sample in samples]),
            seconds=seconds,
            weight=weight,
        )

    def matrix(self, guess: np.ndarray) -> np.ndarray:
        """Return the factor of every unknown in every equation.

        Every op is on the roof that is higher at `guess`.
        """
        compute, memory = self.compute_s * guess[self.family], self.memory_s * guess[_MEMORY]
        winograd_s = self.compute_s * guess[_WINOGRAD] + WINOGRAD_TRAFFIC * memory
        by_winograd = self.winograd & (winograd_s < np.maximum(compute, memory))
        on_memory = ~by_winograd & (memory >= compute)
        factors = np.zeros((len(self.seconds), len(guess)))
        factors[:, : len(_FIXED)] = self.fixed
        np.add.at(
            factors,
            (self.sample, np.where(by_winograd, _WINOGRAD, self.family)),
            np.where(on_memory, 0.0, self.compute_s),
        )
        np.add.at(
            factors,
            (self.sample, np.full_like(self.sample, _MEMORY)),
            self.memory_s * np.where(by_winograd, WINOGRAD_TRAFFIC, on_memory),
        )
        return factors

    def fit(self, initial: np.ndarray) -> np.ndarray:
        """Return the unknowns with the least error, over several starts around `initial`."""
        best, least = initial, float("inf")
        # The iteration may end in a local least: one of the two limits, or both, may be far from
        # the guess.
        for slower_peak, slower_memory in ((1, 1), (10, 1), (1, 10), (0.1, 1), (1, 0.1)):
            guess = initial.copy()
            guess[_MEMORY] *= slower_memory
            guess[_MEMORY + 1 :] *= slower_peak
            for _ in range(_ROUNDS):
                solution = self.solve(guess, initial)
                error = self.error(solution)
                if error < least:
                    best, least = solution, error
                if np.allclose(solution, guess, rtol=1e-9):
                    break
                guess = solution
        return best

    def average_slowdown(self, best: np.ndarray, initial: np.ndarray) -> float:
        """Return how much slower than at the start the products are, averaged by their work."""
        is_product = self.family != _column("other")
        work = np.bincount(self.family, self.compute_s * is_product, minlength=len(best))
        measured = work > 0
        if not measured.any():
            return 1.0
        ratios = np.log(best[measured] / initial[measured])
        return float(np.exp(np.average(ratios, weights=work[measured])))

    def error(self, guess: np.ndarray) -> float:
        """Return the sum of squared weighted errors."""
        return float((((self.matrix(guess) @ guess - self.seconds) * self.weight) ** 2).sum())

    def solve(self, guess: np.ndarray, initial: np.ndarray) -> np.ndarray:
        """Return the unknowns with the least error for the roofs of `guess`, none below its floor.

        An active-set method: solve, fix what is below its floor at the floor, and solve again.
        """
        scale = np.concatenate([_FIXED_SCALE, initial[_MEMORY:]])
        measurements = self.matrix(guess) * scale * self.weight[:, None]
        matrix = np.vstack([measurements, _REGULARISATION * np.eye(len(guess))])
        target = np.concatenate([self.seconds * self.weight, _REGULARISATION * initial / scale])
        floor = np.array([0.0] * len(_FIXED) + [_FLOOR] * len(_SHARES))
        free = np.ones(len(guess), bool)
        solution = floor.copy()
        while free.any():
            rest = target - matrix[:, ~free] @ floor[~free]
            solution[free] = np.linalg.lstsq(matrix[:, free], rest, rcond=None)[0]
            below = free & (solution < floor)
            if not below.any():
                break
            free &= ~below
            solution[below] = floor[below]
        scaled: np.ndarray = solution * scale
        return scaled
