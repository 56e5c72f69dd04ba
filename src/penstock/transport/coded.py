"""Boundaries sent in fewer bits: activations and their gradients as bfloat16, or as 8-bit numbers
with a scale for each row.

Numbers change by this, so it is off unless asked for. Where 8 bits are sent, gradients have error
feedback: what a message has lost is added to the next gradient of the same form that the stage
sends over the link, so that losses do not add up over micro-batches (Seide et al. 2014, 1-bit
stochastic gradient descent, section 3; Karimireddy et al. 2019, Error feedback fixes SignSGD).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from penstock.errors import SettingError
from penstock.schedule.lower import Message
from penstock.schedule.op import Kind
from penstock.transport.payload import Payload
from penstock.transport.transport import Arrival, Transport
from penstock.values import wire
from penstock.values.constants import decode, dtype_of, encode
from penstock.values.structure import Structure

#: What a boundary may be sent as.
CODES = ("bfloat16", "int8")

#: Numbers below which a tensor goes as it is.
_SMALLEST = 256

_CODED = {torch.float32, torch.float64, torch.float16, torch.bfloat16}


def bits_of(tensor: Tensor, code: str) -> list[Tensor]:
    """A tensor of floats in fewer bits: as bfloat16, or as 8-bit numbers and the scale of each row
    of the last dimension.

    Raises:
        SettingError: `code` is not one of `CODES`.
    """
    if code == "bfloat16":
        return [tensor.to(torch.bfloat16)]
    check_code(code)
    rows = tensor if tensor.dim() else tensor.reshape(1)
    scale = rows.abs().amax(dim=-1, keepdim=True).float() / 127
    # Rows with an infinity or a NaN keep it in their scale, so that whoever looks for overflow
    # finds it.
    return [(rows / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8), scale]


def check_code(code: str) -> None:
    """Refuse what is not one of `CODES`.

    Raises:
        SettingError: it is not.
    """
    if code not in CODES:
        raise SettingError(
            f"a boundary is sent as one of {', '.join(CODES)}, or as it is (None), not as {code!r}"
        )


def tensor_of(bits: list[Tensor], dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """What `bits_of` was given, as well as the bits can tell."""
    if len(bits) == 1:
        return bits[0].to(dtype)
    return (bits[0] * bits[1]).to(dtype).reshape(shape)


@dataclass(frozen=True)
class _Arrival:
    whole: Arrival

    def wait(self) -> Payload:
        return decoded(self.whole.wait())


@dataclass
class CodedTransport:
    """A transport whose activations and gradients travel in fewer bits; everything else passes as
    it is.
    """

    inner: Transport
    code: str
    shares: bool = False
    _lost: dict[tuple[int, int, int, torch.Size], Tensor] = field(default_factory=dict)

    def send(self, peer: int, message: Message, payload: Payload, signature: str) -> None:
        """See `Transport.send`."""
        if message.kind in (Kind.F, Kind.B):
            feedback = (
                self._fed_back(peer, message)
                if message.kind is Kind.B and self.code == "int8"
                else None
            )
            payload = coded(payload, self.code, feedback)
        self.inner.send(peer, message, payload, signature)

    def post(self, peer: int, message: Message, signature: str) -> Arrival:
        """See `Transport.post`."""
        arrival = self.inner.post(peer, message, signature)
        return _Arrival(arrival) if message.kind in (Kind.F, Kind.B) else arrival

    def release(self, before: int) -> None:
        """See `Transport.release`."""
        self.inner.release(before)

    def drain(self) -> None:
        """See `Transport.drain`."""
        self.inner.drain()

    def _fed_back(self, peer: int, message: Message) -> Callable[[int, Tensor], list[Tensor]]:
        def bits(place: int, tensor: Tensor) -> list[Tensor]:
            key = peer, message.stage, place, tensor.shape
            before = self._lost.get(key)
            wanted = tensor if before is None else tensor + before
            made = bits_of(wanted, self.code)
            lost = wanted - tensor_of(made, tensor.dtype, tensor.shape)
            self._lost[key] = torch.where(lost.isfinite(), lost, 0)
            return made

        return bits


def coded(
    payload: Payload, code: str, bits: Callable[[int, Tensor], list[Tensor]] | None = None
) -> Payload:
    """A payload whose large tensors of floats are in fewer bits: a flat list, of what it was and
    the tensors.

    Args:
        payload: what is sent.
        code: one of `CODES`.
        bits: makes the bits of a tensor, given its place among the leaves; by default `bits_of`.
    """
    forms: list[Any] = []
    tensors: list[Tensor] = []
    for place, leaf in enumerate(payload.leaves):
        if not isinstance(leaf, Tensor):
            forms.append(["constant", encode(leaf)])
        elif leaf.dtype not in _CODED or leaf.numel() < _SMALLEST:
            forms.append(["whole"])
            tensors.append(leaf)
        else:
            made = bits_of(leaf.detach(), code) if bits is None else bits(place, leaf.detach())
            forms.append(
                ["bits", len(made), str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]
            )
            tensors += made
    structure = payload.structure
    tree = structure if isinstance(structure, str) else wire.dump(structure)
    text = json.dumps([tree, forms, list(payload.wants_grad), payload.shared])
    return Payload("*", (text, *tensors), (False,) * len(tensors))


def decoded(payload: Payload) -> Payload:
    """What `coded` was given, as well as the bits can tell."""
    structure, forms, wants_grad, shared = _parsed(payload.leaves[0])
    rest = iter(payload.leaves[1:])
    leaves: list[Any] = []
    for form in forms:
        if form[0] == "constant":
            leaves.append(decode(form[1]))
        elif form[0] == "whole":
            leaves.append(next(rest))
        else:
            _, count, dtype, shape = form
            bits = [next(rest) for _ in range(count)]
            leaves.append(tensor_of(bits, dtype_of(dtype), torch.Size(shape)))
    return Payload(structure, tuple(leaves), wants_grad, shared)


@lru_cache(maxsize=1024)
def _parsed(
    text: str,
) -> tuple[str | Structure, list[Any], tuple[bool, ...], tuple[tuple[int, int], ...]]:
    tree, forms, wants_grad, shared = json.loads(text)
    structure = tree if tree in ("", "*") else wire.parse(tree)
    return structure, forms, tuple(wants_grad), tuple((one, other) for one, other in shared)
