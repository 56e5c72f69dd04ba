"""Costs: what every op of every stage takes, in seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import cast

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SettingError

#: Seconds or bytes: one number for all stages; one entry per stage, each a number or one number per
#: micro-batch; or a function
#: of stage and micro-batch. Boundaries are given alike, boundary s between stages s and s + 1.
PerStage = (
    float
    | Sequence[float | Sequence[float]]
    | Callable[[int, int], float]
    | NDArray[np.floating]
    | None
)

LINKS = ("duplex", "half-duplex", "shared")

#: Per stage only: these do not belong to one micro-batch.
_OF_STAGES = ("update", "weight_bytes", "gradient_bytes", "optimizer_bytes", "weight_versions")


def _is_amount(number: object) -> bool:
    try:
        return isinstance(number, Real) and 0 <= float(number) < float("inf")
    except OverflowError:  # an int beyond the largest float
        return False


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


@dataclass(frozen=True)
class Costs:
    """Seconds per stage and micro-batch, and bytes where memory is asked for.

    Everything may be one number for all stages, or one entry per stage. An entry may be one number
    per micro-batch instead, and the whole a function of (stage, micro-batch); both not for what
    belongs to no micro-batch (`update`, weights and their kin). All is for whole micro-batches: an
    op of a slice takes its share.

    Attributes:
        forward, backward: seconds of F and of a whole B; when not given, `backward` is the sum of
        `input_grad` and
            `weight_grad`, or twice `forward` where one of them lacks.
        input_grad, weight_grad: seconds of I and W; when one is not given it is what the other
        leaves of `backward`, when
            neither is, each is half.
        update: seconds of U.
        pair: seconds of an F and a B that run as one, per stage of the F; their sum when not given,
        as for all other pairs. transfer: seconds per boundary, in either direction. transfer_back:
        seconds per boundary for gradients, when they differ. latency, bandwidth: instead of
        `transfer`: a message takes latency + boundary_bytes / bandwidth, in seconds and bytes per
            second; 0 and infinite when not given.
        links: "duplex": every directed pair of ranks has a link of its own. "half-duplex": the two
        directions of a pair share
            one. "shared": all ranks share one medium. What is shared carries one message at a time,
            first come, first served.
        evict: seconds that the activations of one micro-batch of a stage take to the partner's rank
        (E), and back (L). activation_bytes: what one micro-batch keeps on a stage from F to the end
        of its backward. activation_bytes_after_input_grad: what is left of it between I and W; all
        when not given. input_bytes: the part of it that is the stage's input: all that recompute
        keeps. again: seconds of the forward of those layers that selective recompute runs again;
        `forward` when not given. kept_bytes: the part of `activation_bytes` that selective
        recompute keeps; `input_bytes` when not given. again_bytes: the most that is there again of
        the rest at one time, while a whole B runs; all of it when not given, as it is
            with a backward in two parts.
        weight_bytes: weights, gradients and optimizer state of a stage together.
        gradient_bytes, optimizer_bytes: the parts of `weight_bytes` that are these; what they leave
        are weights. weight_versions: how many versions of the weights a stage holds, 1 when not
        given. boundary_bytes: what crosses a boundary for one micro-batch. boundary_buffers:
        whether memory counts what waits at boundaries, to be sent or to be taken.
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
    pair: PerStage = None
    evict: PerStage = None
    activation_bytes_after_input_grad: PerStage = None
    gradient_bytes: PerStage = None
    optimizer_bytes: PerStage = None
    weight_versions: PerStage = None
    again: PerStage = None
    kept_bytes: PerStage = None
    again_bytes: PerStage = None
    links: str = "duplex"
    boundary_buffers: bool = True

    def __post_init__(self) -> None:
        for name in FIELDS:
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                value = value.tolist()
            if callable(value) and name not in _OF_STAGES:
                continue
            if _is_list(value):
                value = tuple(_entry(name, entry) for entry in value)
                object.__setattr__(self, name, value)
            elif value is not None:
                check_amount(name, value)
        self._check_links()
        self._check_parts()

    def _check_links(self) -> None:
        if self.links not in LINKS:
            raise SettingError(f"costs: links are one of {', '.join(LINKS)}, not {self.links!r}")
        again = [name for name in ("latency", "bandwidth") if getattr(self, name) is not None]
        if self.transfer is not None and again:
            raise SettingError(
                f"costs: transfer says what a message takes, and so does {again[0]}: give one of the two"
            )
        if self.bandwidth is not None and self.boundary_bytes is None:
            raise SettingError(
                "costs: bandwidth says nothing without boundary_bytes: give the bytes that cross each boundary"
            )

    def _check_parts(self) -> None:
        given = [
            name
            for name in ("gradient_bytes", "optimizer_bytes", "weight_versions")
            if getattr(self, name) is not None
        ]
        if given and self.weight_bytes is None:
            raise SettingError(
                f"costs: {given[0]} says nothing without weight_bytes, of which it is a part"
            )
        if self.activation_bytes_after_input_grad is not None and self.activation_bytes is None:
            raise SettingError(
                "costs: activation_bytes_after_input_grad says nothing without activation_bytes"
            )

    def spread(self, name: str, count: int) -> tuple[float, ...] | None:
        """The named costs as `count` numbers, or None if they were not given.

        Raises:
            SettingError: there are more or fewer, or they differ by micro-batch.
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
                f"costs: {name} differs by micro-batch; one number per stage is needed here"
            )
        return (float(value),) * count


#: The names of all amounts.
FIELDS = tuple(
    field.name for field in fields(Costs) if field.name not in ("links", "boundary_buffers")
)


def check_amount(name: str, number: object) -> float:
    """A number of seconds or bytes.

    Raises:
        SettingError: it is none.
    """
    if not _is_amount(number):
        raise SettingError(
            f"costs: {name} has {number!r}; seconds and bytes are finite and not below 0"
        )
    return float(cast("float", number))


def _entry(name: str, entry: object) -> float | tuple[float, ...]:
    """One stage's number, or its numbers per micro-batch."""
    if isinstance(entry, np.ndarray):
        entry = entry.tolist()
    if not _is_list(entry):
        return check_amount(name, entry)
    if name in _OF_STAGES:
        raise SettingError(
            f"costs: {name} has {entry!r}; it is of a stage, not of a micro-batch: one number each"
        )
    return tuple(check_amount(name, number) for number in cast("Sequence[object]", entry))
