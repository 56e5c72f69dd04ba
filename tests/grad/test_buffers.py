"""Buffers during recomputation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.grad import buffers
from penstock.grad.buffers import Buffers


def module_with(**tensors):
    """Return a module with these buffers."""
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def test_copies_replace_the_buffers_until_the_originals_are_restored():
    """Changes of the copies have no effect afterwards; the buffers are the same objects as before."""
    module = module_with(mean=torch.zeros(2), none=None)
    held = Buffers([module])
    buffer = module.mean
    contents = held.contents()
    module.mean.add_(1)  # as the forward does whose contents were taken
    with held.with_contents(contents):
        assert module.mean.tolist() == [0, 0]
        module.mean.add_(5)
        module.mean = module.mean * 2
    assert module.mean is buffer
    assert buffer.tolist() == [1, 1]


def test_the_buffers_are_restored_after_a_failed_forward():
    """The error is raised, and the model is not left with copies."""
    module = module_with(mean=torch.zeros(2))
    held = Buffers([module])
    buffer = module.mean
    contents = held.contents()
    with pytest.raises(ValueError, match="planted"), held.with_contents(contents):
        raise ValueError("planted")
    assert module.mean is buffer


def test_a_buffer_that_every_forward_replaces_is_restored_too():
    """`self.mean = 0.9 * self.mean + ...` is as common as working in place."""
    module = module_with(mean=torch.zeros(2))
    held = Buffers([module])
    contents = held.contents()
    module.mean = module.mean + 1
    newest = module.mean
    with held.with_contents(contents):
        assert module.mean.tolist() == [0, 0]
        module.mean = module.mean + 1
    assert module.mean is newest


def test_a_buffer_that_two_modules_share_is_one_copy():
    """In both forwards, one module reads what the other writes."""
    shared = torch.zeros(2)
    first, second = module_with(a=shared), module_with(b=shared)
    held = Buffers([first, second])
    with held.with_contents(held.contents()):
        first.a.add_(1)
        assert second.b.tolist() == [1, 1]
    assert shared.tolist() == [0, 0]


def test_large_buffers_are_copied_only_while_they_change(monkeypatch):
    """Copying a mask of squared sequence length for every micro-batch would cost the memory that
    recomputation saves.
    """
    monkeypatch.setattr(buffers, "_LARGE_BYTES", 100)
    module = module_with(mask=torch.zeros(100), queue=torch.zeros(100), small=torch.zeros(2))
    held = Buffers([module])
    named = [sorted(key for _, key in held.contents())]
    for _ in range(2):
        module.queue[0] += 1
        named.append(sorted(key for _, key in held.contents()))
    named.append(sorted(key for _, key in held.contents()))
    module.mask = torch.ones(100)
    named.append(sorted(key for _, key in held.contents()))
    assert named == [
        ["mask", "queue", "small"],
        ["queue", "small"],
        ["queue", "small"],
        ["small"],
        ["mask", "small"],
    ]
