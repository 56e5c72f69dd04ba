"""Compressed boundaries: activations and their gradients are sent as bfloat16, or as 8-bit integers
with a scale for each row.

This changes the numbers, so it is off by default. With 8 bits, gradients have error feedback: the
quantization error of a message is added to the next gradient of the same form that the stage sends
over the link, so that errors do not accumulate over micro-batches (Seide et al. 2014, 1-bit
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
from penstock.values import serialize as wire
from penstock.values.constants import decode, dtype_name, dtype_of, encode
from penstock.values.structure import Structure

#: Formats that a boundary may be sent in.
CODES = ("bfloat16", "int8")

#: Tensors of fewer elements are sent uncompressed.
_MIN_ELEMENTS = 256

_COMPRESSIBLE = {torch.float32, torch.float64, torch.float16, torch.bfloat16}


def quantize(tensor: Tensor, code: str) -> list[Tensor]:
    """Quantize a floating-point tensor: to bfloat16, or to 8-bit integers and a scale for each row
    of the last dimension.

    Raises:
        SettingError: `code` is not one of `CODES`.
    """
    if code == "bfloat16":
        return [tensor.to(torch.bfloat16)]
    check_compression(code)
    rows = tensor if tensor.dim() else tensor.reshape(1)
    # -128 is left out, so that both signs have the same range.
    scale = rows.abs().amax(dim=-1, keepdim=True).float() / 127
    # A row with an infinity or a NaN has it in its scale, so that a loss scaler sees the overflow.
    return [(rows / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8), scale]


def check_compression(code: str) -> None:
    """Refuse a format that is not one of `CODES`.

    Raises:
        SettingError: the format is unknown.
    """
    if code not in CODES:
        raise SettingError(
            f"boundary={code!r} is unknown: choose one of {', '.join(CODES)}, or None for no "
            "compression"
        )


def dequantize(parts: list[Tensor], dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Invert `quantize`, up to its rounding."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    integers, scale = parts
    return (integers * scale).to(dtype).reshape(shape)


@dataclass(frozen=True)
class _Arrival:
    """A receive of a compressed payload."""

    compressed: Arrival

    def wait(self) -> Payload:
        """See `Arrival.wait`."""
        return decompress(self.compressed.wait())


@dataclass
class CompressedTransport:
    """A transport that compresses activations and gradients, and passes all other messages
    unchanged.
    """

    inner: Transport
    code: str
    shares: bool = False
    # Quantization errors to be added to the next gradient, by peer, stage, leaf and shape.
    _errors: dict[tuple[int, int, int, torch.Size], Tensor] = field(default_factory=dict)

    def arrives_at_once(self, peer: int) -> bool:
        """See `Transport.arrives_at_once`."""
        return self.inner.arrives_at_once(peer)

    def send(self, peer: int, message: Message, payload: Payload, signature: str) -> int:
        """See `Transport.send`."""
        if message.kind in (Kind.F, Kind.B):
            feedback = None
            if message.kind is Kind.B and self.code == "int8":
                feedback = self._with_error_feedback(peer, message)
            payload = compress(payload, self.code, feedback)
        return self.inner.send(peer, message, payload, signature)

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

    def _with_error_feedback(
        self, peer: int, message: Message
    ) -> Callable[[int, Tensor], list[Tensor]]:
        """Return a quantizer of a message's leaves that adds the errors of the previous message."""

        def quantize_leaf(place: int, tensor: Tensor) -> list[Tensor]:
            """Quantize leaf number `place`, and store its error."""
            key = peer, message.stage, place, tensor.shape
            previous_error = self._errors.get(key)
            corrected = tensor if previous_error is None else tensor + previous_error
            parts = quantize(corrected, self.code)
            error = corrected - dequantize(parts, tensor.dtype, tensor.shape)
            self._errors[key] = torch.where(error.isfinite(), error, 0)
            return parts

        return quantize_leaf


def compress(
    payload: Payload, code: str, quantizer: Callable[[int, Tensor], list[Tensor]] | None = None
) -> Payload:
    """Compress the large floating-point tensors of a payload.

    Returns:
        A flat list: a text that describes the original payload, and the tensors.

    Args:
        payload: to be sent.
        code: one of `CODES`.
        quantizer: quantizes a tensor, given its place among the leaves; by default `quantize`.
    """
    forms: list[Any] = []
    tensors: list[Tensor] = []
    for place, leaf in enumerate(payload.leaves):
        if not isinstance(leaf, Tensor):
            forms.append(["constant", encode(leaf)])
        elif leaf.dtype not in _COMPRESSIBLE or leaf.numel() < _MIN_ELEMENTS:
            forms.append(["whole"])
            tensors.append(leaf)
        else:
            values = leaf.detach()
            parts = quantize(values, code) if quantizer is None else quantizer(place, values)
            dtype = dtype_name(leaf.dtype)
            forms.append(["bits", len(parts), dtype, list(leaf.shape)])
            tensors += parts
    structure = payload.structure
    tree = structure if isinstance(structure, str) else wire.dump(structure)
    text = json.dumps([tree, forms, list(payload.wants_grad), payload.shared])
    return Payload("*", (text, *tensors), (False,) * len(tensors))


def decompress(payload: Payload) -> Payload:
    """Invert `compress`, up to the rounding of `quantize`."""
    structure, forms, wants_grad, shared = _parse(payload.leaves[0])
    tensors = iter(payload.leaves[1:])
    leaves: list[Any] = []
    for form in forms:
        if form[0] == "constant":
            leaves.append(decode(form[1]))
        elif form[0] == "whole":
            leaves.append(next(tensors))
        else:
            _, count, dtype, shape = form
            parts = [next(tensors) for _ in range(count)]
            leaves.append(dequantize(parts, dtype_of(dtype), torch.Size(shape)))
    return Payload(structure, tuple(leaves), wants_grad, shared)


@lru_cache(maxsize=1024)
def _parse(
    text: str,
) -> tuple[str | Structure, list[Any], tuple[bool, ...], tuple[tuple[int, int], ...]]:
    """Read the text of `compress`: structure, forms of the leaves, wants_grad and shared."""
    tree, forms, wants_grad, shared = json.loads(text)
    structure = tree if tree in ("", "*") else wire.parse(tree)
    return structure, forms, tuple(wants_grad), tuple((first, second) for first, second in shared)
