"""What a stage and a partition of a Pipe see to when values cross: work in place, tensors that
share memory, and gradients that are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.transport.payload import Payload
from penstock.values.memory import copy_of

_SHARED = (
    "two tensors that share memory cross a stage boundary together, and a layer behind it changes "
    "one of them in place: each arrives "
    "in memory of its own there, so the other would not change with it. Return a clone() of one of "
    "the two, or let the layer work "
    "out of place"
)

_CHANGED = (
    "layers changed in place what their stage was given, and had not done so in its first forward: "
    "the next forward has a copy to change, this one had none. Change a copy in the layer "
    "(x = x.clone()), or repeat the batch"
)


def versions_of(tensors: Sequence[Tensor]) -> list[int] | None:
    """How often each has been changed in place; not known in inference mode."""
    if torch.is_inference_mode_enabled():
        return None
    return [tensor._version for tensor in tensors]


@dataclass
class InPlace:
    """Whether the layers of a stage change what they are given, in training or in evaluation.

    That is not known before they have run once: the flag `inplace` tells only of some of torch's
    own, and a layer may hand on its input,
    or a view of it, to one that does. Until it is known, and where they do, they are given copies:
    autograd forbids changing a leaf in
    place, and the stage before must not see such a change.
    """

    _changes: dict[bool, bool] = field(default_factory=dict)

    def known(self, *, training: bool) -> bool:
        """Whether they have run."""
        return training in self._changes

    def excluded(self, *, training: bool) -> bool:
        """Whether they have run, and have changed nothing."""
        return self._changes.get(training) is False

    def watch(self, inputs: Payload, *, training: bool) -> Watch:
        """What the layers are given, and what to look at after they have run."""
        if not self.excluded(training=training):
            tensors = [copy_of(tensor) for tensor in inputs.tensors]
            return Watch(self, training, inputs.with_tensors(tensors), copied=True)
        return Watch(self, training, inputs, copied=False)

    def note(self, *, training: bool, changed: bool, copied: bool) -> None:
        """Note whether a run has changed what the layers were given, of which there was a copy.

        Raises:
            RunError: there was none: the stage before may still read it.
        """
        if training not in self._changes:
            self._changes[training] = changed
        elif changed and not copied:
            self._changes[training] = True
            raise RunError(_CHANGED)


class Watch:
    """One run of layers that may change what they are given."""

    def __init__(self, in_place: InPlace, training: bool, inputs: Payload, *, copied: bool) -> None:
        self.given = inputs
        self._in_place, self._training, self._copied = in_place, training, copied
        self._tensors = inputs.tensors
        self._versions = versions_of(self._tensors)

    def check(self) -> None:
        """Learn from what has happened to the tensors.

        Raises:
            RunError: one of two tensors that share memory was changed, or one of which there is no
            copy.
        """
        after = versions_of(self._tensors)
        if self._versions is None or after is None:
            return
        changed = [one != other for one, other in zip(self._versions, after, strict=True)]
        check_shared(self.given.shared, changed)
        self._in_place.note(training=self._training, changed=any(changed), copied=self._copied)


def check_shared(shared: Sequence[tuple[int, int]], changed: Sequence[bool]) -> None:
    """Refuse a change in place of one of two tensors that share memory at the sender.

    Raises:
        RunError: there was one.
    """
    if any(changed[one] or changed[other] for one, other in shared):
        raise RunError(_SHARED)


def check_devices(payload: Payload, device: torch.device) -> None:
    """Refuse tensors that are not where their stage computes: they would arrive on another device
    than they left.

    Raises:
        RunError: there is one. Single numbers in host memory may cross.
    """
    for tensor in payload.tensors:
        if tensor.device.type != device.type and (tensor.dim() or tensor.is_meta):
            raise RunError(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} crosses the boundary "
                f"behind a stage on {device}, and "
                "the next stage would find it on its own device: move it with .to(…) before it is "
                "returned, or make it where it "
                "is used"
            )


def check_same_flags(told: Sequence[bool], made: Sequence[Tensor], where: str) -> None:
    """Refuse a second forward that makes other tensors than the first, or with gradients where the
    first had none.

    Raises:
        RunError: it does.
    """
    found = [tensor.requires_grad for tensor in made]
    if found != list(told):
        raise RunError(
            f"{where}: run again for its backward, a forward made {len(found)} tensors of which "
            f"{sum(found)} want a gradient, and "
            f"the first time {len(told)}, of which {sum(told)} did. A forward that is run again "
            "must do the same twice: take "
            "recompute='never' (a Pipe: checkpoint='never'), or draw random numbers from torch "
            "alone"
        )
