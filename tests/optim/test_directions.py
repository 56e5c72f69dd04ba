"""Directions of predicted weights, where a parameter does not take part in every update."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.errors import RunError
from penstock.optim.directions import AdamDirection
from penstock.weights.rule_types import Reads


def test_a_parameter_without_a_gradient_keeps_its_bias_corrections():
    """Adam does not step it, so its next step has the corrections of its own number of steps."""
    both, once = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = torch.optim.Adam([both, once], lr=0.1)
    direction = AdamDirection(optimizer, [both, once], constant=False)
    for number in range(4):
        both.grad = torch.full((3,), 0.5)
        once.grad = torch.full((3,), 0.5) if number == 0 else None
        direction.remember()
        optimizer.step()
        # Reads the number of steps from the optimizer the first time, and counts from then on.
        moved = [torch.zeros(3), torch.zeros(3)]
        direction.move(moved, 1)
    # Of equal gradients all moments are equal to the gradient once corrected: a step of the
    # learning rate.
    assert int(optimizer.state[once]["step"]) == 1
    for weights in moved:
        torch.testing.assert_close(weights, torch.full((3,), -0.1))


def test_a_backward_whose_version_is_gone_is_refused(lab):
    """Only a W, whose I has read the right version, may read the newest in its place."""
    module = lab.mlp()
    line = lab.Line(0, 4, 1, 8, lambda at: Reads(at.at_forward, at.at_forward, 0, 0))
    weights = lab.make(lab.site_of(module, line, "pipeoptim", lab.PAIRS["momentum"][0]))
    message = (
        "stage 0: the backward of micro-batch 1 reads weight version 0, 0 ahead, and the newest"
    )
    with pytest.raises(RunError, match=message):
        lab.play(module, weights, line.ops, lab.vectors, lab.squares)
