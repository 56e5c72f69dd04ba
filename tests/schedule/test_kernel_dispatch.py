"""Plain and compiled kernels agree; Numba is loaded only if it pays off, and is not required."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.slow import rich_schedules
from tests.simulate.test_everything import rich_costs

from penstock.schedule import kernel_dispatch as engine
from penstock.schedule.catalogue import schedule
from penstock.schedule.dependencies import dependencies_of
from penstock.schedule.kernel_dispatch import load_compiled
from penstock.schedule.recompute import Recompute
from penstock.simulate.costs import LINKS, Costs
from penstock.simulate.simulate import simulate_schedule, tables_of, times_of


def python(code: str) -> str:
    """What a fresh process prints."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize("links", LINKS)
def test_plain_and_compiled_loops_agree_to_the_bit(links, monkeypatch):
    """They are one source; were one to add in another order, a timeline would depend on what ran
    before it.
    """
    pytest.importorskip("numba")
    load_compiled()

    @given(st.data(), st.booleans())
    @settings(deadline=None, max_examples=30)
    def check(data, overlap):
        case_schedule = data.draw(rich_schedules())
        costs = data.draw(rich_costs(case_schedule, links=[links], amounts=st.floats(0, 9)))
        times = []
        for worth in (0, 10**9):
            monkeypatch.setattr(engine, "WORTH_CALLING", worth)
            case_schedule.__dict__.pop("_dependencies", None)
            tables = tables_of(case_schedule, costs, Recompute.ALWAYS)
            times.append(
                [
                    dependencies_of(case_schedule).graph.order,
                    *times_of(tables, tables.seconds[0], overlap, links),
                ]
            )
        assert all(map(np.array_equal, *times))

    check()


def test_one_small_schedule_loads_no_numba():
    """The command line answers at once: Numba takes longer to load than a hundred thousand ops take
    without it.
    """
    code = (
        "import sys; from penstock.schedule.catalogue import schedule; from penstock.simulate.entry import simulate\n"
        "simulate(schedule('1f1b', 8, 32)).makespan; print('numba' in sys.modules)"
    )
    assert python(code) == "False"


def test_without_numba_the_same_comes_out_more_slowly():
    """Not every machine has it; large schedules, many vectors and shared links included."""
    code = """
import sys
sys.modules['numba'] = None
from penstock.schedule.catalogue import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.entry import simulate
from penstock.simulate.sweep import simulate_many
made = schedule('1f1b', 16, 700)
costs = Costs(forward=1, backward=2, transfer=0.25)
print(simulate(made, costs).makespan, *simulate_many(made, [costs] * 2).makespan, simulate(made, Costs(links='shared')).makespan)
"""
    case_schedule, costs = schedule("1f1b", 16, 700), Costs(forward=1, backward=2, transfer=0.25)
    expected = simulate_schedule(case_schedule, costs).makespan
    assert (
        python(code)
        == f"{expected} {expected} {expected} {simulate_schedule(case_schedule, Costs(links='shared')).makespan}"
    )


def test_who_comes_back_often_gets_compiled_loops(monkeypatch):
    """A planner that simulates one schedule a thousand times should not pay the plain price a
    thousand times.
    """
    requests = []
    monkeypatch.setattr(engine, "_COMPILED", "not loaded yet")
    monkeypatch.setattr(engine, "load_compiled", lambda: requests.append(True))
    case_schedule = schedule("1f1b", 4, 8)
    ops = sum(map(len, case_schedule.programs))
    dependencies_of(case_schedule).effort = engine.WORTH_RETURNING - ops
    simulate_schedule(case_schedule, Costs())
    assert requests == []
    simulate_schedule(case_schedule, Costs())
    assert requests
