"""One cell: all systems begin, are checked, and then take steps in turn, round by round."""

from __future__ import annotations

import itertools
import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapters.catalogue import System
from cells import Cell, Cuts
from memory import available_bytes
from processes import LIMIT_S, NotInstalled, Nursery, PeerBroke, Team

#: What others are compared with.
OURS = "penstock 1f1b"
#: A round of a system takes about so long, if its steps are shorter.
ROUND_S = 0.4
MOST_STEPS = 30
#: Steps before those that count, where they are short: what ran before has the caches then.
WARM = 3
#: Gradients that are further off are not rounding.
WRONG = 1e-4
#: Bytes that stay free: as many systems are alive at once as leave them, when each has what it had
#: at most in its first step.
SPARE = 3 * 2**30


@dataclass
class Row:
    """What is known of one system. `seconds`: of a step, by round; `ratios`: to ours in the same
    round.
    """

    system: str
    note: str = ""
    error: float | None = None
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    whole_peaks: bool = False
    idle_s: float = 0.0

    @property
    def step_s(self) -> float:
        """The median over rounds."""
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> tuple[float, float, float] | None:
        """First quartile, median and third quartile of the ratios by round."""
        if not self.ratios:
            return None
        low, middle, high = (
            statistics.quantiles(self.ratios, n=4, method="inclusive")
            if len(self.ratios) > 1
            else self.ratios * 3
        )
        return low, middle, high


@dataclass
class Bound:
    """Per round, what no step on this cut can be faster than: by ops timed alone, and by ops timed
    while others run theirs.
    """

    alone_s: list[float] = field(default_factory=list)
    together_s: list[float] = field(default_factory=list)


@dataclass
class Bench:
    """What stays the same from cell to cell.

    Attributes:
        nurseries: by peer.
        rounds: where steps are short, and where one fills a round.
        slower: where steps are long, a system beyond this multiple of ours in a round is not measured
        again. say: told how it goes. log: file for what went wrong. realtime: whether ranks have
        the host for themselves in their turn.
    """

    nurseries: dict[str, Nursery]
    rounds: tuple[int, int]
    slower: float | None
    say: Callable[[str], None]
    log: Path
    realtime: bool = False

    def measure(
        self,
        cell: Cell,
        cuts: Cuts,
        chosen: Sequence[System],
        files: tuple[Path, Path],
        names: set[str],
    ) -> tuple[list[Row], Bound]:
        """All rows, and the bound. Those that do not run have a note why."""
        run = _Run(
            self, cell, cuts, files, names, {system.name: Row(system.name) for system in chosen}
        )
        try:
            run.all(chosen)
        finally:
            run.end(list(run.teams))
        return list(run.rows.values()), run.bound


