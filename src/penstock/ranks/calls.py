"""Comparison of calls: every rank must call the same methods, in order, with the same batches."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch._C._distributed_c10d import Store

from penstock.batches.batch import Batch
from penstock.batches.batch_parts import BatchPart
from penstock.errors import DeadlineExceeded, RanksDiffer, SettingError
from penstock.ranks.batch_forms import contents, crc_of, differ, nested_form, pair_form, part_form
from penstock.ranks.checksum import Glimpse, batch_checksum, format_numbers
from penstock.ranks.settings.settings_exchange import missing_keys
from penstock.ranks.store_status_board import StoreBoard
from penstock.transport.process_group import naming_lost_ranks
from penstock.units import format_ranks
from penstock.values.rare_checks import is_due
from penstock.values.structure import tensors_of

#: Batches that are compared as a whole, before anything is computed: the first ones, and then those
#: with numbers 8, 16, 32, ...
FIRST_BATCHES = 4

#: Of batches on a GPU, whose numbers must be waited for, every one with such a number is compared
#: in between.
GPU_PERIOD = 16

#: Tensors of a batch whose numbers a message shows.
_VALUES_IN_MESSAGE = 4

#: Forms of nested batches whose words are remembered.
_MOST_FORMS = 1024

#: Calls that a rank remembers, for others that wait for it.
_RECENT = 8

#: A checksum that goes with a loss: the call and its form in the upper bits, the numbers in the
#: lower ones; 53 bits are exact in a double.
_BITS = 26
_MASK = (1 << _BITS) - 1

#: Seconds for which a difference waits for the other rank's words.
_PATIENCE_S = 3.0

#: Seconds between two looks at the words of the other ranks.
_PAUSE_S = 0.02


def is_compared_whole(batch: int) -> bool:
    """Return whether ranks compare all numbers of a batch, given its number in the run, from 0."""
    return batch < FIRST_BATCHES or is_due(batch)


class Calls:
    """The calls of a pipeline whose ranks are threads of one process: there is one call, and
    nothing to compare.

    Attributes:
        check_data: whether batches are compared, of ranks that are processes.
    """

    check_data: bool = True

    def begin(self, batch: Batch, x: Any, y: Any, call: str) -> Batch:
        """Before a batch is played: compare it with the other ranks'.

        Args:
            batch: what is made of x and y; it remembers its checksum.
            x: inputs.
            y: targets, if there are any.
            call: what is done with it.

        Raises:
            RanksDiffer: other ranks have another one, or do something else. Nothing has been
                computed.
        """
        del x, y, call
        return batch

    def enter(self, call: str) -> None:
        """Note a call of any other method that every rank must call."""

    def verify(self, source: int, check: float, batch: Batch) -> None:
        """Compare a checksum that came with a loss from rank `source`.

        Raises:
            RanksDiffer: that rank had another batch.
        """

    def check_loader(self, loader: object) -> None:
        """Refuse a loader that gives every rank other batches.

        Raises:
            SettingError: it does.
        """


class Call(NamedTuple):
    """One call of a method.

    Attributes:
        number: calls before it.
        name: the method.
        form: shapes and types of a batch, in words.
        check: checksum, see `_BITS`; without a batch that of the name.
        values: some of a batch's numbers.
    """

    number: int
    name: str
    form: str
    check: int
    values: Sequence[Glimpse] = ()

    def row(self) -> list[Any]:
        """Return the entry that is published to other ranks."""
        numbers = "; ".join(map(format_numbers, self.values[:_VALUES_IN_MESSAGE]))
        return [self.number, self.check, self.name, self.form, numbers]


class ComparedCalls(Calls):
    """The calls of a rank that is a process.

    Args:
        store: the corner of the pipeline.
        board: the rank's board.
        rank: the rank.
        size: number of ranks.
        deadline_s: seconds to wait for others.
    """

    def __init__(
        self, store: Store, board: StoreBoard, rank: int, size: int, deadline_s: float
    ) -> None:
        self._store, self._board, self._rank, self._size = store, board, rank, size
        self._deadline_s = deadline_s
        self._recent: deque[Call] = deque(maxlen=_RECENT)
        self._number = self._batches = 0
        self._forms: dict[object, str] = {}
        self.check_data = True
        self._changed_in_place = False
        board.calls = self

    def enter(self, call: str) -> None:
        """See `Calls.enter`."""
        self._number += 1
        # With the number of the call, so that a rank that is one call behind differs. Primes spread
        # small numbers over all bits.
        check = ((crc_of(call) + 7919 * self._number) & _MASK) << _BITS
        self._recent.append(Call(self._number, call, "", check))

    def begin(self, batch: Batch, x: Any, y: Any, call: str) -> Batch:
        """See `Calls.begin`."""
        self._number += 1
        turn = self._batches
        self._batches += 1
        whole = is_compared_whole(turn)
        tensors: Sequence[Tensor]
        if not self.check_data:
            form, tensors = f"{len(batch.inputs)} micro-batches", ()
        elif type(x) is Tensor and type(y) is Tensor:
            tensors = (x, y)
            form = pair_form(x.shape, x.dtype, y.shape, y.dtype)
        elif isinstance(x, BatchPart) or isinstance(y, BatchPart):
            form, tensors = part_form(x, y)
        else:
            form, tensors = self._describe_nested(batch, x, y)
        # Multiplied by primes, as in `enter`.
        words = crc_of(call) + crc_of(form) + 7919 * self._number + 104729 * batch.step
        check = (words & _MASK) << _BITS
        batch.check = check
        entry = Call(self._number, call, form, check)
        self._recent.append(entry)
        if tensors and self._readable(tensors, turn, whole=whole):
            versions = _versions(tensors)
            batch.pending_check = partial(self._read, entry, tensors, versions, turn)
        # At once where the numbers may be others later: inference tensors have no version by which
        # `_read` would notice.
        if whole or self._changed_in_place or any(map(Tensor.is_inference, tensors)):
            batch.checksum()
        if whole:
            numbers = contents(x, y) if self.check_data else []
            # Not `entry`: `checksum` replaces it by one with the numbers.
            self._compare_batch(self._recent[-1], batch.step, numbers)
        return batch

    def _read(
        self, entry: Call, tensors: Sequence[Tensor], versions: Sequence[int], turn: int
    ) -> int:
        """Add the numbers of a batch to its call. Returns the checksum.

        If a layer or the caller has changed the batch in place meanwhile, its numbers are no longer
        those that were given. They then do not count, and those of later batches are read at once.
        """
        if _versions(tensors) != versions:
            self._changed_in_place = True
            return entry.check
        content, values = batch_checksum(tensors, turn)
        # The lower bits are 0 where the numbers were not read: a checksum of read ones is at least
        # 1.
        numbers_check = 1 + content % _MASK
        complete = entry._replace(check=entry.check | numbers_check, values=values)
        for place in range(len(self._recent)):
            if self._recent[place] is entry:
                self._recent[place] = complete
        return complete.check

    def _describe_nested(self, batch: Batch, x: Any, y: Any) -> tuple[str, list[Tensor]]:
        """Describe nested inputs and targets; return also their tensors."""
        if y is not None and type(y) is not Tensor:
            return nested_form(x, y)
        # The batch's signature says everything of the inputs, and words take time.
        key = (batch.signature, None if y is None else (y.shape, y.dtype))
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= _MOST_FORMS:
                self._forms.clear()
            form, _ = nested_form(x, y)
            self._forms[key] = form
        tensors = tensors_of(x)
        return form, tensors if y is None else [*tensors, y]

    @staticmethod
    def _readable(tensors: Sequence[Tensor], turn: int, *, whole: bool) -> bool:
        if whole or turn % GPU_PERIOD == 0:
            return True
        for tensor in tensors:  # noqa: SIM110 - once a batch, where a generator would be a large part
            if not tensor.is_cpu:
                return False
        return True

    @naming_lost_ranks("could not compare its batch with the other ranks'")
    def _compare_batch(self, call: Call, step: int, numbers: Sequence[int | None]) -> None:
        """Compare a batch with those of all other ranks, before it is played."""
        self._board.doing(f"waits for the other ranks at {call.name}")
        keys = [f"call/{call.number}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], json.dumps([*call.row(), step, numbers]))
        missing = missing_keys(self._store, keys, self._board.check, self._deadline_s)
        if missing:
            error = DeadlineExceeded(
                self._rank,
                f"{format_ranks(missing)} to call {call.name}",
                self._deadline_s,
                self._board.describe_others(),
            )
            self._board.fail(str(error))
            raise error
        rows: dict[int, list[Any]] = {}
        steps: dict[int, str] = {}
        forms: set[int] = set()
        numbers_of_ranks: list[list[int | None]] = []
        for rank, text in enumerate(self._store.multi_get(keys)):
            number, check, name, form, values, step_of_rank, numbers_of_rank = json.loads(text)
            # For the message a checksum of all numbers, where `check` has one of a sample.
            rows[rank] = [number, crc_of(json.dumps(numbers_of_rank)), name, form, values]
            steps[rank] = f"step {step_of_rank}"
            forms.add(check >> _BITS)
            numbers_of_ranks.append(numbers_of_rank)
        if len(forms) > 1 or differ(numbers_of_ranks):
            raise RanksDiffer(message_of(call.number, rows, steps))

    def verify(self, source: int, check: float, batch: Batch) -> None:
        """See `Calls.verify`."""
        expected = batch.checksum()
        if not unlike(expected, int(check)):
            return
        number = next((call.number for call in self._recent if call.check == expected), 0)
        message = (
            self.difference(self._calls_of_others(source, number))
            or f"rank {source} has another batch than rank {self._rank} in call {number}"
        )
        if batch.training:
            message += _LATE
        self._board.fail(message, differs=True)
        self._board.check_difference()  # another rank may have been first, and all say the same
        raise RanksDiffer(message)

    def _calls_of_others(self, source: int, number: int) -> dict[int, list[list[Any]]]:
        """Return the calls of the other ranks, by rank, waiting for call `number` of rank `source`."""
        end_s = time.monotonic() + _PATIENCE_S
        while True:
            others = self._board.other_calls()
            has_come = any(row[0] == number for row in others.get(source, ()))
            if has_come or time.monotonic() >= end_s:
                return others
            time.sleep(_PAUSE_S)

    def rows(self) -> list[list[Any]]:
        """Return the rows of the last calls, oldest first. The board's thread calls it."""
        while True:
            try:
                return [call.row() for call in self._recent]
            except RuntimeError:  # one more came in between
                continue

    def difference(self, others: Mapping[int, Sequence[Sequence[Any]]]) -> str | None:
        """Describe the first call in which another rank did something else; None if there is none.

        Args:
            others: by rank, the rows of all other ranks.
        """
        calls = {row[0]: row for row in self.rows()}
        numbers = [
            row[0]
            for rows in others.values()
            for row in rows
            if row[0] in calls and unlike(calls[row[0]][1], row[1])
        ]
        if not numbers:
            return None
        rows_by_rank = {**others, self._rank: list(calls.values())}
        first = {
            rank: row
            for rank, rows in sorted(rows_by_rank.items())
            for row in rows
            if row[0] == min(numbers)
        }
        return message_of(min(numbers), first, {})

    def followed(self, others: Mapping[int, Sequence[Sequence[Any]]]) -> bool:
        """Whether all other ranks have published this rank's last call, or a later one."""
        numbers = [rows[-1][0] for rows in others.values() if rows]
        return len(numbers) == self._size - 1 and min(numbers, default=0) >= self._number

    def check_loader(self, loader: object) -> None:
        """See `Calls.check_loader`."""
        for sampler in _samplers(loader):
            kinds = {kind.__name__ for kind in type(sampler).__mro__}
            replicas = getattr(sampler, "num_replicas", 1)
            if "DistributedSampler" in kinds and replicas > 1:
                raise SettingError(
                    f"the loader's {type(sampler).__name__} gives every rank another one of "
                    f"{replicas} parts of the data. All ranks of a Pipeline work on the same batch: "
                    "give every rank the whole batch, by a loader without this sampler whose "
                    "shuffling is seeded (generator=torch.Generator().manual_seed(0)), or with "
                    "shuffle=False"
                )


