"""Copies of the whole model on one device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.modules.state_names import state_of
from penstock.runtime.comparison.reference_model import reference_model

CPU = torch.device("cpu")


def layers(*, device=None):
    """Return layers with a tied and a frozen weight, a buffer, and a hook."""
    result = [nn.Linear(3, 3, device=device) for _ in range(3)]
    result[2].weight = result[0].weight
    result[1].bias.requires_grad_(False)
    result.insert(1, nn.BatchNorm1d(3, device=device))
    result.append(nn.Sequential(nn.Conv2d(2, 2, 1, device=device)))
    return result


def reference(modules, *, layout=None):
    """Return a copy of the model with other values, and these."""
    chain = ps.chain(nn.Sequential(*modules))
    values = {
        name: torch.randn(tensor.shape) if tensor.is_floating_point() else torch.tensor(9)
        for layer, module in zip(chain.layers, chain.modules, strict=True)
        for name, tensor in state_of(layer.name, module).items()
    }
    if "3.weight" in values:
        values["3.weight"] = values["0.weight"]
    training = SimpleNamespace(options=SimpleNamespace(memory_format=layout))
    placed = SimpleNamespace(traced=chain)
    return chain, reference_model(placed, values, training, CPU), values


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_copy_has_the_given_values_and_nothing_in_common_with_the_model(device):
    """Tied weights stay tied, frozen ones frozen, and gradients are not copied."""
    modules = layers(device=device)
    modules[2].weight.grad = torch.ones_like(modules[2].weight)
    chain, copies, values = reference(modules)
    for layer, module in zip(chain.layers, copies, strict=True):
        for name, tensor in state_of(layer.name, module).items():
            assert torch.equal(tensor, values[name]), name
            assert not tensor.is_meta
    assert copies[0].weight is copies[3].weight
    assert not copies[2].bias.requires_grad
    for module, copied in zip(chain.modules, copies, strict=True):
        assert module is not copied
        for original, parameter in zip(module.parameters(), copied.parameters(), strict=True):
            assert original is not parameter
            assert parameter.grad is None
            assert parameter.requires_grad == original.requires_grad
    assert modules[2].weight.grad is not None
    assert isinstance(copies[0].weight, nn.Parameter)


@pytest.mark.parametrize("device", [None, "meta"])
def test_hooks_of_weights_run_in_the_copy(device):
    """They change gradients, with which those of the pipeline are compared."""
    modules = layers(device=device)
    modules[0].weight.register_hook(lambda grad: grad * 0 + 7)
    _, copies, _ = reference(modules)
    copies[0](torch.ones(1, 3)).sum().backward()
    assert copies[0].weight.grad.unique().tolist() == [7.0]


@pytest.mark.parametrize("layout", [None, torch.channels_last])
def test_the_copy_has_the_memory_format_of_the_run(layout):
    """Sums in another order would round otherwise."""
    modules = [nn.Conv2d(2, 3, 2)]
    _, copies, _ = reference(modules, layout=layout)
    weight = copies[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last) == (layout is not None)


@pytest.mark.parametrize("on_meta", ["weight", "bias"])
def test_layers_that_are_on_the_meta_device_in_part_are_allocated(on_meta):
    """And layers there may have no bias."""
    layer = nn.Linear(2, 2)
    layer.register_parameter(
        on_meta, nn.Parameter(getattr(layer, on_meta).to("meta"), requires_grad=False)
    )
    modules = [layer, nn.Linear(2, 2, bias=False, device="meta")]
    chain, copies, values = reference(modules)
    for facts, module in zip(chain.layers, copies, strict=True):
        for name, tensor in state_of(facts.name, module).items():
            assert torch.equal(tensor, values[name])
    assert [name for name, p in copies[0].named_parameters() if not p.requires_grad] == [on_meta]
    assert copies[1].bias is None
