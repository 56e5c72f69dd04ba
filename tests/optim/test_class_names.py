"""Names of classes in checkpoints, which guard state against objects of another class."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.optim.class_names import class_name, same_class


class Plain:
    """Any class."""

    class Inner:
        """A class within it, which is another one than a class `Inner` of the module."""


def composed(*parts):
    """Return an object that is composed of others, as torch's SequentialLR is."""
    value = Plain()
    value._schedulers = parts
    return value


def test_a_name_has_the_module_and_the_parts():
    """Parts within parts, too; an empty list of parts is none."""
    name = f"{__name__}.Plain"
    assert class_name(Plain()) == name
    assert class_name(composed()) == name
    assert class_name(Plain.Inner()) == f"{name}.Inner"
    nested = composed(Plain(), composed(Plain()))
    assert class_name(nested) == f"{name}({name}, {name}({name}))"
    namespace = SimpleNamespace(_schedulers="text")
    assert class_name(namespace) == "types.SimpleNamespace"


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("a.X", "a.X", True),
        ("a.X", "a.Y", False),
        ("a.X", "b.X", False),
        ("__main__.X", "b.X", True),
        ("b.X", "__main__.X", True),
        ("__mp_main__.X", "b.c.X", True),
        ("__main__.X", "b.Y", False),
        ("a.X(a.Y, a.Z)", "a.X(a.Y, a.Z)", True),
        ("a.X(a.Y, a.Z)", "a.X(a.Z, a.Y)", False),
        ("a.X(a.Y, __main__.Z)", "a.X(a.Y, s.Z)", True),
        ("a.X(a.Y, a.Z)", "a.X(a.Y)", False),
        ("a.X(a.Y)", "a.X", False),
    ],
)
def test_a_class_of_a_script_is_the_same_where_it_is_imported(first, second, same):
    """All parts must agree, in their order."""
    assert same_class(first, second) is same
