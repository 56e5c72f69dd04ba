"""Layers of a stage as one: entries and exits, mixed precision, compiled code, layers that run
again.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.batches.batch import make_batch
from penstock.optim.update import Update
from penstock.schedule.recompute import Recompute
from penstock.stage.stage import Stage
from penstock.stage.stage_layers import StageLayer, StageLayers

CPU = torch.device("cpu")


def stage(modules, *, recompute="never", autocast=None, **options):
    """The only stage of a model; further options are those of its layers."""
    layers = [StageLayer(index, str(index), module) for index, module in enumerate(modules)]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return Stage(
        0,
        StageLayers(layers, CPU, 0, **options),
        Update.make(parameters, None),
        Recompute(recompute),
        nn.functional.mse_loss,
        autocast=autocast,
    )


def trained(one_stage, x, y, batches=2):
    """The losses of some batches, run forward and backward."""
    losses = []
    for step in range(batches):
        batch = make_batch(x, y, 2, step=step, training=True)
        for number in batch.numbers:
            one_stage.forward(batch, number, None)
            one_stage.backward(batch, number, None)
        losses.append(float(batch.loss_shares(batch.numbers).sum()))
    return losses


def layers():
    """Some layers, one of which draws random numbers."""
    torch.manual_seed(0)
    return [
        nn.Linear(4, 8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.BatchNorm1d(8),
        nn.Linear(8, 4),
    ]


def data():
    """A batch."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


class Scale(nn.Module):
    """An entry: what came, times the mean of the micro-batch's inputs."""

    def forward(self, crossed, inputs):
        """Both arrive as they were."""
        return crossed * inputs.mean()


def test_an_entry_makes_what_the_first_layer_takes_of_what_came_and_the_inputs():
    """Masks and their like need not travel."""
    x, y = data()
    first = nn.Linear(4, 4)
    entry_stage = stage([first], entry=Scale())
    expected = sum(
        nn.functional.mse_loss(first(part * part.mean()), targets) / 2
        for part, targets in zip(x.split(4), y.split(4), strict=True)
    )
    assert trained(entry_stage, x, y, 2) == pytest.approx([float(expected.detach())] * 2)


def test_an_exit_makes_what_crosses_of_what_the_last_layer_returns():
    """What can be made again stays behind."""
    x, _ = data()
    first = nn.Linear(4, 4)
    layer = StageLayer(0, "0", first)
    exit_stage = Stage(
        0,
        StageLayers([layer], CPU, 0, exit=lambda value: {"sent": value}),
        Update.make(list(first.parameters()), None),
    )
    sent = exit_stage.forward(make_batch(x, x, 1, step=0, training=True), 0, None)
    assert sent.value().keys() == {"sent"}


@pytest.mark.parametrize("recomputed", [{0, 1, 2}, {2, 3, 4, 5}, {5}, set(range(7))])
def test_layers_that_run_again_give_the_same_to_the_bit(recomputed):
    """Dropout draws the same numbers, and batch norm counts once."""
    x, y = data()
    one, other = layers(), layers()
    plain, again = stage(one), stage(other, recompute="selective", recomputed=frozenset(recomputed))
    assert trained(plain, x, y) == trained(again, x, y)
    for mine, theirs in zip(
        nn.ModuleList(one).state_dict().values(),
        nn.ModuleList(other).state_dict().values(),
        strict=True,
    ):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(plain.update.parameters, again.update.parameters, strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_layers_that_run_again_hold_less():
    """That is what they are for."""
    x, y = data()
    plain, again = (
        stage(layers()),
        stage(layers(), recompute="selective", recomputed=frozenset(range(7))),
    )
    trained(plain, x, y)
    trained(again, x, y)
    assert again.activation_meter.peak < plain.activation_meter.peak


def test_compiled_layers_give_the_same():
    """Neighbours become one function; those that draw stay apart, so that their numbers are the
    same.
    """
    x, y = data()
    plain, compiled = stage(layers()), stage(layers(), compile={"backend": "aot_eager"})
    assert trained(plain, x, y) == pytest.approx(trained(compiled, x, y), rel=1e-6)
    assert len(compiled.runner._parts) == 3


def test_mixed_precision_computes_in_it_and_keeps_gradients_whole():
    """As torch.autocast around the forward and the loss."""
    x, y = data()
    module = nn.Linear(4, 4)
    dtypes = []
    module.register_forward_hook(lambda _m, _i, out: dtypes.append(out.dtype))
    mixed_stage = stage([module], autocast=torch.bfloat16)
    trained(mixed_stage, x, y, 2)
    assert set(dtypes) == {torch.bfloat16}
    assert module.weight.grad.dtype == torch.float32


def test_a_scaled_loss_is_reported_as_it_is():
    """Gradients are scaled, whichever way a micro-batch goes."""
    x, y = data()
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.load_state_dict(one.state_dict())
    plain, scaled = stage([one]), stage([other])
    scaled.loss_scale = 4.0
    assert trained(plain, x, y) == trained(scaled, x, y)
    torch.testing.assert_close(other.weight.grad, 4 * one.weight.grad)
