"""Newest: updates in place while micro-batches are in flight; with a flush, plain training."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from penstock.weights.catalogue import weight_rule


def test_gradients_are_those_of_old_activations_and_the_newest_weights(lab):
    """The chain rule written out with NumPy: inputs of relu and linear as the forward left them,
    weight matrices as they are now. This defines the rule `none`, and explains its convergence.
    """
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)
    ).double()
    line = lab.line_of("none", stage=0, stages=4, micro_batches=1, batches=10)
    weights = lab.make(lab.site_of(module, line, "none", lambda ps: torch.optim.SGD(ps, lr=0.1)))
    matrices = [value.numpy().copy() for value in lab.values_of(module)]
    activations, pending = {}, None
    wanted_losses = []
    for kind, number in line.ops:
        x, y = (tensor.numpy() for tensor in lab.vectors(number))
        w1, b1, w2, b2, w3, b3 = matrices
        if kind == "F":
            h1 = np.maximum(x @ w1.T + b1, 0)
            h2 = np.maximum(h1 @ w2.T + b2, 0)
            out = h2 @ w3.T + b3
            activations[number] = (h1, h2, out)
            wanted_losses.append(((out - y) ** 2).mean())
        elif kind == "B":
            h1, h2, out = activations.pop(number)
            d3 = 2 * (out - y) / out.size
            d2 = (d3 @ w3) * (h2 > 0)
            d1 = (d2 @ w2) * (h1 > 0)
            pending = [d1.T @ x, d1.sum(0), d2.T @ h1, d2.sum(0), d3.T @ h2, d3.sum(0)]
        else:
            matrices = [w - 0.1 * g for w, g in zip(matrices, pending, strict=True)]
    losses = lab.play(module, weights, line.ops, lab.vectors, lab.squares)
    assert np.allclose([loss.item() for loss in losses], wanted_losses, rtol=1e-12, atol=0)
    assert lab.close(lab.values_of(module), list(map(torch.from_numpy, matrices)))


@pytest.mark.parametrize(
    "factory",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=True),
        lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    ],
    ids=["sgd", "foreach", "fused"],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(144, 4),
        ),
        lambda: nn.Sequential(
            nn.Flatten(),
            nn.Unflatten(1, (16, 8)),
            nn.GRU(8, 4, batch_first=True),
            First(),
            nn.LayerNorm(4),
        ),
    ],
    ids=["convolutions", "recurrent"],
)
def test_a_graph_in_flight_finds_weights_as_a_change_in_place_under_plain_pytorch_leaves_them(
    lab, make, factory
):
    """Layers save the weight, a view of it, or a tensor computed from it: each reads the same
    values as in plain PyTorch.
    """
    torch.manual_seed(0)
    module = make()
    plain = copy.deepcopy(module)
    line = lab.line_of("none", stage=0, stages=3, micro_batches=2, batches=5)
    data = lambda n: (  # noqa: E731
        torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(n)),
        torch.ones(1),
    )
    weights = lab.make(lab.site_of(module, line, "none", factory))
    losses = lab.play(module, weights, line.ops, data, lab.squares)

    optimizer = factory(list(plain.parameters()))
    graphs, expected = {}, []
    for kind, number in line.ops:
        if kind == "F":
            inputs, targets = data(number)
            graphs[number] = lab.squares(plain(inputs), targets)
            expected.append(graphs[number].detach())
        elif kind == "B":
            graphs.pop(number).backward()
        else:  # a step on other tensors, and `.data.copy_`, which autograd does not see
            stepped = copy.deepcopy(plain)
            for parameter, stepped_parameter in zip(
                plain.parameters(), stepped.parameters(), strict=True
            ):
                stepped_parameter.grad, parameter.grad = parameter.grad, None
            twin = factory(list(stepped.parameters()))
            twin.load_state_dict(optimizer.state_dict())
            twin.step()
            optimizer.load_state_dict(twin.state_dict())
            for parameter, stepped_parameter in zip(
                plain.parameters(), stepped.parameters(), strict=True
            ):
                parameter.data.copy_(stepped_parameter.data)
    assert all(map(torch.equal, losses, expected))
    assert all(map(torch.equal, module.parameters(), plain.parameters()))


class First(nn.Module):
    """Return the outputs of a recurrent layer without its state."""

    def forward(self, both):
        return both[0]


def test_there_is_one_version_and_no_copy(lab):
    """The memory is that of the paper's baseline: the weights."""
    module = lab.mlp()
    line = lab.line_of("none", stage=0, stages=4, micro_batches=1, batches=6)
    weights = lab.make(lab.site_of(module, line, "none", lab.PAIRS["adam"][0]))
    before = [parameter.data_ptr() for parameter in module.parameters()]
    lab.play(module, weights, line.ops, lab.vectors, lab.squares)
    weights.drain()
    assert (weights.versions, weights.peak_versions) == (1, 1)
    assert weights.held_bytes() == sum(parameter.nbytes for parameter in module.parameters())
    assert [parameter.data_ptr() for parameter in module.parameters()] == before
    assert (weights.state(), weights.facts()) == ({}, {})


def test_with_a_flush_gradients_can_be_looked_at_until_the_next_batch_begins(lab):
    """As in plain training, users read norms and logs between batches."""
    module = lab.mlp()
    line = lab.line_of("none", stage=0, stages=1, micro_batches=2, batches=2)
    site = lab.site_of(module, line, "flush", lab.PAIRS["momentum"][0], rule=weight_rule("flush"))
    weights = lab.make(site)
    plain = copy.deepcopy(module)
    optimizer = lab.PAIRS["momentum"][0](list(plain.parameters()))
    for batch in range(2):
        site.update.begin()
        for number in (2 * batch, 2 * batch + 1):
            weights.before_forward(number)
            loss = lab.squares(module(lab.vectors(number)[0]), lab.vectors(number)[1])
            weights.before_backward(number)
            loss.backward()
            weights.finished(number)
        weights.update(batch + 1)
        optimizer.zero_grad()
        for number in (2 * batch, 2 * batch + 1):
            lab.squares(plain(lab.vectors(number)[0]), lab.vectors(number)[1]).backward()
        optimizer.step()
        assert all(map(torch.equal, lab.grads_of(module), lab.grads_of(plain)))
        assert all(map(torch.equal, module.parameters(), plain.parameters()))


def test_with_a_flush_a_graph_that_outlives_its_update_is_still_refused_by_autograd(lab):
    """No micro-batch of a synchronous batch is in flight then, so PyTorch's own check stays on."""
    module = lab.mlp()
    line = lab.line_of("none", stage=0, stages=1, micro_batches=1, batches=2)
    weights = lab.make(
        lab.site_of(module, line, "flush", lab.PAIRS["sgd"][0], rule=weight_rule("flush"))
    )
    graph = lab.squares(module(lab.vectors(0)[0]), lab.vectors(0)[1])
    graph.backward(retain_graph=True)
    weights.update(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward()
