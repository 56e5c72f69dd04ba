"""Names of a layer's tensors in the `state_dict` of the whole model."""

from __future__ import annotations

import torch
from torch import nn

from penstock.modules.state_names import full_name, parameters_of, prefix_of, state_of


class Layer(nn.Module):
    """A layer with a shared weight, buffers of both kinds and state that is no tensor."""

    def __init__(self, *, whole_names=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.inner = nn.Linear(1, 1, bias=False)
        self.tied = self.inner
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("mask", torch.zeros(1), persistent=False)
        if whole_names is not None:
            self.whole_names = whole_names

    def get_extra_state(self):
        """Return a number."""
        return 5


def test_the_prefix_is_the_name_of_the_layer_unless_its_names_are_whole():
    """A traced layer contains its tensors under their names in the model."""
    assert prefix_of("3", nn.Linear(1, 1)) == "3"
    assert prefix_of("3", Layer(whole_names=False)) == "3"
    assert prefix_of("3", Layer(whole_names=True)) == ""


def test_attributes_of_the_model_itself_have_no_dot():
    """Its path is empty."""
    assert full_name("", "weight") == "weight"
    assert full_name("a.b", "weight") == "a.b.weight"


def test_the_state_of_a_layer_is_its_part_of_the_model_s_state_dict():
    """Without entries that are no tensors and buffers that are not saved; not copied."""
    layer = Layer()
    model = nn.Sequential(nn.Identity(), layer)
    state = state_of("1", layer)
    whole = model.state_dict()
    assert list(state) == ["1.weight", "1.mean", "1.inner.weight", "1.tied.weight"]
    assert all(state[name].data_ptr() == whole[name].data_ptr() for name in state)
    assert list(state_of("1", Layer(whole_names=True)))[:2] == ["weight", "mean"]


def test_parameters_come_once_with_the_names_of_the_model():
    """A shared one under its first name."""
    layer = Layer()
    entries = dict(parameters_of("1", layer))
    assert list(entries) == ["1.weight", "1.inner.weight"]
    assert entries["1.inner.weight"] is layer.inner.weight
    assert list(dict(parameters_of("1", Layer(whole_names=True)))) == ["weight", "inner.weight"]