_LATE = (
    ". This batch has already been computed, and the weights have been updated with it: begin "
    "again from a checkpoint"
)
_DATA = (
    "Give every rank the same batches: seed the loader's shuffling "
    "(generator=torch.Generator().manual_seed(0)), or take shuffle=False. A Pipeline needs the "
    "whole batch on every rank, not a part of it as DistributedSampler gives; check_data=False "
    "switches this check off"
)
_END = (
    "The loaders must give the same number of batches on every rank (drop_last=True, or samplers "
    "of one length)"
)
_ORDER = (
    "Every rank must call the same methods of its Pipeline in the same order; what one rank alone "
    "needs, such as printing a result, goes after the call"
)

_STEPS = (
    "The ranks have not trained the same number of batches: load the same checkpoint on every rank"
)

#: Calls after which there are no more batches.
END_OF_TRAIN, CLOSED = "the end of train()", "close()"


def unlike(one: int, other: int) -> bool:
    """Whether two checksums are of different calls. Numbers that were not read are like all others."""
    if one >> _BITS != other >> _BITS:
        return True
    return bool(one & _MASK and other & _MASK and one != other)


def message_of(number: int, rows: Mapping[int, Sequence[Any]], steps: Mapping[int, str]) -> str:
    """Return the error that is raised on every rank.

    Args:
        number: of the call.
        rows: by rank, `Call.row`.
        steps: by rank, in words, where they are known.
    """
    names = {row[2] for row in rows.values()}
    same_form = len({row[3] for row in rows.values()}) == 1
    same_step = len(set(steps.values())) <= 1
    groups: dict[str, list[int]] = {}
    for rank, row in rows.items():
        description = _description(row, with_values=same_form)
        if not same_step:
            description += f" at {steps[rank]}"
        groups.setdefault(description, []).append(rank)
    lines = [f"  {call} on {format_ranks(ranks)}" for call, ranks in groups.items()]
    advice = _DATA
    if len(names) > 1:
        advice = _END if names & {END_OF_TRAIN, CLOSED} else _ORDER
    elif not same_step:
        advice = _STEPS
    head = f"the ranks do not do the same in call {number} of this Pipeline:"
    if len(names) == 1 and advice is _DATA:
        head = f"the ranks have different batches in call {number} of this Pipeline:"
    return "\n".join([head, *lines, advice])


def _description(row: Sequence[Any], *, with_values: bool) -> str:
    """Describe one rank's call, with the values of its batch where those may be the difference."""
    _, check, name, form, values = row[:5]
    if not form:
        return str(name)
    if not values or not with_values:
        return f"{name} with {form}"
    return f"{name} with {form}, values {values} (checksum {check & _MASK:x})"


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return autograd's counts of changes in place; inference tensors have none."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _samplers(loader: object) -> list[object]:
    """Return the samplers of a loader, those that others draw from included."""
    samplers: list[object] = []
    waiting = [loader]
    # Samplers of a user's may refer to each other in a circle.
    while waiting and len(samplers) < 16:
        item = waiting.pop()
        for name in ("sampler", "batch_sampler"):
            sampler = getattr(item, name, None)
            visited = any(sampler is other for other in samplers)
            if sampler is not None and not visited:
                samplers.append(sampler)
                waiting.append(sampler)
    return samplers
