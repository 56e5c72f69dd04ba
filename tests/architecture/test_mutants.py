"""The hand-made defects of benchmarks/mutants: each can still be put into the code."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "penstock"


def test_every_defect_replaces_text_that_occurs_once_by_code_that_compiles():
    """Else the benchmark would count a defect that it has not made."""
    defects = runpy.run_path(str(ROOT / "benchmarks" / "mutants" / "defects.py"))["DEFECTS"]
    problems = []
    for defect in defects:
        text = (SOURCE / defect.file).read_text(encoding="utf-8")
        if text.count(defect.old) != 1:
            problems.append(f"{defect.what}: {text.count(defect.old)} places in {defect.file}")
            continue
        ast.parse(text.replace(defect.old, defect.new))
    assert problems == []


def test_every_defect_names_tests_that_exist():
    """A test file that was moved would kill nothing."""
    defects = runpy.run_path(str(ROOT / "benchmarks" / "mutants" / "defects.py"))["DEFECTS"]
    missing = {path for defect in defects for path in defect.tests if not (ROOT / path).exists()}
    assert missing == set()
