"""Parse and write YAML strictly: plain values only, without duplicate keys, anchors, merge keys and
tags.

Anchors are refused because a few lines of them describe a structure that fills any memory. Numbers
such as 1e-3 are numbers, as in YAML 1.2 and in JSON; PyYAML itself reads them as texts. Dates
and times such as 1:30 are texts.
"""

from __future__ import annotations

import math
import re
from typing import Any, NoReturn

import yaml
from yaml.composer import Composer

from penstock.errors import FileError
from penstock.files.json_values import MAX_INTEGER
from penstock.files.text import check_characters, quote, shorten

#: Characters of a text at most, and values in it. A node number for each of 65,536 devices, the
#: longest list that a cluster file can have, fits in.
MAX_CHARACTERS = 2**20
_MAX_NODES = 100_000
#: Levels of nesting: many more than any format here has, and few enough for PyYAML's composer,
#: which is recursive.
_MAX_DEPTH = 40

_PREFIX = "tag:yaml.org,2002:"
_PLAIN_TAGS = frozenset(_PREFIX + name for name in ("null", "bool", "int", "float", "str"))
#: A number with an exponent, which PyYAML reads as a text without a dot or a sign.
_EXPONENT = re.compile(r"[-+]?(?:\d+|\d+\.\d*|\.\d+)[eE][-+]?\d+$")
#: Digits between colons, which PyYAML reads to base 60.
_SIXTIES = re.compile(r"[-+]?\d[\d_]*(?::\d+)+(?:\.\d*)?")

# libyaml's parser takes an eighth of the time, where it is available.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StrictComposer(Composer):
    """Builds the tree of a document, within limits."""

    _nodes = 0
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Build the tree of the next value."""
        event = self.peek_event()  # type: ignore[attr-defined]  # of the parser
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            _refuse(event, "anchors and aliases (& and *) are not allowed: write the value out")
        self._nodes += 1
        self._depth += 1
        if self._nodes > _MAX_NODES:
            _refuse(event, f"there are more than {_MAX_NODES:,} values")
        if self._depth > _MAX_DEPTH:
            _refuse(event, f"there are more than {_MAX_DEPTH} levels of nesting")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _StrictLoader(_StrictComposer, _Base):  # type: ignore[misc]
    """Builds plain values: None, bool, int, float, str, lists, and dictionaries with text keys."""

    def __init__(self, text: str) -> None:
        _Base.__init__(self, text)
        # libyaml's loader composes by itself, and does not initialise this class.
        Composer.__init__(self)


def _refuse(place: Any, problem: str) -> NoReturn:
    """Raise a YAML error at an event or a node of the document."""
    raise yaml.constructor.ConstructorError(problem=problem, problem_mark=place.start_mark)


def _build(loader: _StrictLoader, node: yaml.Node) -> Any:
    """Return the plain value of a node; refuse tags that would construct other objects."""
    if isinstance(node, yaml.MappingNode) and node.tag == _PREFIX + "map":
        return _build_mapping(loader, node)
    if isinstance(node, yaml.SequenceNode) and node.tag == _PREFIX + "seq":
        return [_build(loader, item) for item in node.value]
    if isinstance(node, yaml.ScalarNode):
        return _build_scalar(loader, node)
    _refuse(node, f"the tag {quote(node.tag)} is not allowed")


def _build_mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[str, Any]:
    """Return a dictionary whose keys are different texts."""
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if key_node.tag == _PREFIX + "merge":
            _refuse(key_node, "merge keys (<<) are not allowed: write the values out")
        key = _build(loader, key_node)
        if not isinstance(key, str):
            _refuse(key_node, f"the key {quote(key)} is not a text: put it in quotes")
        if key in mapping:
            _refuse(key_node, f"duplicate key {quote(key)}: remove one of them")
        mapping[key] = _build(loader, value_node)
    return mapping


def _build_scalar(loader: _StrictLoader, node: yaml.ScalarNode) -> Any:
    """Return a text, a number, a truth value or None."""
    # Dates and times, such as 2026-01-31 and 12:30, stay texts.
    if not node.style and (node.tag == _PREFIX + "timestamp" or _SIXTIES.fullmatch(node.value)):
        return node.value
    if node.tag not in _PLAIN_TAGS:
        _refuse(node, f"the tag {quote(node.tag)} is not allowed")
    if node.tag == _PREFIX + "str" and not node.style and _EXPONENT.fullmatch(node.value):
        node.tag = _PREFIX + "float"
    try:
        check_characters(node.value)
        value = loader.construct_object(node)
    except (ValueError, KeyError, IndexError) as error:
        _refuse(node, f"{quote(node.value)} has no value: {shorten(str(error), 100)}")
    if isinstance(value, float) and not math.isfinite(value):
        _refuse(node, f"{shorten(node.value)} is not a finite number")
    if isinstance(value, int) and abs(value) >= MAX_INTEGER:
        _refuse(node, f"{shorten(node.value)} is beyond the integers of 64 bits")
    return value


def yaml_value(text: str, source: str) -> Any:
    """Parse a YAML document into plain values; an empty document is None.

    Args:
        text: the YAML.
        source: its place, with which every message begins.

    Raises:
        FileError: the text is not YAML, or has what this reader refuses: see the top of this file.
    """
    if len(text) > MAX_CHARACTERS:
        raise FileError(
            f"{source} has {len(text):,} characters, more than the {MAX_CHARACTERS:,} allowed"
        )
    # Counted before parsing, which takes up to a second for the most values. Those within texts and
    # comments count as well.
    count = 2 * text.count(": ") + sum(map(text.count, ("- ", ",", "[", "{")))
    if count > _MAX_NODES:
        raise FileError(f"{source} has {count:,} values, more than the {_MAX_NODES:,} allowed")
    try:
        text.encode()  # libyaml's parser fails on half a surrogate pair
        loader = _StrictLoader(text)
        try:
            node = loader.get_single_node()
            return None if node is None else _build(loader, node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise FileError(f"{source} is not YAML: {place}{_problem(error)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FileError(f"{source} is not YAML: {shorten(str(error), 200)}") from error


def _problem(error: yaml.MarkedYAMLError) -> str:
    """Return what an error says, on one line."""
    return shorten(", ".join(filter(None, (error.context, error.problem))), 200)


class _Dumper(yaml.SafeDumper):
    """A dumper without anchors: equal values are written in full at every place."""

    def ignore_aliases(self, data: object) -> bool:
        """Never use an anchor."""
        del data
        return True


# Texts that look like a number with an exponent are put in quotes.
_Dumper.add_implicit_resolver(_PREFIX + "float", _EXPONENT, list("+-.0123456789"))


def yaml_text(value: object) -> str:
    """Return plain values as YAML that `yaml_value` reads back equal."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text
