"""Whether a forward is a recomputation, in whichever thread it runs."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.modules.recomputing import (
    checkpointing,
    is_checkpointing,
    is_recomputing,
    recomputing,
)


class Witness(nn.Linear):
    """Notes for each forward whether it is a recomputation."""

    def __init__(self):
        super().__init__(2, 2)
        self.seen = []

    def forward(self, x):
        """Note it."""
        self.seen.append(is_recomputing())
        return super().forward(x).tanh()


def loss_of(layer):
    """The loss of a checkpointed layer."""
    return checkpoint(layer, torch.ones(1, 2), use_reentrant=False).sum()


def test_the_second_forward_of_a_users_checkpoint_is_a_recomputation():
    """A counter in the layer must not count the micro-batch twice."""
    layer = Witness()
    loss_of(layer).backward()
    assert layer.seen == [False, True]
    assert not is_recomputing()


def test_it_is_one_in_a_thread_where_nothing_has_been_set():
    """On several GPUs the backward that a Pipe calls in the thread of one GPU runs in that of
    another.
    """
    layer = Witness()
    loss = loss_of(layer)
    with ThreadPoolExecutor(1) as pool, recomputing():
        pool.submit(loss.backward).result()
    assert layer.seen == [False, True]


MARKS = [(checkpointing, is_checkpointing), (recomputing, is_recomputing)]


@pytest.mark.parametrize(("block", "is_marked"), MARKS, ids=["checkpointing", "recomputing"])
def test_a_mark_lasts_as_long_as_its_outermost_block(block, is_marked):
    """A layer that recomputes by itself may be inside one that does; also if it fails."""
    assert not is_marked()
    with block():
        assert is_marked()
        with contextlib.suppress(KeyError), block():
            raise KeyError
        assert is_marked()
    assert not is_marked()


def test_the_two_marks_are_independent():
    """A second forward saves what the first one did not, so a layer must tell them apart."""
    with checkpointing():
        assert (is_checkpointing(), is_recomputing()) == (True, False)
        with recomputing():
            assert (is_checkpointing(), is_recomputing()) == (True, True)
    with recomputing():
        assert (is_checkpointing(), is_recomputing()) == (False, True)


def test_marks_are_those_of_a_thread():
    """Another rank of the process may be in a first forward meanwhile."""
    with ThreadPoolExecutor(1) as pool, checkpointing(), recomputing():
        assert pool.submit(lambda: (is_checkpointing(), is_recomputing())).result() == (False,) * 2
