"""A trace and a backward in one process, where torch is built for CUDA and no card is visible."""

from __future__ import annotations

import threading

import pytest
import torch

from penstock.ranks.processes.launch import launch
from penstock.tracing.fake_device_guard import keep_fake_device_guard


def trace_and_train(in_thread):
    """Trace a model, in a thread that ends or in this one, and train it; threads in between reuse the
    memory of the first.
    """
    import threading

    import torch

    import penstock as ps

    class Residual(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            return torch.relu(self.linear(x)) + x

    def trace():
        ps.chain(Residual(), (torch.randn(2, 4),))

    def compute():
        torch.ones(100_000).sum()

    for work in (trace, compute, compute, compute, compute):
        if work is compute or in_thread:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        else:
            work()
    Residual()(torch.randn(2, 4)).sum().backward()
    return "trained"


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_backward_after_a_trace_does_not_end_the_process(in_thread):
    """torch keeps what belonged to the thread of the first trace: with torch 2.11.0+cu130 and no
    card, the first backward was a segmentation fault. No trace came before in the process of a rank.
    """
    assert launch(trace_and_train, 1, in_thread, threads=1) == ["trained"]


@pytest.fixture
def registrations(monkeypatch):
    """The threads that register a guard, on a torch that is built for CUDA, without a card."""
    threads = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        torch._C,
        "_ensureCUDADeviceGuardSet",
        lambda: threads.append(threading.current_thread()),
        raising=False,
    )
    keep_fake_device_guard.cache_clear()
    yield threads
    keep_fake_device_guard.cache_clear()


def test_the_guard_belongs_to_a_thread_that_does_not_end(registrations):
    """Whichever thread traces first; and it is registered once."""
    caller = threading.Thread(target=keep_fake_device_guard)
    caller.start()
    caller.join()
    keep_fake_device_guard()
    (owner,) = registrations
    assert owner is not caller
    assert owner.is_alive()
    assert owner.daemon


def test_the_main_thread_registers_it_itself(registrations):
    """It lasts as long as the process; a further thread would only disturb forks."""
    keep_fake_device_guard()
    assert registrations == [threading.main_thread()]


def test_nothing_is_registered_where_there_is_a_card(registrations, monkeypatch):
    """torch uses the real guard there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    keep_fake_device_guard()
    assert registrations == []
