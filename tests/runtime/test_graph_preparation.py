"""Graphs of traced models are built before a batch begins, on all ranks, and not in the middle of
it.
"""

from __future__ import annotations

import sys

import pytest
import torch
from tests.runtime.preparing import Small, anneal, made, plain_losses
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import ChainError
from penstock.ranks.processes.launch import launch
from penstock.ranks.status_board import SharedBoard
from penstock.tracing import variants


def playing():
    """Whether this thread is inside a batch's program."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "play":
            return True
        frame = frame.f_back
    return False


def test_a_new_form_is_traced_before_the_batch_and_the_status_says_so(monkeypatch):
    """A last batch of odd size has micro-batches of one sample, which need another graph."""
    places, notes = [], []
    original, doing = variants.capture, SharedBoard.for_rank

    def capture(*args, **options):
        places.append(playing())
        return original(*args, **options)

    pipe = made(Small(), torch.randn(4, 4))
    monkeypatch.setattr(variants, "capture", capture)

    def for_rank(self, rank):
        board = doing(self, rank)
        plain = board.doing
        board.doing = lambda what: (notes.append(what), plain(what))[1]
        return board

    monkeypatch.setattr(SharedBoard, "for_rank", for_rank)
    for samples in (4, 2, 3, 2):
        pipe.train_batch(torch.randn(samples, 4), torch.randint(0, 3, (samples,)))
    assert places == [False]
    assert notes.count("traces the model for inputs of (1, 4)") == 2


def test_a_form_whose_layers_differ_is_refused_before_any_op_runs():
    """In the middle of a step the other ranks would wait for a message that is never sent."""
    pipe = made(Small(), torch.randn(4, 4))
    with pytest.raises(ChainError, match=r"fails on these inputs, also without a trace"):
        pipe.train_batch(torch.randn(4, 5), torch.randint(0, 3, (4,)))
    pipe.train_batch(torch.randn(4, 4), torch.randint(0, 3, (4,)))


def test_processes_trace_at_construction_and_go_by_the_users_model():
    """A chain is sent without its graphs; model and chain that are sent together stay connected."""
    torch.manual_seed(0)
    model = Small()
    expected = plain_losses(model)
    for result in launch(anneal, 2, model, made.chain_of(model)):
        torch.testing.assert_close(result["losses"], expected)
        assert result["known"]
        # The example's form at construction, then one sample, then the other temperature.
        assert result["inside"] == [False] * 3


def test_a_layer_that_is_replaced_later_is_refused():
    """The stages hold the layers that the model had; the new one would stay as it is."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 2)))
    pipe = ps.Pipeline(
        model,
        loss=functional.mse_loss,
        optimizer=torch.optim.Adam,
        balance=[1, 2],
        micro_batches=2,
        executor="threads",
    )
    x, y = torch.ones(4, 3), torch.ones(4, 2)
    pipe.train_batch(x, y)
    head, model[1][1] = model[1][1], nn.Linear(3, 2)
    with pytest.raises(ChainError, match="the layers of Sequential are others than when it was"):
        pipe.train_batch(x, y)
    model[1][1] = head
    pipe.train_batch(x, y)
