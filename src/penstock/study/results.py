"""Results: everything that a study has found out, by case, by rule, and in sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from penstock.study.pace import Pace
from penstock.study.question import BASELINE, Group, Question, Refused
from penstock.study.record import Record
from penstock.study.statistics import Spread, chance, curve, reaches, window_of
from penstock.study.tasks import Metric, study_task
from penstock.study.verdict import Standing, Verdict, judge

#: The loss that all are timed to is what flush has come to after this share of its batches.
SHARE = 0.75


@dataclass(frozen=True)
class Results:
    """What has been found out.

    Attributes:
        question: what was asked.
        records: of the cases that are done.
        paces: per group of cases, what does not depend on the seed.
        fastest: per group, flush with the number of micro-batches at which it is fastest: what its
        time is held against. `paces` has
            it, too.
        refused: combinations that make no sense.
        failed: cases that could not be run, with the reason.
        machine: where.
        missing: how many cases have no record yet.
    """

    question: Question
    records: tuple[Record, ...]
    paces: Mapping[Group, Pace]
    fastest: Mapping[Group, Group]
    refused: tuple[Refused, ...]
    failed: tuple[tuple[str, str], ...]
    machine: Mapping[str, str]
    missing: int = 0

    @cached_property
    def groups(self) -> dict[Group, list[Record]]:
        """Records of the same case, one for each seed."""
        found: dict[Group, list[Record]] = {}
        for record in self.records:
            found.setdefault(record.case.group, []).append(record)
        return found

    def of_task(self, task: str) -> list[Group]:
        """The groups of a task: flush first, then rule by rule; by depth."""
        order = [BASELINE, *(rule for rule in self.question.rules if rule != BASELINE)]
        return sorted(
            (group for group in self.groups if group.task == task),
            key=lambda group: (
                order.index(group.rule),
                group.optimizer != self.question.optimizer,
                *group[3:],
            ),
        )

    def baseline(self, group: Group) -> list[Record]:
        """Flush's runs to hold a group against."""
        return self.groups.get(group.baseline, [])

    @cached_property
    def verdicts(self) -> dict[Group, Verdict]:
        """Per group, how it stands beside flush."""
        return {
            group: judge(self.baseline(group), records, study_task(group.task).metric)
            for group, records in self.groups.items()
        }

    def target(self, group: Group) -> float | None:
        """The loss to which a group is timed: flush's mean after three quarters of its batches;
        None without flush.
        """
        runs = self.baseline(group)
        if not runs:
            return None
        window = window_of(runs[0].case.batches)
        means = [curve(run.losses, window) for run in runs]
        at = round(SHARE * runs[0].case.batches / window) - 1
        reached = [each[at] for each in means if at < len(each)]
        return Spread(tuple(reached)).mean if reached else None

    def batches_to_target(self, group: Group) -> float | None:
        """Batches after which a group's runs are at the target, in the mean; None if one of them
        never is.
        """
        target = self.target(group)
        if target is None:
            return None
        # A mean over twice as many batches as a point of the curves, for one lucky batch is not an
        # arrival.
        found = [
            reaches(run.losses, target, 2 * window_of(run.case.batches))
            for run in self.groups[group]
        ]
        known = [count for count in found if count is not None]
        return Spread(tuple(map(float, known))).mean if len(known) == len(found) else None

    def speed_up(self, group: Group) -> float | None:
        """How many times sooner than flush at its fastest a group comes to the target, in simulated
        time; None if one of its runs never does.
        """
        own, base = self.batches_to_target(group), self.batches_to_target(group.baseline)
        if own is None or base is None:
            return None
        return (
            base
            * self.paces[self.fastest[group]].simulated_s
            / (own * self.paces[group].simulated_s)
        )

    def sentences(self, task: str) -> Iterator[str]:
        """What the numbers of a task say: rule by rule, then depth by depth."""
        groups = [group for group in self.of_task(task) if group.rule != BASELINE]
        for optimizer, rule in dict.fromkeys(group[1:3] for group in groups):
            of_rule = [self.verdicts[group] for group in groups if group[1:3] == (optimizer, rule)]
            said = "; ".join(
                f"at {listed(depths)} stages {words}"
                for depths, words in _said(of_rule, study_task(task).metric)
            )
            yield f"{rule} ({optimizer}): {said}."
        for stages in sorted({group.stages for group in groups}):
            at = [self.verdicts[group] for group in groups if group.stages == stages]
            named = {
                standing: [each.group.rule for each in at if each.standing is standing]
                for standing in Standing
            }
            said = "; ".join(
                f"{', '.join(rules)}: {SUMMARY[standing]}"
                for standing, rules in named.items()
                if rules
            )
            yield f"At {stages} stages {said}."

    def luck(self) -> str:
        """How far the verdicts can be trusted."""
        seeds = self.question.seeds
        count = sum(group.rule != BASELINE for group in self.groups)
        if seeds < 2:
            return "One seed: differences are shown, and nothing is said of them."
        odds = chance(seeds, seeds)
        return (
            f"A rule loses (or gains) where each of its {seeds} runs is worse (better) than each of flush's {seeds}, and the means are "
            "further apart than the best and the worst run of either. Were there no difference, that would happen less than once in "
            f"{1 / odds:.0f} comparisons each way; there are {count} here, so less than {count * odds:.1f} times. It holds where the "
            "means are no further apart than flush's own runs; between the two nothing is said but that its seeds differ."
        )

    def as_json(self, thin: bool = False) -> str:
        """Everything, raw: one line for each record. `thin` has means over a window of batches in
        place of all losses.
        """
        rows = [self._row(record, thin) for record in self.records]
        head = {
            "schema": 1,
            "question": asdict(self.question),
            "machine": dict(self.machine),
            "missing": self.missing,
            "refused": [asdict(each) for each in self.refused],
            "failed": [list(each) for each in self.failed],
        }
        paces = [{**group._asdict(), **asdict(pace)} for group, pace in self.paces.items()]
        said = [
            {
                **each.group._asdict(),
                "standing": each.standing,
                "values": list(each.values.values) if each.values else [],
                "difference": each.difference,
                "words": each.words,
            }
            for each in self.verdicts.values()
        ]
        text = json.dumps(head, indent=1)[:-2]
        for name, lines in (("paces", paces), ("verdicts", said), ("records", rows)):
            body = ",\n".join("  " + json.dumps(line, separators=(",", ":")) for line in lines)
            text += f',\n "{name}": [\n{body}\n ]'
        return text + "\n}\n"

    @staticmethod
    def _row(record: Record, thin: bool) -> dict[str, object]:
        window = window_of(record.case.batches) if thin else 1
        losses = (
            [round(loss, 4) for loss in curve(record.losses, window)]
            if thin
            else list(record.losses)
        )
        facts = {
            name: value for name, value in asdict(record).items() if name not in ("case", "losses")
        }
        return {**asdict(record.case), **facts, "losses_every": window, "losses": losses}


#: Of several rules in one sentence.
SUMMARY = {
    Standing.HOLDS: "as good as flush, within the spread over seeds",
    Standing.UNCLEAR: "its seeds differ too much to tell",
    Standing.LOSES: "worse than flush",
    Standing.GAINS: "better than flush",
    Standing.FAILS: "not every run trains",
    Standing.OPEN: "nothing can be said",
}


def _said(verdicts: Sequence[Verdict], metric: Metric) -> Iterator[tuple[list[int], str]]:
    """Depths, and what is said of a rule there; depths at which it holds are told together."""
    holding = [each for each in verdicts if each.standing is Standing.HOLDS]
    if holding:
        changes = [
            metric.difference(0.0, each.difference).split()[0]
            for each in holding
            if each.difference is not None
        ]
        yield (
            [each.group.stages for each in holding],
            f"{SUMMARY[Standing.HOLDS]} ({', '.join(changes)} {metric.unit})",
        )
    for each in verdicts:
        if each.standing is not Standing.HOLDS:
            yield [each.group.stages], f"{SUMMARY[each.standing]} ({each.words})"


def listed(numbers: Sequence[int]) -> str:
    """`2, 4 and 8`."""
    words = list(map(str, numbers))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
