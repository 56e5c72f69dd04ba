"""A room imports only from rooms above it; every import counts, also one inside a function or
behind TYPE_CHECKING.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "penstock"

#: docs/design.md, top to bottom. registry, files and store are what several rooms share. Rooms in one row
#: may not import each other against the order either. The front door, penstock/__init__.py, names
#: everything above it, lazily; only the command line stands below it.
ORDER = [
    "errors",
    "deprecation",
    "units",
    "text_table",
    "standard_error",
    "registry",
    "files",
    "store",
    "option",
    "compiled",
    "notebook",
    "model",
    "cluster",
    "profile",
    "partition",
    "schedule",
    "weights",
    "plan",
    "event",
    "idle",
    "draw",
    "verify",
    "simulate",
    "synthesis",
    "search",
    "export",
    "report",
    "explore",
    "zoo",
    "values",
    "modules",
    "tracing",
    "grad",
    "shared_memory",
    "transport",
    "measure",
    "optim",
    "batches",
    "losses",
    "ranks",
    "stage",
    "checkpoint",
    "runtime",
    "pipe",
    "training",
    "peers",
    "study",
    "__init__",
    "cli",
    "__main__",
]
#: From here down torch may be imported.
FIRST_WITH_TORCH = "zoo"


def room_of(file: Path) -> str:
    """The folder directly in the package, or the file that stands there by itself."""
    first = file.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imports_of(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and dotted name of every module that is imported anywhere in a file, by statement or by
    its name in a string.
    """
    imports = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(node.lineno, name.name) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            imports += [
                (node.lineno, f"{module}.{name.name}" if module == "penstock" else module)
                for name in node.names
            ]
        elif isinstance(node, ast.Call):
            called = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            if (
                called in ("import_module", "__import__")
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                imports.append((node.lineno, str(node.args[0].value)))
    return imports


def target_of(module: str) -> str | None:
    """The room that an imported module is of; None for other packages'."""
    package, _, rest = module.partition(".")
    if package != "penstock":
        return None
    return rest.partition(".")[0] or "__init__"


FILES = sorted(SOURCE.rglob("*.py"))
TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
every_room = pytest.mark.parametrize("room", sorted({room_of(file) for file in FILES}))


@every_room
def test_a_room_imports_only_from_rooms_above_it(room):
    """Data flows one way; the first import against it is the first of many."""
    assert room in ORDER, (
        f"{room} has no place in the order of docs/design.md: give it one here and there"
    )
    wrong = [
        f"{file.relative_to(SOURCE)}:{line} imports {module}"
        for file, tree in TREES.items()
        if room_of(file) == room
        for line, module in imports_of(tree)
        if (target := target_of(module)) not in (None, room)
        and (target not in ORDER or ORDER.index(target) > ORDER.index(room))
    ]
    assert wrong == []


@every_room
def test_imports_are_absolute(room):
    """`from .x` hides which room x is in."""
    wrong = [
        f"{file.relative_to(SOURCE)}:{line}"
        for file, tree in TREES.items()
        if room_of(file) == room
        for line, module in imports_of(tree)
        if module.startswith(".")
    ]
    assert wrong == []


def test_no_room_above_the_line_names_torch_not_even_in_a_function():
    """A hidden import would need torch at the first call instead of at once: later, and worse."""
    above = ORDER[: ORDER.index(FIRST_WITH_TORCH)]
    wrong = [
        f"{file.relative_to(SOURCE)}:{line} imports {module}"
        for file, tree in TREES.items()
        if room_of(file) in above
        for line, module in imports_of(tree)
        if module.partition(".")[0] in ("torch", "torchvision")
    ]
    assert wrong == []


def test_a_rooms_init_holds_a_docstring_and_nothing_else():
    """Importing one file of a room must not load the others: the command line answers at once
    because of it.
    """
    wrong = [
        str(file.relative_to(SOURCE))
        for file, tree in TREES.items()
        if file.name == "__init__.py"
        and file.parent != SOURCE
        and (len(tree.body) != 1 or ast.get_docstring(tree) is None)
    ]
    assert wrong == []


def test_hidden_imports_are_seen():
    """The keeper itself: a checker that overlooks a form of import keeps nothing."""
    text = """
import penstock.cli.main as door
from penstock import runtime
def hidden():
    from penstock.study.questions import ask
    importlib.import_module("penstock.zoo.gpt")
if TYPE_CHECKING:
    from penstock.stage.stage import Stage
from . import sibling
"""
    rooms = [target_of(module) for _, module in sorted(imports_of(ast.parse(text)))]
    assert rooms == ["cli", "runtime", "study", "zoo", "stage", None]
    assert (9, ".") in imports_of(ast.parse(text))
