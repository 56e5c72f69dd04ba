"""Op, Schedule: the one form of every schedule, ours or a user's."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.notebook import Shown
from penstock.schedule.slicing import Slicing
from penstock.schedule.stream import Stream


class Kind(str, Enum):
    """What an op does. F, B, I and W are spelled as in torch.distributed.pipelining."""

    F = "F"  #: forward
    B = "B"  #: whole backward
    I = "I"  #: backward for the stage's input only  # noqa: E741 - the field's letter
    W = "W"  #: backward for the stage's weights only
    U = "U"  #: gradient synchronisation and optimizer step
    E = "E"  #: evict: the activations of a micro-batch go to a partner rank
    L = "L"  #: load: they come back

    # Enum's own hash is a Python call; programs hash millions of these.
    __hash__ = str.__hash__

    def __str__(self) -> str:
        return self.value


#: No more digits than a machine integer has: int() itself refuses thousands of them, in words of
#: its own.
_TEXT = re.compile(r"([0-9]{1,18})([FBIWUEL])([0-9]{1,18})")


class Op(NamedTuple):
    """One unit of work. For U, `micro_batch` is the weight version that the op makes (1 is the
    first).

    In a schedule with a `Slicing`, `micro_batch` counts slices. E and L stand in two programs: that
    of the rank which holds the micro-batch's activations and that of the partner which takes them
    in.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Op:
        """The op written `2F0`: stage 2, forward, micro-batch 0.

        Raises:
            ScheduleError: `text` is not of that form.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an op: write stage, one of F B I W U E L, micro-batch, such as '2F0'"
            )
        return cls(Kind(match[2]), int(match[1]), int(match[3]))


Program = tuple[Op, ...]

#: Kinds that hand activations from rank to rank and compute nothing.
HANDING = (Kind.E, Kind.L)


@dataclass(frozen=True)
class Schedule(Shown):
    """The programs of all ranks. Where an op stands is its placement.

    `name` and `options` say how the schedule was made, for people; nothing decides by them.

    >>> print(Schedule.parse("rank 0 | 0F0 0F1&0B0 0B1 0U1", name="mine"))
    rank 0 | 0F0 0F1&0B0 0B1 0U1

    Attributes:
        programs: per rank, its ops in order.
        synchronous: whether every stage updates once, after all its gradients.
        pairs: ops that stand next to each other and run as one: both begin when all that either
        needs is there, both end
            together. Written `0F1&0B0`. Executors may run them one after the other, which waits for
            less.
        slicing: how micro-batches are cut further, if they are.
        stream: of an asynchronous schedule, how it goes on from batch to batch. Without it the
        programs are those of one batch.
    """

    programs: tuple[Program, ...]
    name: str = "custom"
    synchronous: bool = True
    options: tuple[tuple[str, object], ...] = field(default=())
    pairs: frozenset[tuple[Op, Op]] = frozenset()
    slicing: Slicing | None = None
    stream: Stream | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "programs", tuple(tuple(program) for program in self.programs))
        object.__setattr__(self, "pairs", frozenset(self.pairs))

    def __str__(self) -> str:
        return "\n".join(f"rank {rank} | {line}" for rank, line in enumerate(self.lines))

    @property
    def lines(self) -> tuple[str, ...]:
        """Every rank's program in words, as `parse` reads it."""
        return tuple(map(self._line, self.programs))

    def _line(self, ops: Program) -> str:
        if not self.pairs:
            return " ".join(map(str, ops))
        text = "".join(
            f"{op}{'&' if pair in self.pairs else ' '}"
            for op, pair in zip(ops, pairwise(ops), strict=False)
        )
        return text + " ".join(map(str, ops[-1:]))

    @classmethod
    def parse(cls, text: str, name: str = "custom", synchronous: bool = True) -> Schedule:
        """Read back what `str` prints: one line per rank, `rank 0 | 0F0 0F1 …`. Labels may lack;
        blank lines are skipped.

        Raises:
            ScheduleError: a word is no op, or a label's number is not that of its line.
        """
        programs: list[Program] = []
        pairs: set[tuple[Op, Op]] = set()
        for line in filter(str.strip, text.splitlines()):
            label, bar, row = line.partition("|")
            number = re.search(r"[0-9]+", label)
            if bar and (number is None or number[0] != str(len(programs))):
                raise ScheduleError(
                    f"{label.strip()!r} labels the program of rank {len(programs)}: write one line per rank, "
                    "in order from 'rank 0 |'"
                )
            words = [
                tuple(map(Op.parse, word.split("&"))) for word in (row if bar else line).split()
            ]
            pairs.update(pair for word in words for pair in pairwise(word))
            programs.append(tuple(op for word in words for op in word))
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
        """Number of batches that the programs run."""
        return 1 if self.stream is None else self.stream.batches

    @cached_property
    def micro_batches(self) -> int:
        """Number of whole micro-batches of one batch."""
        if self.slicing is not None:
            return len(self.slicing.shares)
        return -(-self.slices // self.batches)

    @cached_property
    def slices(self) -> int:
        """How many numbers forwards have: one more than the highest. That of micro-batches of all
        batches, unless those are cut.
        """
        return 1 + max((op.micro_batch for op in self.ops if op.kind is Kind.F), default=-1)

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Per number that forwards have, its share of a micro-batch: 1, unless those are cut."""
        return (1.0,) * self.slices if self.slicing is None else self.slicing.share

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward is split into I and W."""
        return any(op.kind is Kind.W for op in self.ops)

    @cached_property
    def placement(self) -> dict[tuple[int, int], int]:
        """(stage, micro-batch) to the rank on which its forward stands."""
        return {
            (op.stage, op.micro_batch): rank
            for rank, program in enumerate(self.programs)
            for op in program
            if op.kind is Kind.F
        }

    @cached_property
    def stages_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank holds, ascending. Who only takes in activations holds no stage
        by that.
        """
        return tuple(
            tuple(sorted({op.stage for op in program if op.kind not in HANDING}))
            for program in self.programs
        )

    @cached_property
    def ranks_of_stage(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold a copy of each stage, ascending."""
        holders: list[list[int]] = [[] for _ in range(self.stages)]
        for rank, stages in enumerate(self.stages_of_rank):
            for stage in stages:
                holders[stage].append(rank)
        return tuple(map(tuple, holders))

    def on_ranks(self, ranks: Sequence[int]) -> Schedule:
        """The same schedule with the program of rank r on rank `ranks[r]`.

        >>> from penstock.schedule.catalogue import schedule
        >>> print(schedule("1f1b", 2, 1).on_ranks((1, 0)))
        rank 0 | 1F0 1B0 1U1
        rank 1 | 0F0 0B0 0U1

        Raises:
            ScheduleError: `ranks` is no permutation of this schedule's ranks.
        """
        if sorted(ranks) != list(range(self.ranks)):
            raise ScheduleError(
                f"{list(ranks)} is no permutation of the {self.ranks} ranks of {self.name}"
            )
        program_of = dict(zip(ranks, self.programs, strict=True))
        return replace(self, programs=tuple(program_of[rank] for rank in range(self.ranks)))

    def first_micro_batches(self, count: int) -> Schedule:
        """The same order with only micro-batches 0..count-1: for a batch too small to fill all of
        them.

        Taking a micro-batch out of a sound schedule leaves a sound one, since no micro-batch waits
        for another. Where they are cut along samples, `count` is that of slices, which are small
        micro-batches and stay so.
        """
        slicing, numbers = self.slicing, count
        if slicing is not None and slicing.along == "tokens":
            slicing = replace(slicing, shares=slicing.shares[:count])
            numbers = len(slicing.share)
        if numbers >= self.slices:
            return self
        if slicing is not None and slicing.along == "samples":
            slicing = None
        return replace(
            self._keep(lambda op: op.kind is Kind.U or op.micro_batch < numbers), slicing=slicing
        )

    def forward_only(self) -> Schedule:
        """Only the forwards, in their order: for evaluation."""
        return self._keep(lambda op: op.kind is Kind.F)

    def _keep(self, wanted: Callable[[Op], bool]) -> Schedule:
        programs = tuple(tuple(filter(wanted, program)) for program in self.programs)
        return replace(
            self,
            programs=programs,
            pairs=frozenset(pair for pair in self.pairs if all(map(wanted, pair))),
        )
