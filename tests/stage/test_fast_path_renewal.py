"""The fast path of a stage whose model has been traced again."""

from __future__ import annotations

from tests.stage.test_fast_path import input_grads
from torch import nn


def test_a_stage_leaves_the_fast_path_when_its_graph_is_replaced():
    """The new graph may save other tensors, or have a loss of its own: it is observed again."""
    _, stage = input_grads(nn.Tanh(), 4)
    assert stage._fast_path.bytes_by_form
    stage.renew()
    assert not stage._fast_path.bytes_by_form
