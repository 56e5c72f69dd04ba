"""Results of a study: by case, by rule and depth, in sentences and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from penstock.study.convergence.conclusion import Conclusion, Standing, compare_with_flush
from penstock.study.convergence.experiment import BASELINE, Experiment, Group, Refused
from penstock.study.convergence.records import Record
from penstock.study.convergence.tasks import Metric, study_task
from penstock.study.convergence.throughput import Throughput
from penstock.study.statistics import (
    Spread,
    batches_to_loss,
    separation_probability,
    smooth,
    window_length,
)

#: Share of its batches after which the loss of flush is the target that all rules are timed to.
SHARE = 0.75


@dataclass(frozen=True)
class Results:
    """Results of a study.

    Attributes:
        experiment: what was run.
        records: of the finished cases.
        throughputs: time per batch and staleness, by group of cases.
        fastest: by group, the group of flush with the number of micro-batches at which it is
            fastest, to compare times with; it has an entry in `throughputs` too.
        refused: impossible combinations.
        failed: cases that could not be run, with the reason.
        machine: facts of the machine.
        missing: number of cases that have no record yet.
    """

    experiment: Experiment
    records: tuple[Record, ...]
    throughputs: Mapping[Group, Throughput]
    fastest: Mapping[Group, Group]
    refused: tuple[Refused, ...]
    failed: tuple[tuple[str, str], ...]
    machine: Mapping[str, str]
    missing: int = 0

    @cached_property
    def groups(self) -> dict[Group, list[Record]]:
        """The records by group, one for each seed."""
        groups: dict[Group, list[Record]] = {}
        for record in self.records:
            groups.setdefault(record.case.group, []).append(record)
        return groups

    def of_task(self, task: str) -> list[Group]:
        """Return the groups of a task, sorted by rule with flush first, then by depth."""
        order = [BASELINE, *(rule for rule in self.experiment.rules if rule != BASELINE)]
        return sorted(
            (group for group in self.groups if group.task == task),
            key=lambda group: (
                order.index(group.rule),
                group.optimizer != self.experiment.optimizer,
                *group[3:],
            ),
        )

    def baseline(self, group: Group) -> list[Record]:
        """Return the runs of flush to compare a group with."""
        return self.groups.get(group.baseline, [])

    @cached_property
    def conclusions(self) -> dict[Group, Conclusion]:
        """The conclusion about each group, compared with flush."""
        return {
            group: compare_with_flush(self.baseline(group), records, study_task(group.task).metric)
            for group, records in self.groups.items()
        }

    def target(self, group: Group) -> float | None:
        """Return the loss to which a group is timed: the mean loss of flush after three quarters of
        its batches; None without runs of flush.
        """
        runs = self.baseline(group)
        if not runs:
            return None
        window = window_length(runs[0].case.batches)
        # Curves have one point per window.
        point = round(SHARE * runs[0].case.batches / window) - 1
        losses = []
        for run in runs:
            curve = smooth(run.losses, window)
            if point < len(curve):
                losses.append(curve[point])
        return Spread(tuple(losses)).mean if losses else None

    def batches_to_target(self, group: Group) -> float | None:
        """Return the mean number of batches after which a group's runs reach the target loss; None
        if one of them never does.
        """
        target = self.target(group)
        if target is None:
            return None
        counts = []
        for run in self.groups[group]:
            # Twice the window of the curves: a single low batch does not count as reaching it.
            window = 2 * window_length(run.case.batches)
            count = batches_to_loss(run.losses, target, window)
            if count is None:
                return None
            counts.append(float(count))
        return Spread(tuple(counts)).mean

    def speed_up(self, group: Group) -> float | None:
        """Return how many times sooner than flush at its fastest a group reaches the target loss,
        in simulated time; None if a run never does.
        """
        batches = self.batches_to_target(group)
        flush_batches = self.batches_to_target(group.baseline)
        if batches is None or flush_batches is None:
            return None
        flush_s = self.throughputs[self.fastest[group]].simulated_s
        return flush_batches * flush_s / (batches * self.throughputs[group].simulated_s)

    def sentences(self, task: str) -> Iterator[str]:
        """Yield the conclusions of a task as sentences: one per rule, then one per depth."""
        groups = [group for group in self.of_task(task) if group.rule != BASELINE]
        yield from self._sentences_of_rules(groups, task)
        yield from self._sentences_of_depths(groups)

    def _sentences_of_rules(self, groups: Sequence[Group], task: str) -> Iterator[str]:
        """Yield one sentence per optimizer and rule, with a clause per depth."""
        for optimizer, rule in dict.fromkeys(group.method for group in groups):
            conclusions = [
                self.conclusions[group] for group in groups if group.method == (optimizer, rule)
            ]
            clauses = _depth_clauses(conclusions, study_task(task).metric)
            yield f"{rule} ({optimizer}): {'; '.join(clauses)}."

    def _sentences_of_depths(self, groups: Sequence[Group]) -> Iterator[str]:
        """Yield one sentence per number of stages, which groups the rules by their conclusion."""
        for stages in sorted({group.stages for group in groups}):
            rules_of_standing: dict[Standing, list[str]] = {standing: [] for standing in Standing}
            for group in groups:
                if group.stages == stages:
                    rules_of_standing[self.conclusions[group].standing].append(group.rule)
            summaries = [
                f"{', '.join(rules)}: {SUMMARY[standing]}"
                for standing, rules in rules_of_standing.items()
                if rules
            ]
            yield f"At {stages} stages {'; '.join(summaries)}."

    def significance(self) -> str:
        """Explain how the conclusions are drawn, and how often chance alone would yield them."""
        seeds = self.experiment.seeds
        count = sum(group.rule != BASELINE for group in self.groups)
        if seeds < 2:
            return "One seed: differences are shown, but no conclusions are drawn."
        probability = separation_probability(seeds, seeds)
        return (
            f"A rule loses (or gains) if each of its {seeds} runs is worse (better) than each of "
            f"flush's {seeds}, and the difference of the means exceeds the range of either's runs. "
            "Without a real difference, that would happen less than once in "
            f"{1 / probability:.0f} comparisons each way; there are {count} here, so less than "
            f"{count * probability:.1f} times. It holds if the difference of the means is within "
            "the range of flush's own runs; between the two, the only conclusion is that its seeds "
            "differ."
        )

    def as_json(self, thin: bool = False) -> str:
        """Write all results as JSON, one line per record.

        Args:
            thin: write means over a window of batches instead of all losses.
        """
        head = {
            "schema": 1,
            "question": asdict(self.experiment),
            "machine": dict(self.machine),
            "missing": self.missing,
            "refused": [asdict(refused) for refused in self.refused],
            "failed": [list(failure) for failure in self.failed],
        }
        throughput_rows = [
            {**group._asdict(), **asdict(throughput)}
            for group, throughput in self.throughputs.items()
        ]
        conclusion_rows = []
        for conclusion in self.conclusions.values():
            conclusion_rows.append(
                {
                    **conclusion.group._asdict(),
                    "standing": conclusion.standing,
                    "values": list(conclusion.values.values) if conclusion.values else [],
                    "difference": conclusion.difference,
                    "words": conclusion.words,
                }
            )
        record_rows = [self._record_row(record, thin) for record in self.records]
        # The keys of schema 1, which are older than the names of the attributes.
        tables = (
            ("paces", throughput_rows),
            ("verdicts", conclusion_rows),
            ("records", record_rows),
        )
        # Left open, without its last brace: the tables follow, one row per line.
        text = json.dumps(head, indent=1)[:-2]
        for name, rows in tables:
            lines = ["  " + json.dumps(row, separators=(",", ":")) for row in rows]
            text += f',\n "{name}": [\n' + ",\n".join(lines) + "\n ]"
        return text + "\n}\n"

    @staticmethod
    def _record_row(record: Record, thin: bool) -> dict[str, object]:
        """Return a record as it is written to JSON."""
        window = 1
        losses = list(record.losses)
        if thin:
            window = window_length(record.case.batches)
            losses = [round(loss, 4) for loss in smooth(record.losses, window)]
        facts = asdict(record)
        del facts["case"], facts["losses"]
        return {**asdict(record.case), **facts, "losses_every": window, "losses": losses}


#: The standing of several rules in one sentence.
SUMMARY = {
    Standing.NOT_WORSE: "as good as flush, within the spread over seeds",
    Standing.UNCLEAR: "unclear, its seeds differ too much",
    Standing.WORSE: "worse than flush",
    Standing.BETTER: "better than flush",
    Standing.NOT_TRAINING: "not every run trains",
    Standing.UNDECIDED: "no conclusion",
}


def _depth_clauses(conclusions: Sequence[Conclusion], metric: Metric) -> Iterator[str]:
    """Yield a clause per depth about one rule; the depths at which it holds share one clause."""
    not_worse = [
        conclusion for conclusion in conclusions if conclusion.standing is Standing.NOT_WORSE
    ]
    if not_worse:
        depths = enumeration([conclusion.group.stages for conclusion in not_worse])
        changes = []
        for conclusion in not_worse:
            if conclusion.difference is not None:
                # The number alone: the unit stands once, after the last of them.
                changes.append(metric.difference(0.0, conclusion.difference).split()[0])
        yield (
            f"at {depths} stages {SUMMARY[Standing.NOT_WORSE]} ({', '.join(changes)} {metric.unit})"
        )
    for conclusion in conclusions:
        if conclusion.standing is not Standing.NOT_WORSE:
            stages = conclusion.group.stages
            yield f"at {stages} stages {SUMMARY[conclusion.standing]} ({conclusion.words})"


def enumeration(numbers: Sequence[int]) -> str:
    """Write numbers in a sentence: `2, 4 and 8`."""
    words = list(map(str, numbers))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
