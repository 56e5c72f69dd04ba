"""What a process needs of a batch, and a reader of exactly that.

Inputs are read by the first stage, and by every stage of a traced model that starts with them;
targets by the last stage. Of a stage with replicas, each needs the inputs of its micro-batches.
Targets are needed whole: the weight of a micro-batch's loss depends on what all others count, such
as tokens that are not ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from penstock.batches.batch import Batch, micro_batch_sizes
from penstock.batches.batch_parts import BatchPart, is_missing
from penstock.batches.sample_order import order_checksum
from penstock.errors import SettingError
from penstock.runtime.assembly import Assembly
from penstock.schedule.op import Schedule
from penstock.values.structure import map_tensors, tensors_of


@dataclass(frozen=True)
class SampleNeeds:
    """The samples of a batch whose inputs, or whose targets, a process needs.

    Attributes:
        numbers: the micro-batches or slices that it needs.
        schedule: of the pipeline.
    """

    numbers: frozenset[int]
    schedule: Schedule

    def __bool__(self) -> bool:
        """Whether the process needs any."""
        return bool(self.numbers)

    def positions(self, samples: int) -> list[int]:
        """Return the positions of the needed samples in a batch.

        Args:
            samples: of the batch.
        """
        sizes, slicing = micro_batch_sizes(
            samples, self.schedule.micro_batches, self.schedule.slicing
        )
        micro_batches = self.numbers
        if slicing is not None and slicing.along == "tokens":
            micro_batches = frozenset(slicing.micro_batch_of[number] for number in self.numbers)
        positions: list[int] = []
        start = 0
        for micro_batch, size in enumerate(sizes):
            if micro_batch in micro_batches:
                positions += range(start, start + size)
            start += size
        return positions

    def read(self, read: Callable[[list[int]], Any], indices: Sequence[int]) -> BatchPart:
        """Read the needed samples of a batch.

        Args:
            read: returns the samples of some numbers of the data set, nested tensors with one row
                for each. Where nothing is needed it is called with one number, for shapes and
                types.
            indices: the numbers of all samples of the batch, the same in every process.

        Raises:
            SettingError: `read` returns another number of rows, or there are no samples.
        """
        if not len(indices):
            raise SettingError("a batch needs at least one sample to be read")
        numbers = [int(index) for index in indices]
        positions = self.positions(len(numbers))
        chosen = [numbers[position] for position in positions]
        value = read(chosen or numbers[:1])
        return BatchPart(value, positions, len(numbers), order_checksum(numbers))


@dataclass(frozen=True)
class BatchNeeds:
    """What a process needs of every batch.

    Attributes:
        inputs, targets: the samples.
    """

    inputs: SampleNeeds
    targets: SampleNeeds

    def __str__(self) -> str:
        words = []
        for name, needs in (("inputs", self.inputs), ("targets", self.targets)):
            count, total = len(needs.numbers), needs.schedule.micro_batches
            if needs.schedule.slicing is not None:
                total = len(needs.schedule.slicing.share)
            share = "all" if count == total else f"{count} of {total} micro-batches'"
            words.append(f"{share if count else 'no'} {name}")
        return ", ".join(words)


def needs_of(assembly: Assembly) -> BatchNeeds:
    """Return what the ranks of this process need of a batch."""
    schedule = assembly.setting.schedule
    all_numbers = _numbers_of_batch(schedule)
    last = len(assembly.setting.lengths) - 1
    is_traced = assembly.traced.variants is not None
    inputs: frozenset[int] = frozenset()
    targets: frozenset[int] = frozenset()
    for rank, interpreter in assembly.interpreters.items():
        for index, stage in interpreter.stages.items():
            if index == last:
                targets = all_numbers
            if index == last and is_traced:
                # A loss that the model computes is counted by the inputs of all micro-batches.
                inputs = all_numbers
            elif index == 0 or stage.runner.entry is not None:
                inputs |= _numbers_of(schedule, index, rank)
    return BatchNeeds(SampleNeeds(inputs, schedule), SampleNeeds(targets, schedule))


def _numbers_of_batch(schedule: Schedule) -> frozenset[int]:
    """Return all micro-batches or slices of a batch."""
    if schedule.stream is not None:
        # Its programs have several batches, whose micro-batches are numbered on.
        return frozenset(range(schedule.micro_batches))
    return frozenset(number for _, number in schedule.placement)


def _numbers_of(schedule: Schedule, stage: int, rank: int) -> frozenset[int]:
    """Return the micro-batches or slices that a rank runs on a stage."""
    if schedule.stream is not None:
        # Later batches of a stream may be on other replicas.
        return _numbers_of_batch(schedule)
    return frozenset(
        number
        for (placed, number), runner in schedule.placement.items()
        if (placed, runner) == (stage, rank)
    )


def check_needs(assembly: Assembly, batch: Batch) -> None:
    """Refuse a batch that has not what this process needs of it.

    Raises:
        SettingError: it has not; the other ranks are stopped with the same message.
    """
    x, y = batch.whole
    if not (is_missing(x) or (y is not None and is_missing(y))):
        return
    needs = needs_of(assembly)
    faults = []
    rows = [("inputs", needs.inputs, batch.inputs), ("targets", needs.targets, batch.targets)]
    for name, sample_needs, parts in rows:
        if parts is None:
            continue
        numbers = [n for n in sorted(sample_needs.numbers) if n < len(parts)]
        missing = [number for number in numbers if is_missing(parts[number])]
        if missing:
            faults.append(f"{name} of micro-batches {', '.join(map(str, missing))}")
    if not faults:
        return
    ranks = ", ".join(map(str, assembly.world.local_ranks))
    error = SettingError(
        f"rank {ranks} needs the {' and the '.join(faults)}, and this batch has not all of them: "
        "read with pipe.reader or pipe.needs of this pipeline, or give every rank the whole batch"
    )
    assembly.world.abandon(error)
    raise error


class BatchReader:
    """One epoch of batches, of which this process reads what it needs; see `Pipeline.reader`.

    Args:
        needs: of this process.
        inputs, targets: of all samples; targets are None if inputs are pairs.
        batch: samples per batch.
        order: returns the order of a number of samples.
        drop_last: leave out a last batch that is smaller than the others.

    Raises:
        SettingError: the batch is below 1, inputs and targets differ in number, or there is not a
            single batch.
    """

    def __init__(
        self,
        needs: BatchNeeds,
        inputs: Any,
        targets: Any,
        batch: int,
        order: Callable[[int], Tensor],
        *,
        drop_last: bool,
    ) -> None:
        samples = len(inputs)
        if targets is not None and len(targets) != samples:
            raise SettingError(
                f"{samples} inputs and {len(targets)} targets: every input needs its own target"
            )
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise SettingError(f"batch is a whole number of 1 or more, not {batch!r}")
        self._count = samples // batch if drop_last else -(-samples // batch)
        if not self._count:
            raise SettingError(
                f"no batch of {batch} can be made of {samples} samples: choose a smaller batch or "
                "provide more samples"
            )
        self._needs = needs
        self._inputs, self._targets = inputs, targets
        self._order, self._batch = order(samples), batch
        # What is read where nothing is needed, for its shapes and types.
        self._example: dict[int, Any] = {}

    def __len__(self) -> int:
        """Return the number of batches."""
        return self._count

    def __iter__(self) -> Iterator[tuple[BatchPart, BatchPart]]:
        return self.batches(0, self._count)

    def batches(self, first: int, end: int) -> Iterator[tuple[BatchPart, BatchPart]]:
        """Yield the batches from number `first` to before `end`."""
        for number in range(first, min(end, self._count)):
            indices = self._order[number * self._batch : (number + 1) * self._batch].tolist()
            if self._targets is None:
                yield self._pairs(indices)
                continue
            yield (
                self._part(self._needs.inputs, self._inputs, 0, indices),
                self._part(self._needs.targets, self._targets, 1, indices),
            )

    def _part(
        self, needs: SampleNeeds, source: Any, kind: int, indices: Sequence[int]
    ) -> BatchPart:
        """Read inputs or targets."""
        if needs:
            return needs.read(lambda chosen: _read(source, chosen), indices)
        if kind not in self._example:
            self._example[kind] = _read(source, [indices[0]])
        return needs.read(lambda _: self._example[kind], indices)

    def _pairs(self, indices: Sequence[int]) -> tuple[BatchPart, BatchPart]:
        """Read samples that are pairs of an input and a target."""
        needs = self._needs
        positions: set[int] = set()
        for sample_needs in (needs.inputs, needs.targets):
            positions.update(sample_needs.positions(len(indices)))
        chosen = sorted(positions)
        if chosen:
            x, y = _pair(_read(self._inputs, [indices[position] for position in chosen]))
        else:
            # Nothing is needed: one pair, which is read once, shows shapes and types.
            if 0 not in self._example:
                self._example[0] = _pair(_read(self._inputs, [indices[0]]))
            x, y = self._example[0]
        # By numbers of the data set, since these are what `SampleNeeds.read` passes to `take`.
        row_of = {indices[position]: row for row, position in enumerate(chosen)}

        def rows(value: Any) -> Callable[[list[int]], Any]:
            """Return a function that takes rows of what was read."""

            def take(numbers: list[int]) -> Any:
                # Of inputs or targets that are not needed, any row shows the form.
                places = torch.tensor([row_of.get(number, 0) for number in numbers])
                return map_tensors(lambda leaf: leaf[places], value)

            return take

        return needs.inputs.read(rows(x), indices), needs.targets.read(rows(y), indices)


def _read(source: Any, indices: list[int]) -> Any:
    """Return some samples of a data set as nested tensors with one row for each.

    Raises:
        SettingError: they cannot be stacked.
    """
    if isinstance(source, Tensor):
        return source[torch.tensor(indices, device=source.device)]
    samples = [source[index] for index in indices]
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError) as error:
        raise SettingError(
            f"the samples of {type(source).__name__} cannot be stacked: {error}"
        ) from error


def _pair(value: Any) -> tuple[Any, Any]:
    """Return inputs and targets of samples that are pairs.

    Raises:
        SettingError: they are no pairs.
    """
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        return value[0], value[1]
    raise SettingError(
        "the samples of a reader without targets are pairs of an input and a target, not "
        f"{type(value).__name__} with {len(tensors_of(value))} tensors: give inputs and targets "
        "apart"
    )
