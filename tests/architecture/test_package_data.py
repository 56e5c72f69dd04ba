"""Files of the package that are not Python are installed with it."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "penstock"
#: Numba's caches, and what Python compiles.
CACHES = {".pyc", ".nbi", ".nbc"}


def test_every_data_file_is_in_package_data():
    """A file that is missing from the wheel is missing for users only, never in this checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["penstock"]
    installed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".py"}
    missing = {path for path in files - installed if path.suffix not in CACHES}
    assert missing == set(), "add these to package-data in pyproject.toml"
