"""Models, pipelines and steps of plain PyTorch with which they are compared."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import penstock as ps

SCHEDULES = ["gpipe", "1f1b", "chimera", "zb-h1", "interleaved"]


def model(tied=False, seed=0):
    """Four linear maps in double precision; with `tied` two of them share a weight."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = nn.Sequential(
            *(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()),
            *(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), nn.Identity()),
        ).double()
    if tied:
        network[4].weight = network[2].weight
    return network


def batch(number=0, samples=8):
    """Return inputs and labels."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (samples,), generator=generator)


def sgd(params):
    """SGD with momentum and weight decay."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.05)


def adamw(params):
    """AdamW with weight decay."""
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def pipeline(network, **options):
    """A pipeline whose ranks are threads."""
    options = {
        "loss": functional.cross_entropy,
        "optimizer": sgd,
        "balance": [2, 2, 2, 2],
        "micro_batches": 4,
        **options,
    }
    return ps.Pipeline(network, executor="threads", **options)


def plain_step(
    network, optimizer, number, loss=functional.cross_entropy, clip=lambda parameters: None
):
    """Run one step on the undivided batch."""
    x, y = batch(number)
    optimizer.zero_grad()
    loss(network(x), y).backward()
    clip(list(network.parameters()))
    optimizer.step()


def furthest(network, other):
    """Return the largest relative difference of two models' weights."""
    pairs = zip(network.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def same_state(actual, expected):
    """Check that two optimizer states are the same."""
    assert actual["param_groups"] == expected["param_groups"]
    assert actual["state"].keys() == expected["state"].keys()
    for key, values in expected["state"].items():
        assert actual["state"][key].keys() == values.keys()
        for name, value in values.items():
            ours = actual["state"][key][name]
            if isinstance(value, torch.Tensor):
                assert ours.dtype == value.dtype or not value.dim()
                # torch casts a count to the parameter's dtype when it loads it
                assert torch.allclose(
                    ours.double(),
                    value.double(),
                    rtol=1e-6 if not value.dim() else 1e-9,
                    atol=1e-13,
                ), (key, name)
            else:
                assert ours == value


def no_decay(name, parameter):
    """Return two parameter groups."""
    return {"weight_decay": 0.0, "lr": 0.02} if parameter.dim() == 1 else {}


def grouped(network):
    """Return the same groups for plain PyTorch, in order of appearance."""
    rows = (
        [p for p in network.parameters() if p.dim() > 1],
        [p for p in network.parameters() if p.dim() == 1],
    )
    return [{"params": rows[0]}, {"params": rows[1], "weight_decay": 0.0, "lr": 0.02}]
