"""Serialise a structure as JSON, and read it back. Reading looks classes up and checks their kind;
it creates no objects.
"""

from __future__ import annotations

from typing import Any

from penstock.errors import RunError
from penstock.values.classes import find, name_of, remember
from penstock.values.constants import decode, encode
from penstock.values.kinds import KINDS, check_context, context_of, context_values
from penstock.values.structure import LEAF, Structure

#: JSON of a leaf.
_LEAF = "leaf"


def dump(structure: Structure) -> Any:
    """Return a structure as JSON.

    Raises:
        RunError: something in it cannot be sent, such as a defaultdict with a user's function.
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
    """Read a structure that `dump` has written.

    Raises:
        RunError: this process does not have a class that it names, or `dump` did not write it.
    """
    if text == _LEAF:
        return LEAF
    if isinstance(text, dict) and text.get("kind") in KINDS:
        return _parse_container(text)
    if isinstance(text, dict) and len(text) == 1:
        ((kind_name, number),) = text.items()
        if kind_name in ("same", "again") and type(number) is int:
            return Structure(kind_name, None, (number,))
    raise RunError(
        f"a message from another rank contains {text!r}, which is no structure of a value"
    )


def _parse_container(fields: dict[str, Any]) -> Structure:
    """Read the structure of a container. Raises as `parse`."""
    kind = KINDS[fields["kind"]]
    cls = find(fields["class"]) if kind.named else None
    context = context_of(kind.name, [decode(entry) for entry in fields["context"]])
    check_context(kind, cls, context)
    children = tuple(parse(child) for child in fields["children"])
    return Structure(kind.name, cls, context, children)
