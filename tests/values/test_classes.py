"""Classes that are found by name, without an import or a call."""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
import types
from collections import OrderedDict
from typing import NamedTuple

import pytest
from torch import nn

from penstock.errors import RunError
from penstock.values import classes
from penstock.values.classes import find, name_of, remember, remember_code


def local_classes():
    """A model as a script's function makes it: nothing in it has a name that a module has."""

    @dataclasses.dataclass
    class Inner:
        h: object

    class State(NamedTuple):
        inner: Inner

    def make_state(h):
        return State(Inner(h))

    class Layer(nn.Module):
        def forward(self, x):
            return make_state(x)

    return Layer(), State, Inner


def test_classes_that_a_layers_code_refers_to_are_found():
    """Through a helper function, and through a field of another class."""
    layer, state, inner = local_classes()
    with pytest.raises(RunError, match="this rank does not find that class"):
        find(name_of(state))
    remember_code([layer])
    assert find(name_of(state)) is state
    assert find(name_of(inner)) is inner


def test_the_latest_class_of_a_name_is_used_and_old_ones_are_freed():
    """A notebook cell that runs again defines its classes again."""
    _, first, _ = local_classes()
    _, second, _ = local_classes()
    remember(first)
    remember(second)
    name = name_of(first)
    assert find(name) is second
    del first, second
    gc.collect()
    with pytest.raises(RunError, match="define it at the top of a module that every rank imports"):
        find(name)


@pytest.mark.parametrize("name", ["os:system", "antigravity:fly", "builtins:eval", ":", "no"])
def test_an_unknown_class_is_refused_and_nothing_is_imported(name):
    """A name comes from another process."""
    with pytest.raises(RunError, match="does not find that class"):
        find(name)


def new_class(name="Local", **members):
    """A class that no module has under its name."""
    return type(
        name, (), {"__module__": "elsewhere", "__qualname__": f"f.<locals>.{name}", **members}
    )


def is_found(cls):
    """Whether a class is the one of its name."""
    try:
        return find(name_of(cls)) is cls
    except RunError:
        return False


def closure(cls):
    """A function whose closure has a class."""
    return lambda: cls


def unset_closure(cls):
    """A function with variables that have no value yet, before and after that of the class."""
    if cls is None:
        after = before = None
    return lambda: (before, cls, after)


def annotated(cls):
    """A function with an annotation."""

    def function(x):
        return x

    function.__annotations__ = {"x": cls}
    return function


def with_globals(source, cls):
    """A function whose module has the class under the name `Wanted`."""
    names = {"Wanted": cls, "Other": new_class("Other")}
    exec(source, names)
    return names["function"]


def wrapped(cls):
    """A function that shows another one as what it wraps."""

    def outer(x):
        return x

    outer.__wrapped__ = closure(cls)
    return outer


