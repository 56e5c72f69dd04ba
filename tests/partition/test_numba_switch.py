"""When loops run compiled and when in plain Python."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from penstock.partition import numba_switch as compiled


def doubled(numbers):
    """A loop that says whether it was compiled: only plain Python knows frames."""
    total = 0.0
    for number in numbers:
        total += 2 * number
    return total


def test_both_forms_give_the_same(monkeypatch):
    """The compiled one is a copy of the plain one, not another algorithm."""
    numbers = np.arange(5.0)
    monkeypatch.setattr(compiled, "WORTH_LOADING", 10)
    assert compiled.run(doubled, 5, numbers) == compiled.run(doubled, 50, numbers) == 20.0


def test_without_numba_the_plain_loop_runs(monkeypatch):
    """It is a dependency, but a broken one must not take planning with it."""
    monkeypatch.setitem(sys.modules, "numba", None)
    assert compiled._compiled.__wrapped__(doubled) is doubled


def test_listing_methods_and_cutting_a_small_model_do_not_load_numba():
    """It takes as long to load as everything else together."""
    code = (
        "import sys\n"
        "from penstock.partition.catalogue import PARTITIONERS\n"
        "from penstock.partition.limited import limited\n"
        "from penstock.partition.looped import folded, looped\n"
        "PARTITIONERS.entries(); folded([1] * 12, 3); looped([1] * 12, 3, 2)\n"
        "limited([1] * 12, None, [1] * 12, [1] * 12, [1] * 3, [9] * 3)\n"
        "assert 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
