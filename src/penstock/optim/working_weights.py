"""Working weights: parameters that keep their memory and temporarily hold other contents.

Graphs refer to that memory, so a backward reads what it holds then. The newest version is copied
aside only before other contents take its place, and comes back only when an op or the optimizer
needs it: while all ops read the newest version, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from penstock.optim.blocks import copy
from penstock.optim.update import Update

#: Changes the newest version into other contents, in place.
Change = Callable[[list[Tensor]], None]


@dataclass
class _CachedContent:
    """Contents that will be needed again.

    Attributes:
        content: their name.
        change: computes them from the newest version.
        soon: copy them as soon as other contents replace them, not only before a step.
        stored: whether they have been copied.
    """

    content: Hashable
    change: Change | None
    soon: bool
    stored: bool = False


@final
class WorkingWeights:
    """The contents of a stage's parameters.

    Contents are named by any hashable value; `newest` is the name of the newest version.
    """

    def __init__(self, update: Update, newest: Hashable) -> None:
        self.newest = newest
        self._update = update
        self._values = [parameter.data for parameter in update.parameters]
        self._newest_copy: list[Tensor] = []
        self._copy_is_valid = False
        self._current: Hashable = newest
        self._cached: dict[str, _CachedContent] = {}
        self._stored_values: dict[str, list[Tensor]] = {}

    def has(self, content: Hashable) -> bool:
        """Return whether contents are available, so that `show` does not need to compute them."""
        stored = (cached.content for cached in self._cached.values() if cached.stored)
        return content in (self.newest, self._current) or content in stored

    def show(self, content: Hashable, change: Change | None = None) -> None:
        """Set the parameters to `content`, computed by `change` if it is not available."""
        if content == self._current:
            return
        if self._current == self.newest:
            self.copy_newest()
        else:
            for name, cached in self._cached.items():
                if cached.soon and cached.content == self._current:
                    self._store(name, cached)
        values = self._stored(content)
        if values is not None:
            copy(self._memory(), values)
        else:
            if self._current != self.newest:
                copy(self._memory(), self._newest_copy)
            if content != self.newest and change is not None:
                change(self._memory())
        self._current = content

    def _stored(self, content: Hashable) -> list[Tensor] | None:
        for name, cached in self._cached.items():
            if cached.stored and cached.content == content:
                return self._stored_values[name]
        return None

    def keep(
        self,
        name: str,
        content: Hashable | None,
        change: Change | None = None,
        *,
        soon: bool = False,
    ) -> None:
        """Keep contents that have just been shown available, even after a step.

        They are available until other contents (or None) are cached under the same name.

        Args:
            name: a name for the memory. Each may take as much memory as the weights.
            content, change: as in `show`.
            soon: copy the contents as soon as others are shown, not only before a step, so that
                they need not be computed again.
        """
        cached = self._cached.get(name)
        if content is None:
            self._cached.pop(name, None)
        elif cached is None or cached.content != content:
            self._cached[name] = _CachedContent(content, change, soon)

    def begin_step(self) -> None:
        """Set the parameters to the newest version, which a step is about to change."""
        for name, cached in self._cached.items():
            # Stored now, since they are computed from the newest version, which the step changes.
            if not cached.stored:
                self.show(cached.content, cached.change)
                self._store(name, cached)
        self.show(self.newest)

    def copy_newest(self) -> list[Tensor]:
        """Copy the newest version aside, unless that has been done, and return the copy.

        Between a step and its `end_step` the copy's memory may be used for other purposes.
        """
        if not self._copy_is_valid:
            self._newest_copy = self._newest_copy or list(map(torch.empty_like, self._memory()))
            copy(self._newest_copy, self._memory())
            self._copy_is_valid = True
        return self._newest_copy

    def end_step(self, newest: Hashable) -> None:
        """Note that the parameters are the next version, with the name `newest`."""
        self._copy_is_valid = False
        self._current = self.newest = newest

    def restart(self, newest: Hashable) -> None:
        """Set the parameters to the newest version, under another name; drop all other contents."""
        self._cached.clear()
        self.show(self.newest)
        self._copy_is_valid = False  # from now on others may write into the parameters
        self._current = self.newest = newest

    def held_bytes(self) -> int:
        """Return the bytes of parameters, copies and cached contents."""
        tensor_lists: list[Sequence[Tensor]] = [
            self._update.parameters,
            self._newest_copy,
            *self._stored_values.values(),
        ]
        return sum(tensor.nbytes for tensors in tensor_lists for tensor in tensors)

    def _memory(self) -> list[Tensor]:
        """Return the parameters as tensors whose changes autograd does not see."""
        parameters = self._update.parameters
        if any(p.data_ptr() != v.data_ptr() for p, v in zip(parameters, self._values, strict=True)):
            # A layer has moved them, as recurrent ones do on a GPU.
            self._values = [parameter.data for parameter in parameters]
        return self._values

    def _store(self, name: str, cached: _CachedContent) -> None:
        """Copy the present contents of the parameters, which are those of `cached`."""
        if not cached.stored:
            if name not in self._stored_values:
                self._stored_values[name] = list(map(torch.empty_like, self._memory()))
            copy(self._stored_values[name], self._memory())
            cached.stored = True
