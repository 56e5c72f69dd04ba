"""Differences between what ranks are about to run, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: What a layer's weights are, if not a checksum: on the meta device; or older than the training
#: that other ranks have done.
META, STALE = "meta", "stale"

#: Characters of a value that a message shows, and lines of one kind of difference.
_WIDTH, _MOST = 100, 4

_CUT = ("ranks", "layers", "cut", "schedule", "program of rank", "layer")


@dataclass(frozen=True)
class Description:
    """What a rank is about to run.

    Attributes:
        facts: by what they are of, short texts.
        lists: by what they are of, texts that are compared one by one, each with a name: of every
        layer, say. weights: per layer its name, and a checksum of its parameters and buffers,
        `META` or `STALE`. homes: per layer, the rank whose values count.
    """

    facts: dict[str, str]
    lists: dict[str, list[tuple[str, str]]]
    weights: list[tuple[str, str]]
    homes: list[int]

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Description:
        """What `dataclasses.asdict` has made, and JSON has changed."""
        lists = {name: [(key, text) for key, text in rows] for name, rows in found["lists"].items()}
        weights = [(name, text) for name, text in found["weights"]]
        return cls(dict(found["facts"]), lists, weights, list(found["homes"]))


def differences(ranks: Sequence[Description]) -> list[str]:
    """What differs between ranks, a line for each difference; none if they agree."""
    found = []
    for name in _names([rank.facts for rank in ranks]):
        line = _line(
            name,
            {number: rank.facts[name] for number, rank in enumerate(ranks) if name in rank.facts},
        )
        found += line
    for name in _names([rank.lists for rank in ranks]):
        found += _of_lists(name, [rank.lists.get(name, []) for rank in ranks])
    if not any(line.startswith((*_CUT, "parameter")) for line in found):
        found += _of_weights(ranks)
    return found


def message_of(found: Sequence[str]) -> str:
    """What is raised on every rank."""
    lines = [
        f"the ranks do not run the same thing ({len(found)} difference{'s' * (len(found) != 1)}):"
    ]
    lines += [f"  {line}" for line in found]
    advice = "Every rank must make its Pipeline from the same model and the same settings"
    if any(line.startswith(_CUT) for line in found):
        advice += "; plan on one rank, and load that plan on all of them (plan.save, ps.Plan.load)"
    if any(line.startswith("weights of layer") for line in found):
        advice += (
            ". Models with weights of their own must have the same values on every rank: seed their initialisation "
            "(torch.manual_seed before the model is made), load one state into the model on every rank before the Pipeline is "
            "made, or build the model on the meta device, where the Pipeline's own seed= counts. After training by an earlier "
            "Pipeline: call its load_into(model) first"
        )
    return "\n".join([*lines, advice])


def _names(rows: Sequence[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _line(name: str, values: Mapping[int, str]) -> list[str]:
    """One line, or none if all ranks have the same value."""
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    if len(groups) < 2:
        return []
    parts = [
        f"{text} on {ranks_in_words(ranks)}"
        for text, ranks in zip(shortened(list(groups)), groups.values(), strict=True)
    ]
    return [f"{name}: {'; '.join(parts)}"]


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 0, 2 and 3`."""
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def shortened(texts: Sequence[str]) -> list[str]:
    """Texts that differ, without what is the same in all where they are long."""
    if max(map(len, texts)) <= _WIDTH:
        return list(texts)
    columns = zip(*texts, strict=False)
    same = next((place for place, letters in enumerate(columns) if len(set(letters)) > 1), 0)
    start = max(0, same - _WIDTH // 4)
    return [
        ("…" if start else "")
        + text[start : start + _WIDTH]
        + ("…" if start + _WIDTH < len(text) else "")
        for text in texts
    ]


def _of_lists(name: str, lists: Sequence[Sequence[tuple[str, str]]]) -> list[str]:
    """Differences of named rows: by place where the names agree or the rows have no order of their
    own, and by name.
    """
    if name == "parameter":
        tables = [dict(rows) for rows in lists]
        keys = _names(tables)
        found = [
            _line(
                f"{name} {key!r}", {r: table.get(key, "missing") for r, table in enumerate(tables)}
            )
            for key in keys
        ]
    else:
        most = max(map(len, lists))
        found = [
            _line(f"{name} {place}", {r: _row(rows, place) for r, rows in enumerate(lists)})
            for place in range(most)
        ]
    lines = [line for row in found for line in row]
    if len(lines) > _MOST:
        lines[_MOST:] = [f"{name}: {len(lines) - _MOST} more differ"]
    return lines


def _row(rows: Sequence[tuple[str, str]], place: int) -> str:
    if place >= len(rows):
        return "missing"
    name, text = rows[place]
    return text if name == str(place) else f"{name!r} {text}"


def _of_weights(ranks: Sequence[Description]) -> list[str]:
    """Differences of the initial values, layer by layer.

    A layer that is on the meta device, or older, on ranks that do not train it has the values of
    the rank that does.
    """
    lines = []
    for place, rows in enumerate(zip(*[rank.weights for rank in ranks], strict=True)):
        values = {rank: text for rank, (_, text) in enumerate(rows)}
        home = ranks[0].homes[place]
        if home not in values:  # fewer ranks than the schedule has, which is refused next
            continue
        if values[home] not in (META, STALE):
            values = {rank: text for rank, text in values.items() if text not in (META, STALE)}
        elif values[home] == STALE:
            lines.append(
                f"weights of layer {rows[0][0]!r}: on rank {home}, which is to train it, from before the training by an "
                "earlier Pipeline, which trained it elsewhere"
            )
            continue
        words = {rank: _in_words(text) for rank, text in values.items()}
        lines += _line(f"weights of layer {rows[0][0]!r}", words)
    if len(lines) > _MOST:
        lines[_MOST:] = [f"weights of layer: {len(lines) - _MOST} more layers differ"]
    return lines


def _in_words(text: str) -> str:
    words = {META: "on the meta device", STALE: "from before an earlier training"}
    return words.get(text, f"values with checksum {text}")