REFERENCES = {
    "closure": closure,
    "unset closure": unset_closure,
    "default": lambda cls: lambda x=cls: x,
    "keyword default": lambda cls: lambda *, x=cls: x,
    "annotation": annotated,
    "generic annotation": lambda cls: annotated(list[cls]),
    "optional annotation": lambda cls: annotated(cls | None),
    "wrapped": wrapped,
    "global": lambda cls: with_globals("def function(x): return Wanted(x)", cls),
    "nested function": lambda cls: with_globals(
        "def function(x): return [(lambda: Wanted(y)) for y in x]", cls
    ),
    "text annotation": lambda cls: with_globals("def function(x: 'list[Wanted|None]'): ...", cls),
    "partial": lambda cls: functools.partial(closure(cls)),
    "argument of a partial": lambda cls: functools.partial(print, cls),
    "keyword of a partial": lambda cls: functools.partial(print, end=cls),
    "method": lambda cls: new_class("Holder", method=closure(cls)),
    "bound method": lambda cls: types.MethodType(closure(cls), 1),
    "static method": lambda cls: new_class("Holder", method=staticmethod(closure(cls))),
    "class method": lambda cls: new_class("Holder", method=classmethod(closure(cls))),
    "getter": lambda cls: new_class("Holder", value=property(closure(cls))),
    "setter": lambda cls: new_class("Holder", value=property(None, closure(cls))),
    "field": lambda cls: new_class("Holder", __annotations__={"x": cls}),
    "class attribute": lambda cls: new_class("Holder", value=[{"a": (cls,)}]),
    "mapping view": lambda cls: new_class("Holder", value=types.MappingProxyType({"a": cls})),
    "set": lambda cls: new_class("Holder", value=frozenset({cls})),
    "base": lambda cls: type("Holder", (cls,), {"__module__": "elsewhere"}),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_every_way_to_refer_to_a_class_is_followed(name):
    """What a layer can construct may come from another rank."""
    cls = new_class()
    assert not is_found(cls)
    remember_code([REFERENCES[name](cls)])
    assert is_found(cls)


def test_attributes_of_modules_are_followed_and_their_own_class_is_remembered():
    """A layer may hold a function, also in a list."""

    class Layer(nn.Module):
        """A layer of a script."""

    first, second = new_class("First"), new_class("Second")
    layer = Layer()
    layer.function, layer.table = closure(first), [{"a": second}]
    remember_code([layer])
    assert all(map(is_found, (Layer, first, second)))


def test_what_can_be_looked_up_by_name_is_not_followed():
    """The search would go through all of the installed packages."""
    cls = new_class()
    module = types.ModuleType("penstock_test_module")
    module.Importable = type(
        "Importable", (), {"__module__": module.__name__, "method": closure(cls)}
    )
    module.Importable.__qualname__ = "Importable"
    sys.modules[module.__name__] = module
    try:
        remember_code([closure(module.Importable)])
        assert not is_found(cls)
        remember(module.Importable)
        assert find("penstock_test_module:Importable") is module.Importable
        remember_code([module.Importable()])
        assert is_found(cls)
    finally:
        del sys.modules[module.__name__]


def test_references_in_a_circle_are_followed_once():
    """Recursive functions are such circles."""
    cls = new_class()
    holder = new_class("Holder", other=cls)
    cls.holder, cls.table = holder, [holder]
    cls.table.append(cls.table)
    remember_code([holder])
    assert is_found(cls)


def test_a_name_is_that_of_a_class_and_not_of_another_object():
    """A module may have a function under the name; nested classes have dotted names."""
    assert find("collections:OrderedDict") is __import__("collections").OrderedDict
    assert name_of(Outer.Inner).endswith(":Outer.Inner")
    remember(Outer.Inner)
    assert find(name_of(Outer.Inner)) is Outer.Inner
    with pytest.raises(RunError, match=r"^a namedtuple of collections crosses a stage boundary"):
        find("collections:namedtuple")
    with pytest.raises(RunError, match="does not find that class"):
        find("collections:OrderedDict.nothing")


class Outer:
    """A class with another one in it."""

    class Inner:
        """A nested class."""


def test_a_remembered_class_comes_before_one_that_a_module_has_under_its_name():
    """A script's class was sent to its ranks, where the module of that name is another one."""
    local = type("OrderedDict", (), {"__module__": "collections"})
    assert find("collections:OrderedDict") is not local
    remember(local)
    assert find("collections:OrderedDict") is local
    del local
    gc.collect()
    assert find("collections:OrderedDict") is __import__("collections").OrderedDict


def test_a_class_that_a_module_has_is_not_remembered():
    """A module that is loaded again has a new class, which counts."""
    remember(Outer)
    assert name_of(Outer) not in classes._REMEMBERED


@pytest.mark.parametrize(
    "annotation", ["Wanted2", "a.Wanted2", "dict[str, 'Wanted2']", "_2 | Wanted2", "Wanted_2"]
)
def test_words_of_annotations_may_have_digits_and_underscores(annotation):
    """They are names as any other."""
    cls = new_class()
    names = {"Wanted2": cls, "Wanted_2": cls, "Wanted": new_class("Other")}
    exec(f"def function(x: {annotation!r}): ...", names)
    remember_code([names["function"]])
    assert is_found(cls)


def test_text_annotations_of_a_class_are_names_of_its_module():
    """Dataclasses of a script that has `from __future__ import annotations`."""
    cls = new_class()
    module = types.ModuleType("penstock_test_script")
    module.Wanted = cls
    holder = new_class("Holder", __annotations__={"x": "list[Wanted]"}, __module__=module.__name__)
    sys.modules[module.__name__] = module
    try:
        remember_code([holder])
    finally:
        del sys.modules[module.__name__]
    assert is_found(cls)


def test_bases_of_the_class_of_a_root_are_followed_even_if_they_can_be_looked_up():
    """A layer of the user's module inherits the forward that constructs the class."""
    cls = new_class()
    module = types.ModuleType("penstock_test_layers")
    facts = {"__module__": module.__name__}
    module.Base = type("Base", (), {**facts, "forward": closure(cls)})
    module.Layer = type("Layer", (module.Base,), facts)
    sys.modules[module.__name__] = module
    try:
        remember_code([module.Layer()])
    finally:
        del sys.modules[module.__name__]
    assert is_found(cls)


def test_a_lookup_runs_no_code_of_the_module():
    """A module may make attributes when it is asked for them, and the name is another process's."""
    module = types.ModuleType("penstock_test_lazy")
    module.__getattr__ = lambda name: OrderedDict
    sys.modules[module.__name__] = module
    try:
        with pytest.raises(RunError, match="does not find that class"):
            find("penstock_test_lazy:OrderedDict")
    finally:
        del sys.modules[module.__name__]


def test_long_chains_of_references_are_followed_to_their_end():
    """A large model's code has thousands of functions."""
    cls = new_class()
    chain = [cls]
    for _ in range(2000):
        chain = [chain]
    remember_code([new_class("Holder", value=chain)])
    assert is_found(cls)
