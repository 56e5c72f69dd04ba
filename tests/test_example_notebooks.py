"""The notebooks of the examples run from top to bottom, and are kept without outputs."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[dict]:
    """The cells of one kind, in order."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


@every_notebook
def test_a_notebook_runs_from_top_to_bottom(path, monkeypatch):
    """Its assertions hold. Paths are those of the root of the repository."""
    monkeypatch.chdir(ROOT)
    space: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells(path, "code")):
        code = compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, space)


@every_notebook
def test_a_notebook_is_kept_without_outputs(path):
    """Outputs differ between machines, and hide a change among thousands of lines."""
    used = [cell for cell in cells(path, "code") if cell["outputs"] or cell["execution_count"]]
    assert used == []


@every_notebook
def test_a_notebook_opens_with_what_the_reader_will_be_able_to_do(path):
    """A reader decides by the first cell whether to go on."""
    assert "After this notebook you can " in "".join(cells(path, "markdown")[0]["source"])
