"""The choice between one thread and one per partition of a `Pipe`, and threads inside ops."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue

import pytest
import torch
from tests.pipe.layers import forced_from_the_start
from tests.time_limits import HANG_S
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.pipe import pipe_threads
from penstock.pipe.pipe import Pipe
from penstock.pipe.pipe_threads import (
    MIN_THREADED_OP_S,
    PartitionThreads,
    ThreadChoice,
    has_thread_local_state,
)


def test_threads_are_used_where_ops_are_long_and_not_where_they_are_short():
    """Below some hundred microseconds, two threads only pass the interpreter back and forth."""
    choice = ThreadChoice()
    choice._cores = 2
    assert choice.use_threads()
    choice.seconds_per_op = 2 * MIN_THREADED_OP_S
    assert choice.use_threads()
    choice.seconds_per_op = MIN_THREADED_OP_S / 2
    assert not choice.use_threads()
    choice.seconds_per_op, choice._cores = 2 * MIN_THREADED_OP_S, 1
    assert not choice.use_threads()


def test_threads_inside_an_op_are_shared_and_the_callers_number_stays():
    """Two partitions that each use all cores inside their ops would fight for them; those of an
    observed forward (1, 2, 4, 8 and so on) hold a lock in turn.
    """
    thread_counts: list[int] = []

    class Asking(nn.Module):
        def forward(self, x):
            thread_counts.append(torch.get_num_threads())
            return x

    pipe = Pipe(nn.Sequential(Asking(), Asking()), [1, 1], devices=2)
    caller_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        forced_from_the_start(pipe)
        for _ in range(3):
            pipe(torch.rand(2))
            assert torch.get_num_threads() == 4
            with ThreadPoolExecutor(1) as new:
                assert new.submit(torch.get_num_threads).result() == 4
    finally:
        torch.set_num_threads(caller_threads)
    assert thread_counts == [4, 4, 4, 4, 2, 2]


def test_jobs_have_a_thread_each_and_the_inference_mode_of_the_caller():
    """The threads stay from call to call: a layer may keep something in them."""
    threads = PartitionThreads()
    together = threading.Barrier(3)
    rows = []

    def run(count):
        names = {}

        def job(number):
            if count == 3:
                together.wait(HANG_S)
            names[number] = threading.current_thread().name, torch.is_inference_mode_enabled()

        threads.run([partial(job, number) for number in range(count)], stop=rows.append)
        return names

    names = [f"penstock-pipe-{number}" for number in range(3)]
    assert run(3) == {number: (name, False) for number, name in enumerate(names)}
    with torch.inference_mode():
        assert run(2) == {number: (name, True) for number, name in enumerate(names[:2])}
    assert run(1) == {0: (names[0], False)}
    assert rows == []


def test_an_interrupted_wait_stops_the_jobs_and_goes_on_until_all_have_ended(monkeypatch):
    """Otherwise a job of this batch would run into the next one."""
    stopped, caller, interrupts = threading.Event(), threading.get_ident(), [KeyboardInterrupt()]
    ended, errors, waits = [], [], []

    class Interrupted(SimpleQueue):
        def get(self):
            if threading.get_ident() == caller:
                waits.append(len(interrupts))
                if interrupts:
                    raise interrupts.pop()
            return super().get()

    def job(number):
        stopped.wait(HANG_S)
        ended.append(number)

    def stop(error):
        errors.append(type(error))
        stopped.set()

    monkeypatch.setattr(pipe_threads, "SimpleQueue", Interrupted)
    PartitionThreads().run([partial(job, number) for number in range(3)], stop)
    assert sorted(ended) == [0, 1, 2]
    assert errors == [KeyboardInterrupt]
    assert waits == [1, 0, 0, 0]  # the one that was interrupted, and one for each job


@pytest.mark.parametrize("stack", ["function", "dispatch", "hooks"])
def test_modes_and_hooks_of_the_callers_thread_are_noticed(stack):
    """Other threads cannot be given them."""
    modes = {
        "function": TorchFunctionMode,
        "dispatch": TorchDispatchMode,
        "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    }
    assert not has_thread_local_state()
    with modes[stack]():
        assert has_thread_local_state()
    assert not has_thread_local_state()


def test_the_first_three_half_steps_and_every_eighth_are_timed():
    """To read the CPU time of a thread costs more than a short op."""
    choice = ThreadChoice()
    assert [number for number in range(1, 25) if choice.is_due()] == [1, 2, 3, 8, 16, 24]
    for forced in (True, False):
        choice.forced = forced
        assert choice.use_threads() is forced
