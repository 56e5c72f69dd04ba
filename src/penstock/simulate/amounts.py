"""Costs of one or many vectors as arrays: by vector, stage and micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import SettingError
from penstock.schedule.arrays import Array
from penstock.simulate.costs import FIELDS, Costs, check_amount

#: What belongs to boundaries, of which there is one less than stages.
_BOUNDARY = ("transfer", "transfer_back", "latency", "bandwidth", "boundary_bytes")


@dataclass(frozen=True, eq=False)
class Amounts:
    """The fields of Costs that are given, each an array (vectors, stages or boundaries,
    micro-batches).

    An axis has length 1 where nothing differs along it.

    Attributes:
        given: the arrays by name.
        vectors: how many cost vectors there are.
        stages: number of stages.
    """

    given: Mapping[str, Array]
    vectors: int
    stages: int

    @classmethod
    def of(cls, costs: Sequence[Costs], stages: int, micro_batches: Sequence[int]) -> Amounts:
        """Of costs that give the same fields.

        Args:
            costs: at least one.
            stages: number of stages.
            micro_batches: the numbers of all micro-batches, which functions are asked for.

        Raises:
            SettingError: a field has more or fewer entries than the schedule needs.
        """
        given = {}
        for name in FIELDS:
            values = [getattr(each, name) for each in costs]
            if values[0] is not None:
                count = stages - 1 if name in _BOUNDARY else stages
                given[name] = _Field(name, max(count, 0), micro_batches).stacked(values)
        return cls(given, len(costs), stages)

    @classmethod
    def batched(
        cls, given: Mapping[str, object], stages: int, micro_batches: Sequence[int]
    ) -> Amounts:
        """Of arrays whose first axis is the vectors; a single number stands for all.

        Raises:
            SettingError: a name is no field of Costs, or an array has another shape.
        """
        arrays, vectors = {}, None
        for name, value in given.items():
            if name not in FIELDS:
                raise SettingError(f"costs: there is no {name!r}; there are {', '.join(FIELDS)}")
            array = np.asarray(value, float)
            count = max(stages - 1 if name in _BOUNDARY else stages, 0)
            fits = array.shape[1:] in ((), (count,), (count, len(micro_batches)))
            if array.ndim and vectors not in (None, len(array)):
                raise SettingError(
                    f"costs: {name} has {len(array)} vectors, the fields before it have {vectors}"
                )
            if not fits:
                raise SettingError(
                    f"costs: {name} has shape {array.shape}; it is (vectors), (vectors, {count}) or "
                    f"(vectors, {count}, {len(micro_batches)})"
                )
            if not (np.isfinite(array) & (array >= 0)).all():
                raise SettingError(
                    f"costs: {name} has {array[~(np.isfinite(array) & (array >= 0))].flat[0]!r}; seconds and bytes "
                    "are finite and not below 0"
                )
            vectors = len(array) if array.ndim else vectors
            arrays[name] = array.reshape(array.shape + (1,) * (3 - array.ndim))
        return cls(
            {"forward": np.ones((1, 1, 1)), **arrays}, 1 if vectors is None else vectors, stages
        )

    def get(self, name: str) -> Array | None:
        """The named field, if it was given."""
        return self.given.get(name)

    def known(self, name: str, default: float = 0.0) -> Array:
        """The named field, or a number in its place."""
        found = self.given.get(name)
        return np.full((1, 1, 1), default) if found is None else found

    def work(self) -> tuple[Array, Array, Array, Array]:
        """Seconds of F, B, I and W, every default filled in.

        Raises:
            SettingError: forward is not given.
        """
        forward, backward, inputs, weights = map(
            self.get, ("forward", "backward", "input_grad", "weight_grad")
        )
        if forward is None:
            raise SettingError("costs: forward is needed")
        if backward is None:
            backward = 2 * forward if inputs is None or weights is None else inputs + weights
        if inputs is None:
            inputs = backward / 2 if weights is None else np.maximum(backward - weights, 0.0)
        if weights is None:
            weights = np.maximum(backward - inputs, 0.0)
        return forward, backward, inputs, weights

    def crossing(self) -> tuple[Array, Array]:
        """Seconds on a link, without its latency: up the chain and down.

        Raises:
            SettingError: fields of links do not go together.
        """
        up, bandwidth, back = map(self.get, ("transfer", "bandwidth", "transfer_back"))
        if up is not None and (bandwidth is not None or self.get("latency") is not None):
            raise SettingError(
                "costs: transfer says what a message takes, and so do latency and bandwidth: give one of the two"
            )
        if bandwidth is not None and not bandwidth.all():
            raise SettingError("costs: bandwidth is 0 bytes/s somewhere: nothing would ever arrive")
        if up is None:
            up = (
                np.zeros((1, 1, 1))
                if bandwidth is None
                else self.known("boundary_bytes") / bandwidth
            )
        return up, up if back is None else back

    def vector(self, number: int) -> Amounts:
        """One vector's alone."""
        return Amounts(
            {
                name: array[number:][:1] if len(array) > 1 else array
                for name, array in self.given.items()
            },
            1,
            self.stages,
        )

    @property
    def by_micro_batch(self) -> bool:
        """Whether anything differs by micro-batch."""
        return any(array.shape[2] > 1 for array in self.given.values())


@dataclass(frozen=True)
class _Field:
    """One field's name and the numbers it needs."""

    name: str
    count: int
    micro_batches: Sequence[int]

    def stacked(self, values: list[object]) -> Array:
        """All vectors' values as one array."""
        if all(isinstance(value, tuple) for value in values):
            try:
                array = np.array(values, float)
            except ValueError:  # numbers beside lists of them
                array = np.empty(0)
            if array.shape[1:] in ((self.count,), (self.count, len(self.micro_batches))):
                return array.reshape(array.shape + (1,) * (3 - array.ndim))
        rows = list(map(self._array, values))
        shape = np.broadcast_shapes(*(row.shape for row in rows))
        return np.stack([np.broadcast_to(row, shape) for row in rows])

    def _array(self, value: object) -> Array:
        """One vector's: (1, 1), (count, 1) or (count, micro-batches)."""
        if callable(value):
            rows = [
                [value(stage, number) for number in self.micro_batches]
                for stage in range(self.count)
            ]
            for stage, row in enumerate(rows):
                for number, found in zip(self.micro_batches, row, strict=True):
                    check_amount(f"{self.name} of stage {stage}, micro-batch {number}", found)
            return np.array(rows, float).reshape(self.count, len(self.micro_batches))
        if not isinstance(value, tuple):
            return np.full((1, 1), value, float)
        if len(value) != self.count:
            raise SettingError(
                f"costs: {self.name} has {len(value)} entries, the schedule needs {self.count}"
            )
        whole = not any(isinstance(entry, tuple) for entry in value)
        width = 1 if whole else len(self.micro_batches)
        array = np.empty((self.count, width))
        for stage, entry in enumerate(value):
            if isinstance(entry, tuple) and len(entry) != width:
                raise SettingError(
                    f"costs: {self.name} of stage {stage} has {len(entry)} entries, the schedule has {width} "
                    "micro-batches"
                )
            array[stage] = entry
        return array
