"""Systems take steps in turn, round by round, so that a slow minute of the machine slows all of
them.

Every system has processes of its own, which sleep unless it is its turn. All are alive at the same
time, as many as memory allows; a reference system stays alive throughout.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.cluster.local import available_cores, available_memory_bytes
from penstock.errors import PenstockError
from penstock.files.text import one_line
from penstock.peers.catalogue import System
from penstock.peers.host import Host
from penstock.peers.messages import PeerFailed, PeerMissing, PeerTimeout
from penstock.peers.setup import Setup
from penstock.peers.team import Refused
from penstock.peers.training import Ranks, step_seconds

#: Seconds of steps that a system takes in a round, if its steps are shorter.
ROUND_S = 0.4
MOST_STEPS = 30
#: Steps at the beginning of a turn that do not count, if steps are short: until then the caches
#: hold what ran before.
WARM = 3
#: Relative gradient error beyond rounding.
MAX_GRADIENT_ERROR = 1e-4
#: Bytes of the host's memory that stay free, given that each system needs what it had in its first
#: step.
SPARE_BYTES = 3 * 2**30
#: Rounds that a slow entrant takes part in at least: one of them may meet a busy moment.
ROUNDS_BEFORE_DROP = 2
#: Name of the system of which the bound of a cut is derived.
BOUND = "bound"


@dataclass(frozen=True)
class Entrant:
    """A system in a comparison."""

    name: str
    system: System
    setup: Setup
    host: Host


@dataclass
class Row:
    """What is known of an entrant.

    Attributes:
        name: of the entrant.
        status, reason: why there is no result, or what is wrong with it.
        gradient_error: largest error of a gradient of the first step, over the largest gradient.
        rounds: by round number, the seconds of each step.
        parts: of the bound, by round number: seconds of a step, with the ops of each rank timed
            alone, and while other ranks run theirs.
        peaks: peak memory by rank, in bytes.
        whole_peaks: whether the peaks include the construction of the model.
        idle_s: CPU time used in other systems' turns.
        ranks, threads: processes, and threads in each.
    """

    name: str
    status: Literal["ok", "failed", "missing", "refused", "timeout"] = "ok"
    reason: str = ""
    gradient_error: float | None = None
    rounds: dict[int, list[float]] = field(default_factory=dict)
    parts: dict[int, tuple[float, float]] = field(default_factory=dict)
    peaks: list[int] = field(default_factory=list)
    whole_peaks: bool = False
    idle_s: float = 0.0
    ranks: int = 1
    threads: int = 1

    def seconds(self) -> list[float]:
        """Return the median step of each round."""
        return [statistics.median(steps) for steps in self.rounds.values()]


@dataclass(frozen=True)
class Rules:
    """How a comparison is measured.

    Attributes:
        reference: name of the entrant that stays alive, and with which others are compared.
        rounds: number of rounds where steps are short.
        long_rounds: number of rounds where a step of the reference fills a round.
        drop_ratio: where steps are long, an entrant that took more than this multiple of the
            reference in each of two rounds is left out of later rounds; None: none is.
        limit_s: for making a system, and for its first step.
        realtime: whether processes are scheduled before all others of the host.
    """

    reference: str
    rounds: int = 5
    long_rounds: int = 3
    drop_ratio: float | None = 1.3
    limit_s: float = 120.0
    realtime: bool = False


class Comparison:
    """A comparison of systems on one model, cut and batch.

    Args:
        entrants: in the order of the result.
        gradients: file of the gradients of plain training, and the names of all parameters.
        rules: how to measure.
        log: file for what the processes print.
        say: called with progress messages.
    """

    def __init__(
        self,
        entrants: Sequence[Entrant],
        gradients: tuple[Path, list[str]],
        rules: Rules,
        log: Path,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._entrants = {entrant.name: entrant for entrant in entrants}
        self._gradients, names = gradients
        self._parameter_names = set(names)
        self._rules = rules
        self._log = log
        self._say = say
        self.rows = {name: Row(name) for name in self._entrants}
        self._ranks: dict[str, Ranks] = {}
        self._pace: dict[str, float] = {}
        self._held_bytes: dict[str, int] = {}

    def run(self) -> list[Row]:
        """Measure all entrants, and return their rows."""
        try:
            self._run_groups()
        finally:
            self._end(list(self._ranks))
        return list(self.rows.values())

    def _run_groups(self) -> None:
        """Start entrants until memory is full, measure them, end all but the reference and the
        bound, and so on.
        """
        # Others are compared with these two in the same rounds, so they are never ended.
        permanent = (self._rules.reference, BOUND)
        budget = available_memory_bytes() - SPARE_BYTES
        group: list[str] = []
        for name in sorted(self._entrants, key=lambda name: name not in permanent):
            if not self._start(name):
                continue
            group.append(name)
            if sum(self._held_bytes[other] for other in self._ranks) > budget:
                self._run_rounds(group)
                self._end([other for other in group if other not in permanent])
                group = [other for other in group if other in permanent]
        measured = any(row.rounds for row in self.rows.values())
        if any(name not in permanent for name in group) or not measured:
            self._run_rounds(group)

    def _start(self, name: str) -> bool:
        """Make a system and compare its gradients. Return whether it can be measured."""
        entrant, row = self._entrants[name], self.rows[name]
        try:
            ranks = Ranks(
                entrant.system,
                entrant.setup,
                entrant.host,
                self._log,
                self._rules.limit_s,
                self._gradients,
            )
            self._ranks[name] = ranks
            row.ranks, row.threads = ranks.ranks, entrant.system.threads(entrant.setup)
            answers = ranks.tell("compare", self._rules.limit_s, realtime=self._rules.realtime)
            if name != BOUND:
                row.gradient_error = self._gradient_error(answers)
                if not row.gradient_error < MAX_GRADIENT_ERROR:
                    row.reason = "its gradients are not those of plain training"
        except PenstockError as error:
            self._fail(name, error)
            return False
        self._pace[name] = max(answer["seconds"] for answer in answers)
        self._held_bytes[name] = sum(answer["host_bytes"] for answer in answers)
        self._say(f"{name} is ready")
        return True

    def _gradient_error(self, answers: Sequence[dict[str, Any]]) -> float:
        """Return the largest error over the largest gradient.

        Raises:
            PeerFailed: a parameter was not updated.
        """
        errors: dict[str, float] = {}
        for answer in answers:
            errors.update(answer["errors"])
        missing = self._parameter_names - set(errors)
        if missing:
            raise PeerFailed(f"{len(missing)} parameters were not updated, such as {min(missing)}")
        largest = max(float(answer["largest"]) for answer in answers)
        return max(errors.values()) / largest

    def _fail(self, name: str, error: PenstockError) -> None:
        """Note why an entrant has no result, and end it."""
        row = self.rows[name]
        row.reason = one_line(error)
        row.status = "failed"
        for kind, status in (
            (PeerMissing, "missing"),
            (PeerTimeout, "timeout"),
            (Refused, "refused"),
        ):
            if isinstance(error, kind):
                row.status = status  # type: ignore[assignment]
        self._end([name])
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"{name}: {row.reason}\n")
        self._say(f"{name}: {row.reason}")

    def _end(self, names: Sequence[str]) -> None:
        """End the processes of entrants."""
        for name in names:
            if name in self._ranks:
                self._ranks.pop(name).end()

    def _run_rounds(self, group: Sequence[str]) -> None:
        """Measure entrants in rounds, in an order that changes from round to round."""
        measured_before = {name for name, row in self.rows.items() if row.rounds}
        # Not for secrets: the same order in every run.
        order = random.Random(0)  # noqa: S311
        # Not counted: the first step's time is a poor estimate, and the next one allocates what
        # was given back to the system when the peak was reset.
        for name in group:
            if name in self._ranks and name not in measured_before:
                warm, steps = (2, 3) if self._pace[name] < 1.0 else (0, 1)
                self._take_turn(name, warm, steps)
        reference = self._rules.reference
        is_long = reference in self._pace and self._pace[reference] > ROUND_S
        first = max((max(row.rounds, default=-1) for row in self.rows.values()), default=-1) + 1
        for number in range(self._rules.long_rounds if is_long else self._rules.rounds):
            self._run_round(first + number, group, order)

    def _run_round(self, number: int, group: Sequence[str], order: random.Random) -> None:
        """Give every entrant a turn, the reference first."""
        reference = self._rules.reference
        others = [name for name in group if name != reference]
        for name in [reference, *order.sample(others, len(others))]:
            if name not in self._ranks or self._is_dropped(name):
                continue
            if name == BOUND:
                self._measure_bound(number)
                continue
            steps = self._take_turn(name, *self._step_counts(name))
            if steps is not None:
                self.rows[name].rounds[number] = steps

    def _is_dropped(self, name: str) -> bool:
        """Whether a slow entrant is left out."""
        limit, reference = self._rules.drop_ratio, self.rows.get(self._rules.reference)
        if limit is None or reference is None or self._pace[name] <= ROUND_S:
            return False
        ratios = []
        for number, steps in self.rows[name].rounds.items():
            if number in reference.rounds:
                ratios.append(
                    statistics.median(steps) / statistics.median(reference.rounds[number])
                )
        enough = len(ratios) >= ROUNDS_BEFORE_DROP
        return enough and name != self._rules.reference and min(ratios) > limit

    def _step_counts(self, name: str) -> tuple[int, int]:
        """Return the number of steps that do not count, and of those that do."""
        steps = max(1, min(MOST_STEPS, round(ROUND_S / self._pace[name])))
        return (WARM, steps) if steps > 1 else (0, 1)

    def _take_turn(self, name: str, warm: int, steps: int) -> list[float] | None:
        """Take steps and return the seconds of each, or None if the entrant failed."""
        row = self.rows[name]
        limit_s = 60 + 20 * (warm + steps) * self._pace[name]
        try:
            answers = self._ranks[name].tell("steps", limit_s, warm=warm, steps=steps)
        except PenstockError as error:
            self._fail(name, error)
            return None
        seconds = list(step_seconds([answer["times"] for answer in answers]))
        row.peaks = [answer["peak"] for answer in answers]
        row.whole_peaks = any(answer["whole"] for answer in answers)
        row.idle_s = max(answer["idle_s"] for answer in answers)
        self._pace[name] = statistics.median(seconds)
        return seconds

    def _measure_bound(self, number: int) -> None:
        """Time the ops of each rank alone, and of as many ranks at once as there are cores."""
        ranks = self._ranks[BOUND]
        cores = available_cores()
        warm, steps = self._step_counts(BOUND)
        alone = [[rank] for rank in range(ranks.ranks)]
        together = []
        for first in range(0, ranks.ranks, cores):
            together.append(list(range(first, min(first + cores, ranks.ranks))))
        bounds = []
        for sets in (alone, together):
            parts = []
            for only in sets:
                answers = ranks.tell("steps", 300, only, warm=warm, steps=steps)
                parts += [_median_parts(answer["parts"]) for answer in answers]
            micro_batches = self._entrants[BOUND].setup.micro_batches
            bounds.append(bound_seconds(parts, micro_batches, cores))
        self.rows[BOUND].parts[number] = (bounds[0], bounds[1])
        self.rows[BOUND].rounds[number] = [bounds[0]]


def _median_parts(parts: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return the medians of forwards, backwards and update over steps."""
    forward, backward, update = (statistics.median(column) for column in zip(*parts, strict=True))
    return forward, backward, update


def bound_seconds(
    parts: Sequence[tuple[float, float, float]], micro_batches: int, cores: int
) -> float:
    """Return the seconds from one step to the next that no step can be faster than; stages in a
    row, one on each rank, an update after each batch.

    Between the end of a rank's last backward and the start of its next forward, its gradient passes
    backward through the stages before it, the first stage updates, and the first micro-batch comes
    forward through the same stages; the rank's own update fits into that. And the work of all
    ranks takes at least what it takes on all cores.

    >>> # 3 s of work, and 3.5 s before the next batch arrives
    >>> bound_seconds([(1.0, 2.0, 0.5), (1.0, 2.0, 0.5)], micro_batches=1, cores=2)
    6.5

    Args:
        parts: by stage, seconds of a step's forwards, of its backwards, and of its update.
        micro_batches: of a batch.
        cores: that all ranks share.
    """
    slowest, ramp = 0.0, 0.0
    for stage, (forward, backward, update) in enumerate(parts):
        gap = ramp + parts[0][2] if stage else 0.0
        slowest = max(slowest, forward + backward + max(update, gap))
        ramp += (forward + backward) / micro_batches
    return max(slowest, sum(map(sum, parts)) / cores)
