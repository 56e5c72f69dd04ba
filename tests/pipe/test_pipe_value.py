"""Values that pass between the partitions of a `Pipe`: memory that they share, and gradients."""

from __future__ import annotations

import torch

from penstock.pipe.pipe_value import detach_payload, gradients_of, payloads_of
from penstock.transport.payload import Payload


def test_tensors_of_several_ports_that_share_memory_are_noted_on_both():
    """Each will be in memory of its own, so that no change in place may be made to it."""
    base = torch.zeros(4, 2)
    first, second, third = payloads_of(
        [[torch.zeros(2), base], (base[:1], torch.zeros(1)), torch.ones(3)]
    )
    assert first.shared == ((1, 1),)
    assert second.shared == ((0, 0),)
    assert third.shared == ()


def test_memory_shared_within_one_value_stays_a_pair_of_its_tensors():
    """They arrive in one memory again."""
    base = torch.zeros(4, 2)
    value = [base, base[1:]]
    (alone,) = payloads_of([value])
    assert alone.shared == ((0, 1),)
    first, second = payloads_of([value, torch.zeros(2)])
    assert (first.shared, second.shared) == (((0, 1),), ())
    first, second = payloads_of([value, base[:1]])
    assert first.shared[0] == (0, 1)
    assert set(first.shared[1:]) == {(0, 0)}
    assert second.shared == ((0, 0),)


def test_a_detached_value_has_the_same_numbers_without_a_graph():
    """Constants and the wish for a gradient stay."""
    weight = torch.ones(2, requires_grad=True)
    payload = detach_payload(Payload.of([weight * 3, 5, None]))
    tensor, five, none = payload.value()
    assert (tensor.tolist(), five, none) == ([3.0, 3.0], 5, None)
    assert not tensor.requires_grad
    assert payload.wants_grad == (True,)


def test_gradients_are_those_of_the_tensors_that_require_one():
    """None for the others, and where none has arrived."""
    leaves = [torch.ones(2, requires_grad=flag) for flag in (True, False, True)]
    payload = Payload.of(leaves)
    (leaves[0] * 2).sum().backward()
    first, second, third = gradients_of(payload)
    assert first.tolist() == [2.0, 2.0]
    assert second is None
    assert third is None
