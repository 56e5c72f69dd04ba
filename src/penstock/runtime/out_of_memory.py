"""The error of an op for which there was not enough memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.errors import OutOfMemory
from penstock.units import format_bytes

#: Texts of the RuntimeErrors that torch raises if the host's memory is exhausted, in
#: c10/core/impl/alloc_cpu.cpp, and if a tensor has more than 2^63 bytes, in ATen/EmptyTensor.cpp.
_MEMORY_ERRORS = ("DefaultCPUAllocator", "Storage size calculation overflowed")


@dataclass(frozen=True)
class MemoryUse:
    """What a rank held when its memory was exhausted, in bytes.

    Attributes:
        activations: of micro-batches in flight.
        peak: the most that it held in this step: weights in all versions, gradients, optimizer
            state and activations.
        predicted: the peak that the plan predicted; None without a plan.
    """

    activations: int
    peak: int
    predicted: int | None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an op has failed because memory was exhausted, of the host or an accelerator."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error)
    return any(text in message for text in _MEMORY_ERRORS)


def out_of_memory(
    error: BaseException, place: tuple[int, int, str, int], use: MemoryUse
) -> OutOfMemory:
    """Return the error of a run for an op that ran out of memory.

    Args:
        error: what the op raised.
        place: rank, stage, op and step.
        use: what the rank held.
    """
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    held = (
        f"the rank held {format_bytes(use.activations)} of activations, and at its peak "
        f"{format_bytes(use.peak)} with weights, gradients and optimizer state"
    )
    if use.predicted is not None:
        held += f"; the plan predicted {format_bytes(use.predicted)}"
    advice = (
        "Use smaller micro-batches, recompute='always', or more stages; a plan with memory_limit= "
        "takes the limit into account"
    )
    cause = f"out of memory: {reason}; {held}. {advice}"
    return OutOfMemory(*place, cause, held_bytes=use.peak, predicted_bytes=use.predicted)
