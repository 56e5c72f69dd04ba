"""Op and Schedule: the common form of all schedules, built-in or user-defined."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.files.text import quote
from penstock.notebook import NotebookPicture
from penstock.schedule.slicing import Slicing
from penstock.schedule.streaming.streams import Stream


class Kind(str, Enum):
    """What an op does. F, B, I and W are named as in torch.distributed.pipelining."""

    F = "F"  #: forward
    B = "B"  #: whole backward
    I = "I"  #: backward for the stage's input only  # noqa: E741 - the field's letter
    W = "W"  #: backward for the stage's weights only
    U = "U"  #: gradient synchronisation and optimizer step
    E = "E"  #: evict: send the activations of a micro-batch to a partner rank
    L = "L"  #: load: get them back

    # Enum.__hash__ is a Python call, and programs hash millions of kinds.
    __hash__ = str.__hash__

    def __str__(self) -> str:
        """Return the letter."""
        return self.value


#: At most 18 digits, which fit into 64 bits: int() refuses thousands of digits with another error.
_TEXT = re.compile(r"([0-9]{1,18})([FBIWUEL])([0-9]{1,18})")


class Op(NamedTuple):
    """One unit of work of a rank.

    For U, `micro_batch` is the weight version that the op produces; the first is 1. In a schedule
    with a `Slicing`, `micro_batch` counts slices. E and L occur in two programs: that of the rank
    whose activations they are, and that of the partner which stores them.

    Examples:
        >>> op = Op.parse("2F0")
        >>> op.stage, op.kind.name, op.micro_batch
        (2, 'F', 0)
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """Return the text, e.g. `2F0`."""
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Op:
        """Parse the text of an op, e.g. `2F0`: stage 2, forward, micro-batch 0.

        Raises:
            ScheduleError: `text` is not of that form.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{quote(text)} is not an op: write stage, one of F B I W U E L, micro-batch, "
                "such as '2F0'"
            )
        return cls(Kind(match[2]), int(match[1]), int(match[3]))


Program = tuple[Op, ...]

#: Kinds that move activations between ranks and compute nothing.
ACTIVATION_MOVES = (Kind.E, Kind.L)

#: Kinds with which the backward of a micro-batch on a stage starts: they compute the gradient of
#: the stage's input, and so need the gradient of its output.
BACKWARD_STARTS = (Kind.B, Kind.I)

#: Kinds with which it ends: the gradients of the stage's weights are then complete, and the saved
#: activations are released.
BACKWARD_ENDS = (Kind.B, Kind.W)


@dataclass(frozen=True)
class Schedule(NotebookPicture):
    """The programs of all ranks.

    The rank of an op is given by the program that it is in. `name` and `options` say how the
    schedule was made, for people; no decision depends on them.

    >>> print(Schedule.parse("rank 0 | 0F0 0F1&0B0 0B1 0U1", name="mine"))
    rank 0 | 0F0 0F1&0B0 0B1 0U1

    Attributes:
        programs: the ops of each rank, in order.
        name: name of the schedule.
        synchronous: whether every stage updates once, after all its gradients.
        options: the options that the schedule was made with, as (name, value).
        pairs: adjacent ops that run as one: both start when the inputs of both are available, and
            both end together. Written `0F1&0B0`. Executors may run them one after the other, which
            waits for less.
        slicing: how micro-batches are cut into slices, if they are.
        stream: how an asynchronous schedule continues from batch to batch. None: the programs are
            those of one batch.
    """

    programs: tuple[Program, ...]
    name: str = "custom"
    synchronous: bool = True
    options: tuple[tuple[str, object], ...] = field(default=())
    pairs: frozenset[tuple[Op, Op]] = frozenset()
    slicing: Slicing | None = None
    stream: Stream | None = None

    def __post_init__(self) -> None:
        """Convert sequences of ops to tuples."""
        object.__setattr__(self, "programs", tuple(tuple(program) for program in self.programs))
        object.__setattr__(self, "pairs", frozenset(self.pairs))

    def __str__(self) -> str:
        """Return one line per rank, e.g. `rank 0 | 0F0 0B0 0U1`."""
        return "\n".join(f"rank {rank} | {line}" for rank, line in enumerate(self.lines))

    @property
    def lines(self) -> tuple[str, ...]:
        """The text of each rank's program, as `parse` reads it."""
        return tuple(map(self._line, self.programs))

    def _line(self, ops: Program) -> str:
        """Write a program; `&` joins the ops of a pair."""
        if not self.pairs:
            return " ".join(map(str, ops))
        text = "".join(
            f"{op}{'&' if pair in self.pairs else ' '}"
            for op, pair in zip(ops, pairwise(ops), strict=False)
        )
        return text + " ".join(map(str, ops[-1:]))

    @classmethod
    def parse(cls, text: str, name: str = "custom", synchronous: bool = True) -> Schedule:
        """Parse what `str` prints: one line per rank, `rank 0 | 0F0 0F1 …`.

        The labels are optional; blank lines are skipped.

        Raises:
            ScheduleError: a word is not an op, or a label has the wrong rank.
        """
        programs: list[Program] = []
        pairs: set[tuple[Op, Op]] = set()
        for line in filter(str.strip, text.splitlines()):
            label, bar, row = line.partition("|")
            number = re.search(r"[0-9]+", label)
            if bar and (number is None or number[0] != str(len(programs))):
                raise ScheduleError(
                    f"{quote(label.strip())} labels the program of rank {len(programs)}: write one "
                    "line per rank, in order from 'rank 0 |'"
                )
            program: list[Op] = []
            for word in (row if bar else line).split():
                ops = [Op.parse(part) for part in word.split("&")]
                pairs.update(pairwise(ops))
                program += ops
            programs.append(tuple(program))
        return cls(tuple(programs), name, synchronous, pairs=frozenset(pairs))

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """All ops, rank by rank."""
        return tuple(op for program in self.programs for op in program)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.programs)

    @cached_property
    def stages(self) -> int:
        """Number of stages: one more than the highest stage named."""
        return 1 + max((op.stage for op in self.ops), default=-1)

    @property
    def batches(self) -> int:
        """Number of batches in the programs."""
        return 1 if self.stream is None else self.stream.batches

    @cached_property
    def micro_batches(self) -> int:
        """Number of micro-batches per batch; slices of one micro-batch count as one."""
        if self.slicing is not None:
            return len(self.slicing.shares)
        return -(-self.slices // self.batches)

    @cached_property
    def slices(self) -> int:
        """Number of micro-batches of all batches, or of slices if micro-batches are cut.

        One more than the highest number of a forward.
        """
        return 1 + max((op.micro_batch for op in self.ops if op.kind is Kind.F), default=-1)

    @cached_property
    def total_micro_batches(self) -> int:
        """Number of micro-batches of all batches; slices of one micro-batch count as one."""
        return self.micro_batches * self.batches

    @property
    def slices_per_micro_batch(self) -> float:
        """Mean number of slices of a micro-batch; 1 if micro-batches are not cut."""
        return self.slices / self.total_micro_batches

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Share of each slice in its micro-batch; 1 for each micro-batch that is not cut."""
        return (1.0,) * self.slices if self.slicing is None else self.slicing.share

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward is split into I and W."""
        return any(op.kind is Kind.W for op in self.ops)

    @cached_property
    def placement(self) -> dict[tuple[int, int], int]:
        """The rank of every forward by (stage, micro-batch)."""
        return {
            (op.stage, op.micro_batch): rank
            for rank, program in enumerate(self.programs)
            for op in program
            if op.kind is Kind.F
        }

    def boundary_ranks(self, stage: int) -> list[tuple[int, int]]:
        """Return the ranks of a stage and of the next one, for every micro-batch (or slice)."""
        numbers = range(self.slices)
        return [(self.placement[stage, n], self.placement[stage + 1, n]) for n in numbers]

    @cached_property
    def stages_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, ascending.

        A rank that only stores the activations of another rank's stage does not hold that stage.
        """
        stages_of_rank = []
        for program in self.programs:
            stages = {op.stage for op in program if op.kind not in ACTIVATION_MOVES}
            stages_of_rank.append(tuple(sorted(stages)))
        return tuple(stages_of_rank)

    @cached_property
    def ranks_of_stage(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage's copies, ascending."""
        ranks_of_stage: list[list[int]] = [[] for _ in range(self.stages)]
        for rank, stages in enumerate(self.stages_of_rank):
            for stage in stages:
                ranks_of_stage[stage].append(rank)
        return tuple(map(tuple, ranks_of_stage))

    @property
    def copies(self) -> int:
        """The number of copies of the stage that has the most."""
        return max(map(len, self.ranks_of_stage), default=1)

    def on_ranks(self, ranks: Sequence[int]) -> Schedule:
        """Return the schedule with the program of rank r on rank `ranks[r]`.

        >>> from penstock.schedule.catalogue import schedule
        >>> print(schedule("1f1b", 2, 1).on_ranks((1, 0)))
        rank 0 | 1F0 1B0 1U1
        rank 1 | 0F0 0B0 0U1

        Raises:
            ScheduleError: `ranks` is not a permutation of this schedule's ranks.
        """
        if sorted(ranks) != list(range(self.ranks)):
            raise ScheduleError(
                f"{list(ranks)} is not a permutation of the {self.ranks} ranks of {self.name}"
            )
        program_of = dict(zip(ranks, self.programs, strict=True))
        return replace(self, programs=tuple(program_of[rank] for rank in range(self.ranks)))

    def first_micro_batches(self, count: int) -> Schedule:
        """Return the schedule with only its first `count` micro-batches, in the same order.

        Used for a batch that is too small to fill all of them. Removing a micro-batch from a sound
        schedule gives a sound one, since no micro-batch waits for another. Where micro-batches are
        cut along samples, `count` is a number of slices, which then are small micro-batches.
        """
        slicing, slice_count = self.slicing, count
        if slicing is not None and slicing.along == "tokens":
            slicing = replace(slicing, shares=slicing.shares[:count])
            slice_count = len(slicing.share)
        if slice_count >= self.slices:
            return self
        if slicing is not None and slicing.along == "samples":
            slicing = None
        shortened = self._filter(lambda op: op.kind is Kind.U or op.micro_batch < slice_count)
        return replace(shortened, slicing=slicing)

    def forward_only(self) -> Schedule:
        """Return the schedule with only its forwards, in the same order: for evaluation."""
        return self._filter(lambda op: op.kind is Kind.F)

    def _filter(self, keeps: Callable[[Op], bool]) -> Schedule:
        """Return the schedule without the ops for which `keeps` is false."""
        programs = tuple(tuple(filter(keeps, program)) for program in self.programs)
        pairs = frozenset(pair for pair in self.pairs if all(map(keeps, pair)))
        return replace(self, programs=programs, pairs=pairs)
