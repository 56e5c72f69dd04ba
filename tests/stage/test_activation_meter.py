"""What the meter counts of the tensors that a graph saves."""

from __future__ import annotations

import torch

from penstock.stage.activation_meter import ActivationMeter


def test_of_an_input_that_is_a_view_only_its_own_bytes_count():
    """A micro-batch is a view of its batch: the others count the rest."""
    meter = ActivationMeter()
    micro_batch = torch.ones(8, 4)[2:4].requires_grad_()
    weight = torch.ones(4, requires_grad=True)
    with meter.measuring("form", [micro_batch], frozenset({weight.data_ptr()})):
        (micro_batch * weight).exp()
    input_bytes = output_bytes = 2 * 4 * 4
    assert meter.size("form") == input_bytes + output_bytes
