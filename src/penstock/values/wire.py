"""A structure as JSON, and back. Reading it looks classes up, checks their kind, and makes nothing."""

from __future__ import annotations

from typing import Any

from penstock.errors import RunError
from penstock.values.classes import find, name_of, remember
from penstock.values.constants import decode, encode
from penstock.values.kinds import KINDS, check_context, context_of, context_values
from penstock.values.structure import LEAF, Structure

#: In the place of a leaf.
_LEAF = "leaf"


def dump(structure: Structure) -> Any:
    """A structure as JSON.

    Raises:
        RunError: something in it does not travel, such as a default that a function makes.
    """
    if structure.kind == "leaf":
        return _LEAF
    if structure.kind in ("same", "again"):
        return {structure.kind: structure.context[0]}
    check_context(KINDS[structure.kind], structure.cls, structure.context)
    if structure.cls is not None:
        remember(structure.cls)
    return {
        "kind": structure.kind,
        "class": None if structure.cls is None else name_of(structure.cls),
        "context": [encode(entry) for entry in context_values(structure.kind, structure.context)],
        "children": [dump(child) for child in structure.children],
    }


def parse(text: Any) -> Structure:
    """What `dump` was given.

    Raises:
        RunError: this process does not have a class that it names, or it is nothing that `dump`
        writes.
    """
    if text == _LEAF:
        return LEAF
    if isinstance(text, dict) and text.get("kind") in KINDS:
        kind = KINDS[text["kind"]]
        cls = find(text["class"]) if kind.named else None
        context = context_of(kind.name, [decode(entry) for entry in text["context"]])
        check_context(kind, cls, context)
        return Structure(kind.name, cls, context, tuple(parse(child) for child in text["children"]))
    if isinstance(text, dict) and len(text) == 1:
        ((kind_name, number),) = text.items()
        if kind_name in ("same", "again") and type(number) is int:
            return Structure(kind_name, None, (number,))
    raise RunError(f"a message from another rank says {text!r}, which is no structure of a value")
