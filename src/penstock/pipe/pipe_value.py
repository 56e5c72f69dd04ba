"""Values that pass between the partitions of a `Pipe`, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from penstock.transport.payload import Payload
from penstock.values.storage import overlapping_pairs

#: By tensor of a value: its gradient, or None.
Grads = list[Tensor | None]


def payloads_of(values: Sequence[Any]) -> list[Payload]:
    """Flatten the values of several ports.

    A tensor that shares memory with one on another port is noted as a pair with itself: behind the
    ports each is in separate memory, so neither may be modified in place.

    Raises:
        Unflattenable: part of a value cannot be passed between partitions.
    """
    payloads = [Payload.of(value) for value in values]
    if len(payloads) == 1:
        return payloads
    places: list[tuple[int, int]] = []
    for port, payload in enumerate(payloads):
        places += [(port, position) for position in range(len(payload.tensors))]
    tensors = [tensor for payload in payloads for tensor in payload.tensors]
    for first, second in overlapping_pairs(tensors):
        if places[first][0] == places[second][0]:
            continue
        for port, position in (places[first], places[second]):
            shared = (*payloads[port].shared, (position, position))
            payloads[port] = replace(payloads[port], shared=shared)
    return payloads


def detach_payload(payload: Payload) -> Payload:
    """Return a payload whose tensors have no graph."""
    return payload.with_tensors([tensor.detach() for tensor in payload.tensors])


def gradients_of(payload: Payload) -> Grads:
    """Return the gradient of each tensor, None for tensors that do not require one."""
    return [tensor.grad for tensor in payload.tensors]
