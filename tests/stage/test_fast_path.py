"""The fast path of a stage gives what the checked path gives."""

from __future__ import annotations

import torch
from torch import nn

from penstock.batches.batch import make_batch
from penstock.optim.update import Update
from penstock.stage.stage import Stage
from penstock.stage.stage_layers import StageLayer, StageLayers
from penstock.transport.payload import Payload


class Transposed(nn.Module):
    """A layer whose input gradient has another memory layout than its input."""

    def forward(self, x):
        """Double the transposed input."""
        return (x.t() * 2).contiguous()


def input_grads(module, batches):
    """Return the gradients that a stage of one module sends back, one per batch."""
    layers = StageLayers([StageLayer(0, "0", module)], torch.device("cpu"), 0)
    stage = Stage(1, layers, Update.make(list(module.parameters()), None))
    x = torch.arange(12.0).reshape(3, 4)
    grads = []
    for step in range(batches):
        batch = make_batch(x, x, 1, step=step, training=True)
        output = stage.forward(batch, 0, Payload("", (x.clone(),), (True,)))
        arrived = Payload.flat([torch.ones_like(output.leaves[0])])
        grads.append(stage.backward(batch, 0, arrived).leaves[0])
    return grads, stage


def test_an_input_gradient_keeps_the_memory_layout_that_autograd_gives_it():
    """In another layout the stage before would sum it in another order, and round differently."""
    grads, _ = input_grads(Transposed(), 4)
    assert [grad.stride() for grad in grads] == [(1, 3)] * 4


def test_a_form_takes_the_fast_path_once_its_gradients_have_the_layout_of_its_inputs():
    """The test above would pass without any fast path."""
    grads, stage = input_grads(nn.Tanh(), 4)
    assert stage._fast_path.bytes_by_form
    assert all(torch.equal(grad, grads[0]) for grad in grads)
    assert [grad.stride() for grad in grads] == [(4, 1)] * 4
