"""The choice between one thread and one per partition of a `Pipe`, and threads inside ops."""

from __future__ import annotations

import torch
from tests.pipe.layers import forced_from_the_start
from torch import nn

from penstock.pipe.pipe import Pipe
from penstock.pipe.pipe_threads import MIN_THREADED_OP_S, ThreadChoice


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
    finally:
        torch.set_num_threads(caller_threads)
    assert thread_counts == [4, 4, 4, 4, 2, 2]
