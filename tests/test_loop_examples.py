"""A pipeline in the loops of other libraries: few changed lines, and the losses of plain training."""

from __future__ import annotations

import ast
import difflib
import re
import runpy
import sys
from pathlib import Path

import pytest

LOOPS = Path(__file__).parents[1] / "examples" / "loops"

#: By loop, the package that it needs beside transformers.
PACKAGES = {"trainer": "accelerate", "accelerate": "accelerate", "fabric": "lightning_fabric"}

#: Largest difference of a loss: micro-batches are summed in another order than the whole batch.
TOLERANCE = 2e-5


#: The page that shows the lines that change.
MIGRATE = Path(__file__).parents[1] / "docs" / "migrate.md"


def code_of(path: Path) -> list[str]:
    """The lines of a program without its docstring and without blank lines."""
    text = path.read_text(encoding="utf-8")
    docstring = ast.parse(text).body[0]
    lines = text.splitlines()[docstring.end_lineno :]
    return [line for line in lines if line.strip()]


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a program in this process, which has loaded the libraries, and return what it prints."""
    monkeypatch.syspath_prepend(str(LOOPS))

    def run_path(name: str) -> str:
        state = sys.modules.get("accelerate.state")
        if state is not None:
            state.AcceleratorState._reset_state(reset_partial_state=True)
        run_path.names = runpy.run_path(str(LOOPS / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    yield run_path
    sys.modules.pop("text_model", None)


@pytest.mark.parametrize("loop", PACKAGES)
def test_at_most_ten_lines_of_the_loop_change(loop):
    """Counted by diff, imports included."""
    plain, piped = (code_of(LOOPS / f"{loop}_{kind}.py") for kind in ("plain", "pipe"))
    changed = [line for line in difflib.ndiff(plain, piped) if line.startswith("+ ")]
    assert 2 <= len(changed) <= 10, changed


@pytest.mark.parametrize("loop", PACKAGES)
def test_the_page_on_moving_shows_the_lines_that_change(loop):
    """All of them, as they stand in the programs."""
    plain, piped = (code_of(LOOPS / f"{loop}_{kind}.py") for kind in ("plain", "pipe"))
    changed = [line for line in difflib.unified_diff(plain, piped, n=0) if line[:2] != "@@"]
    text = MIGRATE.read_text(encoding="utf-8").partition(f"/{loop}_pipe.py")[2]
    block = re.search(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
    shown = [line for line in block.splitlines() if line.startswith(("+", "-"))]
    assert shown == changed[2:]


@pytest.mark.parametrize("loop", PACKAGES)
def test_the_losses_are_those_of_the_plain_loop(loop, run):
    """Every step of an epoch: forward, gradients, clipping and update."""
    pytest.importorskip("transformers")
    pytest.importorskip(PACKAGES[loop])
    plain, piped = (
        [float(word) for word in re.findall(r"(?<![\w.'])\d+\.\d{6}", run(f"{loop}_{kind}"))]
        for kind in ("plain", "pipe")
    )
    assert len(plain) == len(piped) == 4
    assert plain[-1] < plain[0] - 0.5, "it learns"
    assert max(abs(a - b) for a, b in zip(plain, piped, strict=True)) <= TOLERANCE


@pytest.mark.parametrize("path", sorted(LOOPS.glob("*.py")), ids=lambda path: path.name)
def test_every_loop_says_what_it_shows_tells_and_takes(path):
    """As the other examples do."""
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    for word in ("Shows:", "Story:", "Takes:"):
        assert re.search(rf"^{word} \S", said, re.MULTILINE), word


def test_trainer_evaluates_a_pipe_as_the_plain_model(run):
    """Trainer passes labels to a model whose forward does not name them, unless it is told which
    they are; the model would then reduce its loss for each micro-batch.
    """
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    losses = []
    for kind in ("plain", "pipe"):
        run(f"trainer_{kind}")
        names = run.names
        losses.append(names["trainer"].evaluate(names["Text"]())["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], abs=TOLERANCE)
