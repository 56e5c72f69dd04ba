"""One partition of a `Pipe`: the second forward of recomputed micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.modules.recomputing import is_checkpointing, is_recomputing
from penstock.pipe.pipe import Pipe


def test_a_weight_changed_before_the_recompute_is_refused():
    """The recompute would see other weights than the forward, and the gradient would be of neither."""
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4)), [1], chunks=2, checkpoint="always")
    loss = pipe(torch.randn(7, 4)).sum()
    with torch.no_grad():
        pipe[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="a parameter has been changed in place"):
        loss.backward()
    pipe(torch.randn(7, 4)).sum().backward()


def test_the_recompute_is_in_the_mode_of_the_forward_and_sees_its_buffers():
    """`eval()` before `backward()` must not change what was computed, nor batch norm count twice."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    plain.load_state_dict(model.state_dict())
    pipe, x = Pipe(model, [2, 1], devices=2, chunks=2, checkpoint="always"), torch.randn(6, 4)
    loss = pipe(x).square().sum()
    pipe.eval()
    loss.backward()
    assert not any(part.training for part in pipe.modules())
    torch.cat([plain(part) for part in x.chunk(2)]).square().sum().backward()
    torch.testing.assert_close(
        [p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()]
    )
    torch.testing.assert_close(pipe.sequential_state_dict(), plain.state_dict())


class Telling(nn.Module):
    """Notes in which pass it is."""

    def __init__(self, notes: list[tuple[bool, bool]]) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, x):
        """Note it."""
        self.notes.append((is_checkpointing(), is_recomputing()))
        return x * 1


def test_layers_can_tell_a_first_pass_from_a_second():
    """Effects besides the output are to be had once."""
    notes: list[tuple[bool, bool]] = []
    pipe = Pipe(nn.Sequential(Telling(notes)), [1], devices=1, chunks=2)
    pipe(torch.rand(2, requires_grad=True)).sum().backward()
    assert notes == [(True, False), (False, False), (False, True)]


def test_layers_that_recompute_by_themselves_do_so_inside():
    """`torch.utils.checkpoint` runs a forward from a backward that runs in ours."""
    notes: list[tuple[bool, bool]] = []

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Telling(notes), nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model = nn.Sequential(Again(), nn.Linear(4, 2))
    x = torch.randn(6, 4)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    notes.clear()
    pipe = Pipe(model, [1, 1], devices=2, chunks=2, checkpoint="never")
    grads = torch.autograd.grad(pipe(x).square().sum(), list(pipe.parameters()))
    torch.testing.assert_close(grads, expected)
    assert notes == [(False, False)] * 2 + [(False, True)] * 2