@dataclass
class _Run:
    bench: Bench
    cell: Cell
    cuts: Cuts
    files: tuple[Path, Path]
    names: set[str]
    rows: dict[str, Row]
    teams: dict[str, Team] = field(default_factory=dict)
    bound: Bound = field(default_factory=Bound)
    pace: dict[str, float] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)

    def all(self, chosen: Sequence[System]) -> None:
        """Measure all systems, as many at once as memory allows; ours is always among them."""
        group: list[str] = []
        room = available_bytes() - SPARE
        for system in sorted(chosen, key=lambda system: system.name not in (OURS, "bound")):
            if not self._begun(system):
                continue
            group.append(system.name)
            if sum(self.held[name] for name in self.teams) > room:
                self._rounds(group)
                stay = [name for name in group if name in (OURS, "bound")]
                self.end([name for name in group if name not in stay])
                group = stay
        has_peers = any(name not in (OURS, "bound") for name in group)
        measured_before = any(row.seconds for row in self.rows.values())
        if has_peers or not measured_before:
            self._rounds(group)

    def end(self, names: list[str]) -> None:
        """End the processes of some systems."""
        for name in names:
            if name in self.teams:
                self.teams.pop(name).end()

    def _begun(self, system: System) -> bool:
        row = self.rows[system.name]
        row.note = system.refuses(self.cell, self.cuts) or ""
        if row.note:
            return False
        try:
            team = Team(system, self.bench.nurseries[system.peer], self.cell, self.cuts, self.files)
            self.teams[system.name] = team
            checks = team.tell("check", [(self.bench.realtime,)] * team.ranks, LIMIT_S)
            row.error = None if system.name == "bound" else self._error(checks)
            if row.error is not None and not row.error < WRONG:
                row.note = "its gradients are not those of plain training"
            self.pace[system.name] = max(seconds for _, _, seconds, _ in checks)
            self.held[system.name] = sum(held for *_, held in checks)
            team.tell("begin", [()] * team.ranks, 20)
        except (NotInstalled, PeerBroke) as error:
            self._broke(system.name, error)
            return False
        self.bench.say(
            f"{self.cell}: {system.name} is ready"
            + ("" if row.error is None else f", gradients within {row.error:.1e}")
        )
        return True

    def _error(self, checks: list[tuple[dict[str, float], float, float, int]]) -> float:
        """The largest error in the largest gradient's terms."""
        errors = {name: error for differences, *_ in checks for name, error in differences.items()}
        missing = self.names - set(errors)
        if missing:
            raise PeerBroke(
                f"{len(missing)} parameters were not updated, {min(missing)} among them"
            )
        return max(errors.values()) / max(most for _, most, *_ in checks)

    def _broke(self, name: str, error: Exception) -> None:
        self.rows[name].note = str(error).splitlines()[0]
        self.end([name])
        if not isinstance(error, NotInstalled):
            with self.bench.log.open("a") as log:
                log.write(f"{self.cell}: {name}: {error}\n")
        self.bench.say(f"{self.cell}: {name}: {self.rows[name].note}")

    def _rounds(self, group: list[str]) -> None:
        """Measure a group of systems in rounds; in each round their order is random."""
        if not group:
            return
        order = random.Random(0)
        # The time of the first step is no good estimate for short steps: measure them again.
        for name in group:
            if self.pace[name] < 1.0 and ROUND_S and name in self.teams:
                self._try(name, 2, 3)
        for _ in range(self.bench.rounds[self._long(group[0])]):
            self._round(group, order)

    def _round(self, group: list[str], order: random.Random) -> None:
        """Measure every system once, ours first."""
        ours = self._try(OURS, *self._steps(OURS)) if OURS in self.teams else None
        others = [
            name
            for name in group
            if name != OURS and name in self.teams and not self._dropped(name)
        ]
        for name in order.sample(others, len(others)):
            if name == "bound":
                self._measure_bound()
                continue
            seconds = self._try(name, *self._steps(name))
            if seconds is not None:
                self.rows[name].seconds.append(seconds)
                if ours is not None:
                    self.rows[name].ratios.append(seconds / ours)
        if ours is not None:
            self.rows[OURS].seconds.append(ours)
            self.rows[OURS].ratios.append(1.0)

    def _long(self, name: str) -> bool:
        """Whether a step fills a round."""
        return self.pace[name] > ROUND_S

    def _dropped(self, name: str) -> bool:
        """Whether a slow system need not be measured again."""
        slower = self.bench.slower
        return (
            slower is not None
            and self._long(name)
            and bool(self.rows[name].ratios)
            and min(self.rows[name].ratios) > slower
        )

    def _steps(self, name: str) -> tuple[int, int]:
        """Steps that do not count, and steps that do."""
        steps = max(1, min(MOST_STEPS, round(ROUND_S / self.pace[name])))
        return (WARM, steps) if steps > 1 else (0, 1)

    def _try(self, name: str, warm: int, steps: int) -> float | None:
        """Seconds of a step, the median of some. A step ends when the last rank is through."""
        team, row = self.teams[name], self.rows[name]
        try:
            reports = team.tell(
                "run", [(warm, steps)] * team.ranks, 60 + 20 * (warm + steps) * self.pace[name]
            )
        except PeerBroke as error:
            self._broke(name, error)
            return None
        times_of_ranks = [report["times"] for report in reports]
        ends = [max(times) for times in zip(*times_of_ranks, strict=True)]
        seconds = statistics.median(after - before for before, after in itertools.pairwise(ends))
        row.peaks = [report["peak"] for report in reports]
        row.whole_peaks = any(report["whole"] for report in reports)
        row.idle_s = max(report["idle_s"] for report in reports)
        self.pace[name] = seconds
        return seconds

    def _measure_bound(self) -> None:
        team, cores = self.teams["bound"], len(os.sched_getaffinity(0))
        warm, steps = self._steps("bound")
        groups = [
            list(range(first, min(first + cores, team.ranks)))
            for first in range(0, team.ranks, cores)
        ]
        for series, sets in (
            (self.bound.alone_s, [[rank] for rank in range(team.ranks)]),
            (self.bound.together_s, groups),
        ):
            answers = [
                answer
                for ranks in sets
                for answer in team.tell("run", [(warm, steps)] * team.ranks, 300, ranks)
            ]
            series.append(
                bound_s([_medians(answer) for answer in answers], self.cell.micro_batches, cores)
            )


def _medians(answer: dict[str, Any]) -> tuple[float, float, float]:
    forward, backward, update = (
        statistics.median(column) for column in zip(*answer["parts"], strict=True)
    )
    return forward, backward, update


def bound_s(parts: Sequence[tuple[float, float, float]], micro_batches: int, cores: int) -> float:
    """Seconds that no step can be faster than, from one to the next; stages in a row, one on each
    rank, an update after each batch.

    Args:
        parts: by stage, seconds of a step's forwards, its backwards, and its update.
        micro_batches: of a batch.
        cores: that all ranks share.

    Between the end of a rank's last backward and the start of its next forward, its gradient passes
    backward through the stages before it, the first stage updates, and the first micro-batch comes
    forward through the same stages; its own update fits into that. And all ranks' work does not
    take less than it takes on all cores.

    >>> bound_s([(1.0, 2.0, 0.5), (1.0, 2.0, 0.5)], micro_batches=1, cores=2)  # 3 s, and 3.5 s before the next batch is there
    6.5
    """
    slowest, ramp = 0.0, 0.0
    for stage, (forward, backward, update) in enumerate(parts):
        slowest = max(slowest, forward + backward + max(update, ramp + parts[0][2] * (stage > 0)))
        ramp += (forward + backward) / micro_batches
    return max(slowest, sum(map(sum, parts)) / cores)
