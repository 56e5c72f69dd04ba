"""When kernels run compiled and when in plain Python, and that both give the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock import compiled


def in_new_process(code: str, **environment: str) -> str:
    """What a fresh process prints."""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def double(numbers, output):
    """A kernel that also works on lists."""
    for index in range(len(numbers)):
        output[index] = 2 * numbers[index]
    return len(numbers)


def kind_of_input(numbers):
    """Not a kernel: it says what it was called with."""
    return type(numbers)


@pytest.fixture
def no_calls_yet(monkeypatch):
    """The state of a new process."""
    monkeypatch.setattr(compiled, "_dispatchers", {})
    monkeypatch.setattr(compiled, "_plain_work", type(compiled._plain_work)())


@pytest.mark.usefixtures("no_calls_yet")
@pytest.mark.parametrize(("work", "on_lists"), [(0, False), (0, True), (1e9, False), (1e9, True)])
def test_a_kernel_returns_and_writes_the_same_in_every_way(work, on_lists):
    """The compiled one is a copy of the plain one, not another algorithm."""
    output = np.zeros(5)
    assert compiled.run(double, work, np.arange(5.0), output, on_lists=on_lists) == 5
    assert (double in compiled._dispatchers) == (work > 0)
    np.testing.assert_array_equal(output, 2 * np.arange(5.0))


@pytest.mark.usefixtures("no_calls_yet")
def test_plain_python_reads_lists_only_if_the_kernel_allows_it():
    """Kernels that index two axes at a time need arrays."""
    assert compiled.run(kind_of_input, 1, np.arange(3)) is np.ndarray
    with pytest.raises(TypeError):  # its argument, a list, is also its output
        compiled.run(lambda numbers: numbers + 1, 1, np.arange(3), on_lists=True)


@pytest.mark.usefixtures("no_calls_yet")
def test_short_calls_are_compiled_once_there_were_many_of_them(monkeypatch):
    """A planner that runs one loop a thousand times must not pay the plain price a thousand
    times; one that announces it does not pay it once.
    """
    monkeypatch.setitem(sys.modules, "numba", sys.modules.get("numba", object()))
    few = compiled.WORTH_COMPILING // 4
    assert not compiled.is_worth_compiling(double, few)
    assert compiled.is_worth_compiling(double, few, calls=4)
    for _ in range(3):
        assert not compiled.is_worth_compiling(double, few)
        compiled.run(double, few, np.arange(2.0), np.zeros(2))
    assert compiled.is_worth_compiling(double, few)


@pytest.mark.usefixtures("no_calls_yet")
def test_before_numba_is_loaded_the_work_of_all_kernels_counts(monkeypatch):
    """Loading it takes as long as half a million iterations, whichever loops they are of."""
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    assert not compiled.is_worth_compiling(double, compiled.WORTH_LOADING - 1)
    compiled._plain_work[kind_of_input] += 1
    assert compiled.is_worth_compiling(double, compiled.WORTH_LOADING - 1)


def test_small_models_do_not_load_numba():
    """The command line answers at once: Numba takes as long to load as everything else together."""
    code = (
        "import sys\n"
        "from penstock.partition.catalogue import PARTITIONERS\n"
        "from penstock.partition.limited import limited\n"
        "from penstock.partition.looped import folded, looped\n"
        "from penstock.schedule.catalogue import schedule\n"
        "from penstock.simulate.entry import simulate\n"
        "PARTITIONERS.entries(); folded([1] * 12, 3); looped([1] * 12, 3, 2)\n"
        "limited([1] * 12, None, [1] * 12, [1] * 12, [1] * 3, [9] * 3)\n"
        "simulate(schedule('1f1b', 8, 32)).makespan\n"
        "print('numba' in sys.modules)"
    )
    assert in_new_process(code) == "False"


def test_kernels_of_the_searches_give_the_same_bits_without_numba():
    """They are compiled always; NUMBA_DISABLE_JIT makes plain Python of them, the inner ones too."""
    code = """
import hashlib
import numpy as np
from tests.synthesis.requests import problem_of
from penstock.schedule.catalogue import schedule
from penstock.search.cut_search.dapple_kernel import StepNumbers, extend
from penstock.simulate.costs import Costs
from penstock.synthesis.anneal import AnnealSettings, anneal
from penstock.synthesis.arrays import empty_encoding, make_workspace
from penstock.synthesis.encoding import encode, route_counts
from penstock.synthesis.list_schedule import list_schedule
from penstock.synthesis.problem import Constraints
from penstock.synthesis.rules import Shape, standard_rules, unsplit_masks

results = []
costs = Costs(forward=(3.0, 1.0, 4.0), input_grad=(5.0, 2.0, 2.0), weight_grad=(1.0, 2.5, 3.0),
              transfer=(1.5, 0.7), transfer_back=(0.1, 1.0))
problem = problem_of(costs, 4, Constraints("linear", 2))
known = schedule("1f1b", 3, 4)
spec = problem.spec(route_counts(problem, known))
work = make_workspace(spec)
rules = list(standard_rules(spec, Shape.of(spec), unsplit_masks(spec, split=True)))
for rule in rules[::40]:
    encoding = empty_encoding(spec)
    results += [float(list_schedule(spec, rule, encoding, work)), encoding.codes.tolist()]
for seed in range(3):
    encoding = encode(problem, spec, known)
    settings = AnnealSettings(np.array([300]), np.array([2.0, 0.1]), np.array([0.0]),
                              np.array([seed]), np.array([1]))
    results += [float(anneal(spec, encoding, work, settings)), encoding.codes.tolist()]
rng = np.random.default_rng(0)
for layers in (3, 5, 9):
    sums = np.concatenate([np.zeros((7, 1)), np.cumsum(rng.random((7, layers)), axis=1)], axis=1)
    table = np.full((4, layers + 1), np.inf), np.zeros((2, 4, layers + 1))
    numbers = StepNumbers(4.0, (0.1, 0.2), (0.3, 0.1), (0.1, 0.1), 2, 1, 1e9, 0)
    rows = np.zeros((3, 4))
    best, where = extend(rows, 0, 0, sums, numbers.array(), table)
    results += [float(best), int(where), *(array.tolist() for array in table)]
print(hashlib.sha256(repr(results).encode()).hexdigest())
"""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, sys.path)])
    plain = in_new_process(code, NUMBA_DISABLE_JIT="1", PYTHONPATH=path)
    assert plain == in_new_process(code, PYTHONPATH=path)
