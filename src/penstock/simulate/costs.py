"""Costs: seconds and bytes of every op of every stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import cast

import numpy as np
from numpy.typing import NDArray

from penstock.deprecation import renamed_fields
from penstock.errors import SettingError
from penstock.simulate.network import Network

#: Seconds or bytes: one number for all stages; one entry per stage, each a number or a list of
#: numbers per micro-batch; or a function of stage and micro-batch. Likewise for boundaries, where
#: boundary s is between stages s and s + 1.
PerStage = (
    float
    | Sequence[float | Sequence[float]]
    | Callable[[int, int], float]
    | NDArray[np.floating]
    | None
)

#: Fields that had other names before version 0.2, by their old names.
RENAMED = {
    "again": "recompute",
    "kept_bytes": "saved_bytes",
    "again_bytes": "recompute_peak_bytes",
    "evict": "offload",
    "pair": "forward_backward",
}

LINKS = ("duplex", "half-duplex", "shared")

#: Fields with one entry per boundary, of which there is one less than stages.
PER_BOUNDARY = ("transfer", "transfer_back", "latency", "bandwidth", "boundary_bytes")

#: Fields that cannot differ by micro-batch.
_PER_STAGE_ONLY = ("update", "weight_bytes", "gradient_bytes", "optimizer_bytes", "weight_versions")


def _is_amount(number: object) -> bool:
    """Return whether this is a finite number of 0 or more."""
    try:
        return isinstance(number, Real) and 0 <= float(number) < float("inf")
    except OverflowError:  # an int beyond the largest float
        return False


def _is_valid_row(value: object) -> bool:
    """Return whether this is a tuple of floats that are finite and 0 or more. A search makes costs
    from such rows thousands of times, for which tests of abstract types take most of the time.
    """
    if type(value) is not tuple or set(map(type, value)) != {float}:
        return False
    # `min` may overlook a NaN, but the sum is NaN then, which is below nothing.
    return min(value) >= 0 and sum(value) < float("inf")


def _is_list(value: object) -> bool:
    """Return whether this is a sequence other than text."""
    if type(value) in (float, int):
        return False
    return isinstance(value, Sequence) and not isinstance(value, str)


@renamed_fields(RENAMED)
@dataclass(frozen=True)
class Costs:
    """Seconds per stage and micro-batch, and bytes if memory is to be computed.

    Every field may be one number for all stages, or one entry per stage. An entry may be a list of
    numbers per micro-batch, and a field may be a function of (stage, micro-batch), except for
    fields that do not depend on the micro-batch (`update`, weights and their parts, versions). All
    fields are for whole micro-batches: an op of a slice takes its share.

    Attributes:
        forward, backward: seconds of F and of a whole B; by default `backward` is the sum of
            `input_grad` and `weight_grad`, or twice `forward` if one of them is missing.
        input_grad, weight_grad: seconds of I and W; if one is missing it is `backward` minus the
            other, if both are, each is half of it.
        update: seconds of U.
        forward_backward: seconds of an F and a B that run as one, per stage of the F; by default,
            and for all other pairs, the sum of both.
        transfer: seconds per boundary, in either direction.
        transfer_back: seconds per boundary for gradients, if they differ.
        latency, bandwidth: instead of `transfer`: a message takes latency + boundary_bytes /
            bandwidth, in seconds and bytes per second; 0 and infinite by default.
        links: "duplex": every directed pair of ranks has its own link. "half-duplex": the two
            directions of a pair share one. "shared": all ranks share one medium. A shared link
            carries one message at a time, first come, first served.
        network: the hosts of the ranks, whose messages to other hosts share a card; needs
            "duplex" links.
        offload: seconds to move the activations of one micro-batch of a stage to the partner's rank
            (E), and back (L).
        activation_bytes: bytes that one micro-batch saves on a stage from F to the end of its
            backward.
        activation_bytes_after_input_grad: the part of these that is needed between I and W; all by
            default.
        input_bytes: the part of these that is the stage's input: all that recompute saves.
        recompute: seconds of the forward of those layers that selective recompute runs again;
            `forward` by default.
        saved_bytes: the part of `activation_bytes` that selective recompute saves; `input_bytes` by
            default.
        recompute_peak_bytes: peak of the recomputed part during a whole B; all of it by default, as
            it is for a backward in two parts.
        weight_bytes: weights, gradients and optimizer state of a stage together.
        gradient_bytes, optimizer_bytes: the parts of `weight_bytes` for these; the remainder are
            weights.
        bytes_of_ranks: for every rank its bytes of weights, gradients and optimizer state, where
            they are not those of its stages together.
        weight_versions: number of versions of the weights on a stage, 1 by default.
        boundary_bytes: bytes that cross a boundary for one micro-batch.
        boundary_buffers: whether memory includes values that wait at boundaries, to be sent or to
            be consumed.

    Examples:
        >>> import penstock as ps
        >>> costs = Costs(forward=[1, 2], backward=[2, 4], transfer=0.5)
        >>> ps.simulate(ps.schedule("gpipe", stages=2, micro_batches=2), costs).makespan
        16.0
    """

    forward: PerStage = 1.0
    backward: PerStage = None
    input_grad: PerStage = None
    weight_grad: PerStage = None
    update: PerStage = 0.0
    transfer: PerStage = None
    transfer_back: PerStage = None
    activation_bytes: PerStage = None
    input_bytes: PerStage = None
    weight_bytes: PerStage = None
    boundary_bytes: PerStage = None
    latency: PerStage = None
    bandwidth: PerStage = None
    forward_backward: PerStage = None
    offload: PerStage = None
    activation_bytes_after_input_grad: PerStage = None
    gradient_bytes: PerStage = None
    optimizer_bytes: PerStage = None
    weight_versions: PerStage = None
    recompute: PerStage = None
    saved_bytes: PerStage = None
    recompute_peak_bytes: PerStage = None
    links: str = "duplex"
    boundary_buffers: bool = True
    network: Network | None = None
    bytes_of_ranks: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        """Validate all fields and convert lists to tuples."""
        for name in FIELDS:
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                value = value.tolist()
            if value is None or _is_valid_row(value):
                continue
            if callable(value) and name not in _PER_STAGE_ONLY:
                continue
            if _is_list(value):
                value = tuple(_entry(name, entry) for entry in value)
                object.__setattr__(self, name, value)
            else:
                check_amount(name, value)
        self._check_links()
        self._check_parts()
        if self.bytes_of_ranks is not None:
            rows = tuple(map(tuple, self.bytes_of_ranks))
            if any(len(row) != 3 for row in rows):
                raise SettingError(
                    "costs: bytes_of_ranks has rows of other than 3 numbers; give every rank its "
                    "bytes of weights, gradients and optimizer state"
                )
            object.__setattr__(self, "bytes_of_ranks", rows)

    def _check_links(self) -> None:
        """Raise an error if the fields of links contradict each other."""
        if self.links not in LINKS:
            raise SettingError(f"costs: links are one of {', '.join(LINKS)}, not {self.links!r}")
        if self.network is not None and self.links != "duplex":
            raise SettingError(
                f"costs: links are {self.links!r}, and a network has links of its own; leave one "
                "out"
            )
        alternatives = [
            name for name in ("latency", "bandwidth") if getattr(self, name) is not None
        ]
        if self.transfer is not None and alternatives:
            raise SettingError(
                f"costs: transfer and {alternatives[0]} both set the seconds of a message; "
                f"give one of the two"
            )
        if self.bandwidth is not None and self.boundary_bytes is None:
            raise SettingError(
                "costs: bandwidth has no effect without boundary_bytes; "
                "give the bytes that cross each boundary"
            )

    def _check_parts(self) -> None:
        """Raise an error if a part is given without its whole."""
        parts = [
            name
            for name in ("gradient_bytes", "optimizer_bytes", "weight_versions")
            if getattr(self, name) is not None
        ]
        if parts and self.weight_bytes is None:
            raise SettingError(
                f"costs: {parts[0]} has no effect without weight_bytes, of which it is a part"
            )
        if self.activation_bytes_after_input_grad is not None and self.activation_bytes is None:
            raise SettingError(
                "costs: activation_bytes_after_input_grad has no effect without activation_bytes"
            )

    def spread(self, name: str, count: int) -> tuple[float, ...] | None:
        """Return the named costs as `count` numbers, or None if they were not given.

        Raises:
            SettingError: there are more or fewer entries, or they differ by micro-batch.
        """
        value = getattr(self, name)
        if value is None:
            return None
        if isinstance(value, tuple):
            if len(value) != count:
                raise SettingError(
                    f"costs: {name} has {len(value)} entries, the schedule needs {count}"
                )
            if not any(isinstance(entry, tuple) for entry in value):
                return cast("tuple[float, ...]", value)
        if callable(value) or isinstance(value, tuple):
            raise SettingError(
                f"costs: {name} differs by micro-batch, but one number per stage is needed"
            )
        return (float(value),) * count

    def spread_or_zeros(self, name: str, count: int) -> tuple[float, ...]:
        """Return the named costs as `count` numbers, 0 where they were not given.

        Raises:
            SettingError: as `spread`.
        """
        numbers = self.spread(name, count)
        return (0.0,) * count if numbers is None else numbers


#: The names of all fields that are seconds or bytes.
FIELDS = tuple(
    field.name
    for field in fields(Costs)
    if field.name not in ("links", "network", "boundary_buffers", "bytes_of_ranks")
)


def check_amount(name: str, number: object) -> float:
    """Return a number of seconds or bytes as a float after validation.

    Raises:
        SettingError: it is not a finite number of 0 or more.
    """
    if type(number) is float and 0 <= number < float("inf"):
        return number
    if not _is_amount(number):
        raise SettingError(
            f"costs: {name} has {number!r}; seconds and bytes must be finite and not negative"
        )
    return float(cast("float", number))


def _entry(name: str, entry: object) -> float | tuple[float, ...]:
    """Return one stage's number, or its numbers per micro-batch, after validation."""
    if isinstance(entry, np.ndarray):
        entry = entry.tolist()
    if not _is_list(entry):
        return check_amount(name, entry)
    if name not in _PER_STAGE_ONLY and _is_valid_row(entry):
        return cast("tuple[float, ...]", entry)
    if name in _PER_STAGE_ONLY:
        raise SettingError(
            f"costs: {name} has {entry!r}, but cannot differ by micro-batch: one number per stage"
        )
    return tuple(check_amount(name, number) for number in cast("Sequence[object]", entry))
