"""Storages that layers save: each is counted once."""

from __future__ import annotations

import torch
from torch import nn

from penstock.measure.saved_storages import SavedStorages, storage_address


def test_a_storage_counts_at_the_first_layer_that_saves_it_and_weights_never():
    """A stage that begins with a layer stores an input besides that no layer from there on saves."""
    layers = [nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)]
    saved = SavedStorages(layers, storage_address)
    first, second = torch.ones(4, 2), torch.ones(4, 2)
    saved.add(layers[0].weight.t())
    saved.add(first)
    saved.layer = 1
    saved.add(first[:2])
    saved.layer = 2
    saved.add(second)
    assert saved.counts == [first.nbytes, 0, second.nbytes]
    assert saved.entry_bytes(0, [first]) == 0
    assert saved.entry_bytes(1, [first, second]) == first.nbytes
