"""Every test computes on one thread, and local ranks have a core each.

Small models gain nothing from more threads, and sums are split by threads, which changes last bits.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Iterator

import cloudpickle
import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from penstock.cluster import local

# Property tests take the same examples in every run, so that a failure repeats and a change is not
# blocked by a rare example of another part. `make fuzz` draws new ones. Examples have no time limit:
# Hypothesis's 200 ms is over whenever the machine is busy.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("random", derandomize=False, deadline=None)
settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    """Collect no garbage while tests are collected, and keep Hypothesis from drawing constants of the
    modules that happen to be imported.

    Which modules these are depends on the tests that the process has run before, so examples would
    differ from run to run, derandomised or not. There is no public setting for it.
    """
    if config.getoption("numprocesses", None) is None:
        # In the processes that collect, until all tests are collected: a collection of garbage would
        # walk again and again through the modules that are imported meanwhile.
        gc.disable()
    is_fixed = config.getoption("--hypothesis-profile", None) in (None, "fixed")
    if is_fixed and hasattr(providers, "_get_local_constants"):
        no_constants = providers.Constants()
        providers._get_local_constants = lambda: no_constants


# A shell that starts a job in the background has it ignore SIGINT, and so would all programs that
# the tests start and interrupt.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def cores_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `ps.cluster(4)` be four ranks that do not share cores, whatever the machine: the plans
    that tests expect are the same everywhere.
    """
    monkeypatch.setattr(local, "available_cores", lambda: 1024)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread, whatever the machine; a test that has no torch loads none for it."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def functions_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Send the functions of a test module to ranks by value: by name, each rank would import pytest
    with the module.
    """
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


def pytest_collection_finish() -> None:
    """Exclude what was imported and collected from garbage collections, which else walk through
    millions of objects again and again; the garbage among it too, as to look for it takes seconds.
    Collect a tenth as often as by default: what tests import later is walked through too, in which 7
    to 12 % of the time of all tests was spent.
    """
    gc.enable()
    gc.freeze()
    gc.set_threshold(7000, 10, 10)
