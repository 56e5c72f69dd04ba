"""Lines on standard error: one write each."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import penstock
from penstock.standard_error import write_line

SOURCE = Path(penstock.__file__).parent


class Writes(io.StringIO):
    """A stream that counts what is written to it at once."""

    def __init__(self):
        super().__init__()
        self.parts = []

    def write(self, text):
        """Note a write."""
        self.parts.append(text)
        return len(text)


def test_a_line_is_one_write(monkeypatch):
    """Of two ranks under torchrun, the second would else write between a line and its end."""
    writes = Writes()
    write_line("one\ntwo", writes)
    monkeypatch.setattr("sys.stderr", writes)
    write_line("three")
    assert writes.parts == ["one\ntwo\n", "three\n"]


def prints_on_standard_error(file):
    """Return the lines of a file that print on standard error."""
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    return [
        f"{file.relative_to(SOURCE)}:{call.lineno}"
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id == "print"
        and any(
            word.arg == "file" and "stderr" in ast.unparse(word.value) for word in call.keywords
        )
    ]


def test_nothing_prints_on_standard_error_by_itself():
    """`print` is two writes, see `write_line`."""
    lines = []
    for file in sorted(SOURCE.rglob("*.py")):
        lines += prints_on_standard_error(file)
    assert lines == [], "use penstock.standard_error.write_line"
