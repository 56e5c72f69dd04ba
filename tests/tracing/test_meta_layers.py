"""Copies on the meta device of layers that other ranks hold."""

from __future__ import annotations

import weakref

import torch
from torch import nn

import penstock as ps
from penstock.tracing.meta_layers import without_others


class Scaled(nn.Module):
    """A layer with a weight, a non-persistent buffer, and no reset_parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))
        self.register_buffer("factor", torch.full((4,), 3.0), persistent=False)

    def forward(self, x):
        """Use both."""
        return x * self.weight * self.factor


def model():
    """Return layers of which the last shares the first one's weight."""
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return nn.Sequential(first, nn.Linear(4, 4), Scaled(), nn.BatchNorm1d(4), last)


def test_parameters_of_others_take_no_memory_and_all_else_stays():
    """Shapes, names, buffers and tensors shared with a held layer stay."""
    net = model()
    reduced = without_others(ps.chain(net), {0})
    assert reduced.modules[0] is net[0]
    assert reduced.modules[1].weight.is_meta
    assert reduced.modules[1].weight.shape == (4, 4)
    assert reduced.modules[2].factor is net[2].factor
    assert reduced.modules[4].weight is net[0].weight
    assert reduced.modules[4].bias.is_meta
    assert not net[1].weight.is_meta, "the user's own model is whole"
    assert list(nn.ModuleList(reduced.modules).state_dict()) == list(
        nn.ModuleList(list(net)).state_dict()
    )


def test_a_rank_without_references_to_the_model_holds_only_its_layers():
    """The memory of the other layers must be freed."""
    net = model()
    others = [weakref.ref(net[index].weight) for index in (1, 2)]
    chain = without_others(ps.chain(net), {0})
    del net
    assert [ref() for ref in others] == [None, None]
    assert len(chain) == 5


def job():
    """Run the comparison with one device, and report which of the other rank's layers are alive."""
    net = model()
    refs = [weakref.ref(parameter) for parameter in (net[1].weight, net[2].weight)]
    pipe = ps.Pipeline(
        net, balance=[2, 3], schedule="1f1b", micro_batches=2, loss=nn.functional.mse_loss
    )
    del net
    comparison = pipe.compare_with_one_device(
        torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(6, 4)
    )
    pipe.train_batch(torch.ones(6, 4), torch.zeros(6, 4))
    return (
        [ref() is not None for ref in refs],
        comparison.worst[1] if comparison.gradients else 0.0,
        sorted(pipe.state_dict()),
    )


def test_ranks_free_the_layers_of_other_ranks_and_the_self_check_still_works():
    """Also for layers without reset_parameters and with non-persistent buffers."""
    (first, worst, names), (second, _, _) = ps.launch(job, 2, threads=1)
    assert (first, second) == ([True, False], [False, True])
    assert worst < 1e-6
    assert names == sorted(model().state_dict())
