"""Whether a forward is a recomputation, in whichever thread it runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.modules.recomputing import is_recomputing, recomputing


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


def test_the_mark_lasts_as_long_as_its_block():
    """Later forwards are first ones again."""
    with recomputing():
        assert is_recomputing()
    assert not is_recomputing()
