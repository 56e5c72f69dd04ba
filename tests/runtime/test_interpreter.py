"""The interpreter of programs, where a whole pipeline would not show a mistake."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import StageFailed
from penstock.runtime.interpreter import Interpreter, RunContext
from penstock.schedule.op import Op
from penstock.transport.in_process import MemoryTransport


class FailsOnce(nn.Module):
    """A layer that raises for negative input."""

    def forward(self, x):
        """Return the input."""
        if bool((x < 0).any()):
            raise ValueError("negative")
        return x


def test_a_failed_batch_leaves_no_values_behind():
    """Two stages of a rank pass values to each other: they would stay in memory, and could be
    taken for those of the next batch.
    """
    pipe = ps.Pipeline(
        nn.Sequential(nn.Identity(), FailsOnce(), nn.Linear(4, 4), nn.Linear(4, 4)),
        balance=(1, 1, 1, 1),
        schedule=ps.Schedule.parse(
            "0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1 1U1 0U1\n2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1 3U1 2U1"
        ),
        loss=nn.functional.mse_loss,
        executor="threads",
        device="cpu",
    )
    good, bad = torch.ones(4, 4), torch.tensor([[-1.0], [1.0], [1.0], [1.0]]).expand(4, 4)
    expected = float(pipe.eval_batch(good, good))
    with pytest.raises(StageFailed, match="negative"):
        pipe.train_batch(bad, bad)
    for interpreter in pipe._assembly.interpreters.values():
        assert not interpreter._values
        assert not interpreter._arrivals
    assert float(pipe.eval_batch(good, good)) == expected


def test_a_failure_names_the_step_in_which_it_happened():
    """So that the batch can be found among those of an epoch."""
    pipe = ps.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), FailsOnce()),
        balance=(1, 2),
        schedule="1f1b",
        micro_batches=2,
        loss=nn.functional.mse_loss,
        executor="threads",
        device="cpu",
    )
    x = torch.ones(4, 4)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.fill_(0.1)
    for _ in range(2):
        pipe.train_batch(x, x)
    with pytest.raises(StageFailed, match="negative") as failure:
        pipe.train_batch(-10 * x, x)
    assert failure.value.step == 2


def test_a_program_ends_when_its_messages_have_left(monkeypatch):
    """The buffers of a send may be changed only then; over gloo it may still be under way."""
    drained = []
    monkeypatch.setattr(MemoryTransport, "drain", lambda self: drained.append(self.rank))
    pipe = ps.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        balance=(1, 1),
        schedule="gpipe",
        micro_batches=2,
        loss=nn.functional.mse_loss,
        executor="threads",
        device="cpu",
    )
    x = torch.ones(4, 4)
    drained.clear()
    pipe.train_batch(x, x)
    assert set(drained) == {0, 1}


def test_a_cached_program_is_not_used_for_another_one_at_the_same_address():
    """Python gives the id of a freed program to a new one, which must run its own steps."""
    torch.manual_seed(0)
    pipe = ps.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        balance=(1, 1),
        schedule="gpipe",
        micro_batches=2,
        loss=nn.functional.mse_loss,
        executor="threads",
        device="cpu",
    )
    x = torch.randn(4, 4)
    expected = float(pipe.eval_batch(x, x))
    for interpreter in pipe._assembly.interpreters.values():
        assert interpreter._programs
        for key in interpreter._programs:
            interpreter._programs[key] = (), ()
    assert float(pipe.eval_batch(x, x)) == expected


class RecordedWeights:
    """A weight rule that records what it is told."""

    def __init__(self) -> None:
        self.calls = []

    def before_backward(self, number):
        """Note that a backward begins."""
        self.calls.append(("before", number))

    def finished(self, number):
        """Note that a micro-batch reads no version any more."""
        self.calls.append(("finished", number))


def test_a_weight_version_is_in_use_until_b_or_w_and_not_only_until_i():
    """W reads the graph of the forward: its version must not be stepped in place before."""
    weights = RecordedWeights()
    stage = SimpleNamespace(**{name: lambda *_: None for name in ("input_grad", "weight_grad")})
    rank = SimpleNamespace(stages={0: stage}, finite=None)
    context = RunContext(None, weights={0: weights})
    for text in ("0I3", "0W3"):
        Interpreter._compute(rank, Op.parse(text), (None, 3), None, context)
    assert weights.calls == [("before", 3), ("before", 3), ("finished", 3)]
