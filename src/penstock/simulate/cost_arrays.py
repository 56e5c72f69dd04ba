"""Costs of one or many vectors as arrays of shape (vectors, stages, micro-batches)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import SettingError
from penstock.schedule.arrays import Array
from penstock.simulate.costs import FIELDS, PER_BOUNDARY, Costs, check_amount


@dataclass(frozen=True, eq=False)
class Amounts:
    """The fields of Costs that are given, as arrays of shape (vectors, stages, micro-batches).

    Fields of boundaries have these in place of stages. An axis has length 1 if values do not differ
    along it.

    Attributes:
        arrays: the arrays by name.
        vectors: number of cost vectors.
        stages: number of stages.
    """

    arrays: Mapping[str, Array]
    vectors: int
    stages: int

    @classmethod
    def of(cls, costs: Sequence[Costs], stages: int, micro_batches: Sequence[int]) -> Amounts:
        """Convert costs that all give the same fields.

        Args:
            costs: at least one.
            stages: number of stages.
            micro_batches: the numbers of all micro-batches, for fields that are functions.

        Raises:
            SettingError: a field has more or fewer entries than the schedule needs.
        """
        arrays = {}
        for name in FIELDS:
            values = [getattr(vector, name) for vector in costs]
            if values[0] is not None:
                count = stages - 1 if name in PER_BOUNDARY else stages
                arrays[name] = _Field(name, max(count, 0), micro_batches).stack(values)
        return cls(arrays, len(costs), stages)

    @classmethod
    def batched(
        cls, fields: Mapping[str, object], stages: int, micro_batches: Sequence[int]
    ) -> Amounts:
        """Convert arrays whose first axis is the cost vectors; a single number applies to all.

        Raises:
            SettingError: a name is not a field of Costs, or an array has the wrong shape.
        """
        # The default of `Costs`.
        arrays: dict[str, Array] = {"forward": np.ones((1, 1, 1))}
        vectors = None
        for name, value in fields.items():
            if name not in FIELDS:
                raise SettingError(f"costs: there is no {name!r}; there are {', '.join(FIELDS)}")
            array = np.asarray(value, float)
            if array.ndim and vectors not in (None, len(array)):
                raise SettingError(
                    f"costs: {name} has {len(array)} vectors, the fields before it have {vectors}"
                )
            count = max(stages - 1 if name in PER_BOUNDARY else stages, 0)
            _check_array(name, array, count, len(micro_batches))
            vectors = len(array) if array.ndim else vectors
            arrays[name] = array.reshape(array.shape + (1,) * (3 - array.ndim))
        return cls(arrays, 1 if vectors is None else vectors, stages)

    def get(self, name: str) -> Array | None:
        """Return the named field, or None if it was not given."""
        return self.arrays.get(name)

    def get_or(self, name: str, default: float = 0.0) -> Array:
        """Return the named field, or an array of shape (1, 1, 1) with the default."""
        array = self.arrays.get(name)
        return np.full((1, 1, 1), default) if array is None else array

    def work(self) -> tuple[Array, Array, Array, Array]:
        """Return the seconds of F, B, I and W, with all defaults filled in.

        Raises:
            SettingError: `forward` is not given.
        """
        forward, backward, inputs, weights = map(
            self.get, ("forward", "backward", "input_grad", "weight_grad")
        )
        if forward is None:
            raise SettingError("costs: forward is needed")
        if backward is None:
            backward = 2 * forward if inputs is None or weights is None else inputs + weights
        # Halves where neither is known; else what the other one leaves of the backward.
        if inputs is None:
            inputs = backward / 2 if weights is None else np.maximum(backward - weights, 0.0)
        if weights is None:
            weights = np.maximum(backward - inputs, 0.0)
        return forward, backward, inputs, weights

    def crossing(self) -> tuple[Array, Array]:
        """Return the seconds on a link without its latency: to the next and to the previous stage.

        Raises:
            SettingError: fields of links contradict each other.
        """
        up, bandwidth, back = map(self.get, ("transfer", "bandwidth", "transfer_back"))
        if up is not None and (bandwidth is not None or self.get("latency") is not None):
            raise SettingError(
                "costs: transfer and latency or bandwidth both set the seconds of a message; "
                "give one of the two"
            )
        if bandwidth is not None and not bandwidth.all():
            raise SettingError(
                "costs: bandwidth is 0 bytes/s at a boundary: no message would arrive"
            )
        if up is None:
            up = self._transfer_seconds(bandwidth)
        return up, up if back is None else back

    def _transfer_seconds(self, bandwidth: Array | None) -> Array:
        """Return the seconds for the bytes of every boundary; 0 without a bandwidth."""
        if bandwidth is None:
            return np.zeros((1, 1, 1))
        seconds: Array = self.get_or("boundary_bytes") / bandwidth
        return seconds

    def vector(self, number: int) -> Amounts:
        """Return the costs of a single vector."""
        arrays = {
            name: array[number : number + 1] if len(array) > 1 else array
            for name, array in self.arrays.items()
        }
        return Amounts(arrays, 1, self.stages)

    @property
    def by_micro_batch(self) -> bool:
        """Whether any field differs by micro-batch."""
        return any(array.shape[2] > 1 for array in self.arrays.values())


def _check_array(name: str, array: Array, count: int, micro_batches: int) -> None:
    """Raise an error unless an array has the shape and the values of a field.

    Args:
        name: of the field.
        array: its values; the first axis is the vectors.
        count: number of stages or boundaries.
        micro_batches: number of micro-batches.
    """
    if array.shape[1:] not in ((), (count,), (count, micro_batches)):
        raise SettingError(
            f"costs: {name} has shape {array.shape}; it must be (vectors), (vectors, {count}) or "
            f"(vectors, {count}, {micro_batches})"
        )
    valid = np.isfinite(array) & (array >= 0)
    if not valid.all():
        raise SettingError(
            f"costs: {name} has {array[~valid].flat[0]!r}; "
            f"seconds and bytes must be finite and not negative"
        )


@dataclass(frozen=True)
class _Field:
    """Converts one field of costs to an array.

    name: of the field.
    count: number of stages or boundaries.
    micro_batches: the numbers of all micro-batches.
    """

    name: str
    count: int
    micro_batches: Sequence[int]

    def stack(self, values: list[object]) -> Array:
        """Return the values of all vectors as one array."""
        # All vectors in one conversion, which sweeps over many of them need.
        if all(isinstance(value, tuple) for value in values):
            try:
                array = np.array(values, float)
            except ValueError:  # numbers mixed with lists of numbers
                array = np.empty(0)
            if array.shape[1:] in ((self.count,), (self.count, len(self.micro_batches))):
                return array.reshape(array.shape + (1,) * (3 - array.ndim))
        # Vectors of unlike forms, such as one number beside one per stage: broadcast to the largest.
        rows = list(map(self._array, values))
        shape = np.broadcast_shapes(*(row.shape for row in rows))
        return np.stack([np.broadcast_to(row, shape) for row in rows])

    def _array(self, value: object) -> Array:
        """Return one vector's values: shape (1, 1), (count, 1) or (count, micro-batches)."""
        if callable(value):
            return self._evaluate(value)
        if not isinstance(value, tuple):
            return np.full((1, 1), value, float)
        if len(value) != self.count:
            raise SettingError(
                f"costs: {self.name} has {len(value)} entries, the schedule needs {self.count}"
            )
        per_stage = not any(isinstance(entry, tuple) for entry in value)
        width = 1 if per_stage else len(self.micro_batches)
        array = np.empty((self.count, width))
        for stage, entry in enumerate(value):
            if isinstance(entry, tuple) and len(entry) != width:
                raise SettingError(
                    f"costs: {self.name} of stage {stage} has {len(entry)} entries, "
                    f"but the schedule has {width} micro-batches"
                )
            array[stage] = entry
        return array

    def _evaluate(self, function: Callable[[int, int], object]) -> Array:
        """Return the values of a function of stage and micro-batch."""
        # Functions are called once per entry here, and not in every simulation.
        array = np.empty((self.count, len(self.micro_batches)))
        for stage in range(self.count):
            for column, number in enumerate(self.micro_batches):
                name = f"{self.name} of stage {stage}, micro-batch {number}"
                array[stage, column] = check_amount(name, function(stage, number))
        return array
