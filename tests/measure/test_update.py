"""Seconds of gradient accumulation and of optimizer steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.measure import update
from penstock.measure.update import UpdateSeconds, measure_update

MEASURED = {
    "SGD, 0 states",
    "Adam, 2 states",
    "AdamW, 2 states",
    "RMSprop, 1 states",
    "Adagrad, 1 states",
    "Adam, 2 states, fused",
    "AdamW, 2 states, fused",
}


def test_every_compared_optimizer_has_a_ratio_and_weights_stay():
    """Planners look the ratio up by class, states and kernel."""
    layers = [nn.Linear(8, 8), nn.Linear(8, 4)]
    before = [parameter.clone() for layer in layers for parameter in layer.parameters()]
    measured = measure_update(layers, torch.device("cpu"))
    assert measured.step_ratios.keys() == MEASURED
    assert min(measured.step_ratios.values()) > 0
    after = [parameter for layer in layers for parameter in layer.parameters()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_an_optimizer_without_a_fused_step_for_the_dtype_is_left_out():
    """PyTorch raises an error for complex parameters."""
    layer = nn.Linear(4, 4, dtype=torch.complex64)
    measured = measure_update([layer], torch.device("cpu"))
    assert "Adam, 2 states" in measured.step_ratios
    assert not any("fused" in key for key in measured.step_ratios)


def test_layers_without_parameters_have_no_ratios():
    """There is no step to compare."""
    assert measure_update([nn.ReLU()], torch.device("cpu")).step_ratios == {}


@pytest.mark.parametrize(
    ("gradients", "zeros"),
    [([1.0, 1.0, 1.0, 1.0], 0), ([0.0, 2.0, 0.0, 0.0], 3), ([0.0] * 4, 4), (None, 0)],
)
def test_optimizers_are_compared_with_as_many_zeros_as_a_backward_left(
    monkeypatch, gradients, zeros
):
    """Adam's step takes twice as long on second moments of 0."""
    learning_rates = []

    class Observed(torch.optim.SGD):
        """Notes the gradients of its steps."""

        def step(self, closure=None):
            """Note them."""
            learning_rates.append([group["params"][0].grad.clone() for group in self.param_groups])
            return super().step(closure)

    monkeypatch.setattr(update, "_COMPARED", {"observed": lambda p: Observed(p, lr=0.0)})
    layer = nn.Linear(4, 1, bias=False)
    layer.weight.grad = None if gradients is None else torch.tensor([gradients])
    measured = measure_update([layer], torch.device("cpu"))
    assert set(measured.step_ratios) == {"observed"}
    assert learning_rates
    for (gradient,) in learning_rates:
        assert int((gradient == 0).sum()) == zeros
        assert gradient.numel() == 4


@pytest.mark.parametrize(
    ("sizes", "sample"),
    [((3, 2, 3), [3, 2, 3]), ((30, 2, 3, 30), [8]), ((4, 4, 4, 4, 4), [4, 4]), ((5, 6), [5])],
)
def test_optimizers_are_compared_on_a_part_of_large_models(monkeypatch, sizes, sample):
    """The limit is 8 numbers here: every k-th parameter, and of large ones the first part."""
    monkeypatch.setattr(update, "_COMPARED_BYTES", 32)
    parameters = [nn.Parameter(torch.arange(float(size))) for size in sizes]
    parts = update._sample(parameters)
    assert [part.numel() for part in parts] == sample
    assert torch.equal(parts[0], parameters[0][: len(parts[0])])


def test_parts_of_a_model_are_combined_by_their_bytes_and_ratios_by_the_median():
    """Each rank measures some of the layers."""
    parts = [
        UpdateSeconds(1.0, 2.0, 4.0, 100, {"Adam, 2 states": 3.0}),
        UpdateSeconds(3.0, 6.0, 8.0, 300, {"Adam, 2 states": 5.0, "SGD, 0 states": 0.5}),
        UpdateSeconds(2.0, 0.0, 0.0, 0),
    ]
    combined = UpdateSeconds.combine(parts)
    assert combined == UpdateSeconds(
        2.0, 5.0, 7.0, 400, {"Adam, 2 states": 4.0, "SGD, 0 states": 0.5}
    )
