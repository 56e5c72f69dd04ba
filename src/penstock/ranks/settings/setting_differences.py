"""Differences between the descriptions of all ranks' runs, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.units import format_count, format_ranks

#: Instead of a checksum of a layer's weights: they are on the meta device.
META = "meta"
#: Instead of a checksum: other ranks have trained the layer since these weights were set.
STALE = "stale"

#: Characters of a value that a message shows.
_WIDTH = 100
#: Lines that a message has of one kind of difference.
_LINES_PER_KIND = 4

#: What a difference in the cut or the schedule begins with.
_CUT_PREFIXES = ("ranks", "layers", "cut", "schedule", "program of rank", "layer")


@dataclass(frozen=True)
class Description:
    """A description of the run that a rank is about to start.

    Attributes:
        facts: short texts by topic.
        lists: by topic, rows of name and text that are compared one by one, such as one per layer.
        weights: for each layer its name, and a checksum of its parameters and buffers, `META` or
            `STALE`.
        homes: for each layer, the rank whose weights count.
    """

    facts: dict[str, str]
    lists: dict[str, list[tuple[str, str]]]
    weights: list[tuple[str, str]]
    homes: list[int]

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Description:
        """Restore a description from the fields of `dataclasses.asdict` after a JSON round trip."""
        lists = {topic: _rows(rows) for topic, rows in fields["lists"].items()}
        return cls(dict(fields["facts"]), lists, _rows(fields["weights"]), list(fields["homes"]))


def _rows(rows: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Convert rows of two texts, which JSON has turned into lists, back to tuples."""
    return [(name, text) for name, text in rows]


def differences(ranks: Sequence[Description]) -> list[str]:
    """Compare the descriptions of all ranks.

    Args:
        ranks: the descriptions in the order of the ranks.

    Returns:
        One line per difference; empty if all agree. Weights are compared only if the ranks agree
        on the cut and the parameters.
    """
    lines = []
    for topic in _keys([description.facts for description in ranks]):
        values = {
            rank: description.facts[topic]
            for rank, description in enumerate(ranks)
            if topic in description.facts
        }
        lines += _compare(topic, values)
    for topic in _keys([description.lists for description in ranks]):
        lines += _compare_lists(topic, [rank.lists.get(topic, []) for rank in ranks])
    if not any(line.startswith((*_CUT_PREFIXES, "parameter")) for line in lines):
        lines += _compare_weights(ranks)
    return lines


def message_of(lines: Sequence[str]) -> str:
    """Return the error message for some differences, with advice that fits them."""
    head = f"the ranks do not run the same thing ({format_count(len(lines), 'difference')}):"
    advice = "Every rank must construct its Pipeline from the same model and the same settings"
    if any(line.startswith(_CUT_PREFIXES) for line in lines):
        advice += "; plan on one rank, and load that plan on all of them (plan.save, ps.Plan.load)"
    if any(line.startswith("weights of layer") for line in lines):
        advice += (
            ". A model that is not on the meta device must have the same weights on every rank: "
            "seed its initialisation (torch.manual_seed before the model is built), load one state "
            "into the model on every rank before the Pipeline is constructed, or build the model "
            "on the meta device, where the Pipeline's own seed= counts. After training by an "
            "earlier Pipeline, call its load_into(model) first"
        )
    return "\n".join([head, *(f"  {line}" for line in lines), advice])


def _keys(mappings: Sequence[Mapping[str, object]]) -> list[str]:
    """Return all keys of some mappings, each once, in the order of their first appearance."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _compare(topic: str, values: Mapping[int, str]) -> list[str]:
    """Compare one value of several ranks.

    Returns:
        One line with the ranks of each value; empty if all have the same.
    """
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    if len(groups) < 2:
        return []
    parts = [
        f"{text} on {format_ranks(ranks)}"
        for text, ranks in zip(shorten_texts(list(groups)), groups.values(), strict=True)
    ]
    return [f"{topic}: {'; '.join(parts)}"]


def shorten_texts(texts: Sequence[str]) -> list[str]:
    """Shorten long texts that differ to the part around their first difference."""
    if max(map(len, texts)) <= _WIDTH:
        return list(texts)
    columns = zip(*texts, strict=False)
    differing = (place for place, letters in enumerate(columns) if len(set(letters)) > 1)
    start = max(0, next(differing, 0) - _WIDTH // 4)
    end = start + _WIDTH
    return [
        ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
        for text in texts
    ]


def _compare_lists(topic: str, lists: Sequence[Sequence[tuple[str, str]]]) -> list[str]:
    """Compare the rows of all ranks: parameters by their names, all else by position."""
    lines = []
    if topic == "parameter":
        tables = [dict(rows) for rows in lists]
        for name in _keys(tables):
            values = {rank: table.get(name, "missing") for rank, table in enumerate(tables)}
            lines += _compare(f"{topic} {name!r}", values)
    else:
        for place in range(max(map(len, lists))):
            values = {rank: _row(rows, place) for rank, rows in enumerate(lists)}
            lines += _compare(f"{topic} {place}", values)
    return _first_lines(lines, f"{topic}: {{}} more differ")


def _first_lines(lines: list[str], rest: str) -> list[str]:
    """Return the first lines, and a line with the number of the others in the place of {}."""
    more = len(lines) - _LINES_PER_KIND
    return lines if more <= 0 else [*lines[:_LINES_PER_KIND], rest.format(more)]


def _row(rows: Sequence[tuple[str, str]], place: int) -> str:
    """Return a row as text: its name, unless that is its position, and its text."""
    if place >= len(rows):
        return "missing"
    name, text = rows[place]
    return text if name == str(place) else f"{name!r} {text}"


def _compare_weights(ranks: Sequence[Description]) -> list[str]:
    """Compare the initial weights layer by layer.

    Weights on the meta device and stale weights are ignored on ranks that do not train the layer:
    the weights of its home rank count.
    """
    lines = []
    for place, rows in enumerate(zip(*[rank.weights for rank in ranks], strict=True)):
        layer = rows[0][0]
        values = {rank: text for rank, (_, text) in enumerate(rows)}
        home = ranks[0].homes[place]
        if home not in values:  # the run has too few ranks for the schedule: refused elsewhere
            continue
        if values[home] == STALE:
            lines.append(
                f"weights of layer {layer!r}: on rank {home}, which is to train it, from before "
                "the training by an earlier Pipeline, which trained it on another rank"
            )
            continue
        if values[home] != META:
            values = {rank: text for rank, text in values.items() if text not in (META, STALE)}
        texts = {rank: _weights_in_words(text) for rank, text in values.items()}
        lines += _compare(f"weights of layer {layer!r}", texts)
    return _first_lines(lines, "weights of layer: {} more layers differ")


def _weights_in_words(text: str) -> str:
    """Describe a layer's checksum, `META` or `STALE`."""
    special = {META: "on the meta device", STALE: "from before an earlier training"}
    return special.get(text, f"values with checksum {text}")
