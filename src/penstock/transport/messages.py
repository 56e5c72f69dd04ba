"""Identify messages between hosts: their tags, the names of their headers, and their forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.schedule.lower import Link, Message
from penstock.schedule.op import Kind
from penstock.transport.payload import Payload, TensorForm

# Limits of a tag of 31 bits, see `message_tag`.
_MAX_TENSORS = 32
_MAX_STAGES = 1 << 10
_MAX_MICRO_BATCHES = 1 << 13
_KINDS = (Kind.F, Kind.B, Kind.E, Kind.L, Kind.U)

#: Key of messages whose form never changes: signature, link, kind and stage.
HeaderKey = tuple[str, Link, Kind, int]


def describe(message: Message) -> str:
    """Return the op that produces a message as text, such as `0F3`."""
    return f"{message.stage}{message.kind.value}{message.micro_batch}"


def header_key(signature: str, link: Link, message: Message) -> HeaderKey:
    """Return what identifies the form of a message."""
    return signature, link, message.kind, message.stage


def header_name(key: HeaderKey) -> str:
    """Return the store's key of a header."""
    signature, (source, target), kind, stage = key
    return f"penstock/header/{signature}/{source}-{target}/{stage}{kind.value}"


def message_tag(message: Message, leaf: int) -> int:
    """Return a tag of 31 bits: stage 10, micro-batch 13, kind 3, tensor 5.

    Micro-batch numbers wrap at 8,192; messages that far apart are never in flight together.
    """
    kind, stage, micro_batch = message
    tag = stage
    tag = tag << 13 | micro_batch % _MAX_MICRO_BATCHES
    tag = tag << 3 | _KINDS.index(kind)
    return tag << 5 | leaf


def differ_in_strides_only(
    announced: tuple[Any, ...], form: tuple[Any, ...], announced_forms: Sequence[TensorForm]
) -> bool:
    """Whether the announced form can be used for a message of another form.

    It can if only strides differ, and no announced tensor is expanded (stride 0): of such a tensor
    only the distinct elements are sent.
    """
    expanded = any(form.stride is not None and 0 in form.stride for form in announced_forms)
    return not expanded and _without_strides(announced) == _without_strides(form)


def _without_strides(form: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a payload's form without strides and shared memory."""
    structure, leaves, wants_grad, _ = form
    return structure, [leaf[:2] for leaf in leaves], wants_grad


def form_text(form: tuple[Any, ...]) -> str:
    """Return a payload's form as text for messages."""
    structure, leaves, wants_grad, _ = form
    nesting = structure if isinstance(structure, str) else structure.describe()
    flags = iter(wants_grad)
    texts = []
    for leaf in leaves:
        if isinstance(leaf[0], torch.Size):
            dtype = str(leaf[1]).removeprefix("torch.")
            suffix = " with a gradient" if next(flags) else ""
            texts.append(f"{dtype}{list(leaf[0])}{suffix}")
        else:
            texts.append(str(leaf[1]))
    return f"{nesting or 'a tensor'} of {', '.join(texts) or 'nothing'}"


def checked_tensors(payload: Payload, message: Message) -> list[Tensor]:
    """Return the payload's tensors, if their number and the stage fit a message's tag."""
    tensors = payload.tensors
    if len(tensors) > _MAX_TENSORS or message.stage >= _MAX_STAGES:
        raise RunError(
            f"stage {message.stage} sends {len(tensors)} tensors for micro-batch "
            f"{message.micro_batch}: at most {_MAX_TENSORS} tensors and {_MAX_STAGES:,} stages fit "
            "a message's tag"
        )
    return tensors
