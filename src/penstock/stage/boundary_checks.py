"""Checks on values that pass a stage boundary: in-place modification, shared memory, devices, and
which tensors require gradients. Used by stages and by partitions of a Pipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.transport.payload import Payload
from penstock.values.storage import copy_of

_SHARED = (
    "two tensors that share memory cross a stage boundary together, and a layer behind it changes "
    "one of them in place: there, each is in separate memory, so the other would not change with "
    "it. Return a clone() of one of the two, or let the layer work out of place"
)

_MODIFIED = (
    "layers changed in place what their stage was given, and had not done so in its first forward: "
    "the next forward has a copy to change, this one had none. Change a copy in the layer "
    "(x = x.clone()), or repeat the batch"
)


def versions_of(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return torch's version counter of each tensor; None in inference mode, which has none."""
    if torch.is_inference_mode_enabled():
        return None
    return [tensor._version for tensor in tensors]


@dataclass
class InPlaceChanges:
    """Whether the layers of a stage modify their inputs in place, in training and in evaluation.

    This is unknown before they have run once: the flag `inplace` exists only in some of torch's own
    layers, and a layer may pass on its input, or a view of it, to one that modifies it. Until it is
    known, and if they do, the layers get copies: autograd forbids to modify a leaf in place, and
    the stage before must not see the modification.
    """

    _modifies: dict[bool, bool] = field(default_factory=dict)

    def known(self, *, training: bool) -> bool:
        """Return whether the layers have run in this mode."""
        return training in self._modifies

    def excluded(self, *, training: bool) -> bool:
        """Return whether the layers have run in this mode without modifying an input."""
        return self._modifies.get(training) is False

    def watch(self, inputs: Sequence[Payload], *, training: bool) -> Watch:
        """Return the inputs to run the layers on, copied if necessary, with a check for later."""
        if self.excluded(training=training):
            return Watch(self, training, inputs, copied=False)
        # Until the layers have run once it is not known whether they write into their inputs, which
        # the sender's backward may still need.
        copies = [value.with_tensors(list(map(copy_of, value.tensors))) for value in inputs]
        return Watch(self, training, copies, copied=True)

    def record(self, *, training: bool, modified: bool, copied: bool) -> None:
        """Record whether a run of the layers has modified their inputs.

        Args:
            training: the mode of the run.
            modified: whether an input was modified.
            copied: whether the inputs were copies.

        Raises:
            RunError: an input was modified that was not a copy: the stage before may still read it.
        """
        if training not in self._modifies:
            self._modifies[training] = modified
        elif modified and not copied:
            self._modifies[training] = True
            raise RunError(_MODIFIED)


class Watch:
    """One run of layers that may modify their inputs.

    Attributes:
        inputs: those to run the layers on.
    """

    def __init__(
        self, in_place: InPlaceChanges, training: bool, inputs: Sequence[Payload], *, copied: bool
    ) -> None:
        self.inputs = inputs
        self._in_place, self._training, self._copied = in_place, training, copied
        self._tensors = [tensor for value in inputs for tensor in value.tensors]
        self._versions = versions_of(self._tensors)

    def check(self) -> None:
        """Record which inputs the layers have modified.

        Raises:
            RunError: a modified input shares memory with another one, or was not a copy.
        """
        versions = versions_of(self._tensors)
        if self._versions is None or versions is None:
            return
        any_modified = versions != self._versions
        if any_modified:
            pairs = zip(self._versions, versions, strict=True)
            modified = [before != after for before, after in pairs]
            first = 0
            for value in self.inputs:
                count = len(value.tensors)
                check_shared(value.shared, modified[first : first + count])
                first += count
        self._in_place.record(training=self._training, modified=any_modified, copied=self._copied)


def check_shared(shared: Sequence[tuple[int, int]], modified: Sequence[bool]) -> None:
    """Reject the in-place modification of a tensor that shares memory with another at the sender.

    Args:
        shared: pairs of tensors that share memory, by position; a tensor that shares memory with
            one of another value is in a pair with itself.
        modified: by position, whether the tensor was modified.

    Raises:
        RunError: a tensor of a pair was modified.
    """
    if any(modified[first] or modified[second] for first, second in shared):
        raise RunError(_SHARED)


def check_devices(payload: Payload, device: torch.device) -> None:
    """Reject tensors on another device than their stage: the next stage gets them on its own.

    Zero-dimensional tensors in host memory are allowed.

    Raises:
        RunError: a tensor is on another kind of device.
    """
    for tensor in payload.tensors:
        # A number without dimensions may stay on the host: torch combines it with tensors of any
        # device.
        if tensor.device.type != device.type and (tensor.dim() or tensor.is_meta):
            raise RunError(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} crosses the boundary "
                f"behind a stage on {device}, and the next stage would receive it on its own "
                "device: move it with .to(…) before it is returned, or create it where it is used"
            )


def check_same_requires_grad(
    expected: Sequence[bool], tensors: Sequence[Tensor], where: str
) -> None:
    """Reject a recompute whose outputs differ from the first forward's in number or requires_grad.

    Args:
        expected: by output tensor of the first forward, whether it required a gradient.
        tensors: the output tensors of the recompute.
        where: name of the stage or partition, for the message.

    Raises:
        RunError: they differ.
    """
    requires_grad = [tensor.requires_grad for tensor in tensors]
    if requires_grad != list(expected):
        raise RunError(
            f"{where}: run again for its backward, a forward made {len(requires_grad)} tensors of "
            f"which {sum(requires_grad)} want a gradient, and the first time {len(expected)}, of "
            f"which {sum(expected)} did. A forward that is recomputed must do the same both times: "
            "use recompute='never' (a Pipe: checkpoint='never'), or draw random numbers from torch "
            "alone"
        )
