"""Working weights: parameters that stay where they are in memory and now and then hold something
else than the newest version.

Graphs refer to that memory, so that a backward reads what it holds then. The newest version is put
aside only before something else takes its place, and comes back only when an op or the optimizer
needs it: while all ops read the newest, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from penstock.optim.blocks import copy
from penstock.optim.update import Update

#: Makes contents of the newest version, in place.
Change = Callable[[list[Tensor]], None]


@dataclass
class _Wanted:
    """Contents that will be asked for again: how they are made, whether they have been copied, and
    whether they should be soon.
    """

    content: Hashable
    change: Change | None
    soon: bool
    stored: bool = False


@final
class Working:
    """What the parameters of a stage hold. Contents have names: any hashable value; `newest` is the
    name of the newest version.
    """

    def __init__(self, update: Update, newest: Hashable) -> None:
        self.newest = newest
        self._update = update
        self._values = [parameter.data for parameter in update.parameters]
        self._aside: list[Tensor] = []
        self._is_aside = False
        self._holds: Hashable = newest
        self._wanted: dict[str, _Wanted] = {}
        self._room: dict[str, list[Tensor]] = {}

    def has(self, content: Hashable) -> bool:
        """Whether the contents of that name are somewhere, so that `show` needs nothing to make
        them of.
        """
        stored = (wanted.content for wanted in self._wanted.values() if wanted.stored)
        return content in (self.newest, self._holds) or content in stored

    def show(self, content: Hashable, change: Change | None = None) -> None:
        """Let the parameters hold this. What is nowhere is made by `change`."""
        if content == self._holds:
            return
        if self._holds == self.newest:
            self._put_aside()
        for name, wanted in self._wanted.items():
            if wanted.soon and wanted.content == self._holds != self.newest:
                self._store(name, wanted)
        room = next(
            (
                self._room[name]
                for name, it in self._wanted.items()
                if it.stored and it.content == content
            ),
            None,
        )
        if room is not None:
            copy(self._memory(), room)
        else:
            if self._holds != self.newest:
                copy(self._memory(), self._aside)
            if content != self.newest and change is not None:
                change(self._memory())
        self._holds = content

    def keep(
        self,
        name: str,
        content: Hashable | None,
        change: Change | None = None,
        *,
        soon: bool = False,
    ) -> None:
        """Let contents that have just been shown be had, even after a step, until others (or None)
        are kept under the same name.

        Args:
            name: of which there are few: each may take memory of the size of the weights.
            content, change: as in `show`.
            soon: copy them as soon as something else is shown, and not only before a step, so that
            they need not be made again.
        """
        wanted = self._wanted.get(name)
        if content is None:
            self._wanted.pop(name, None)
        elif wanted is None or wanted.content != content:
            self._wanted[name] = _Wanted(content, change, soon)

    def begin_step(self) -> None:
        """Let the parameters be the newest version, which a step is about to change."""
        for name, wanted in self._wanted.items():
            if not wanted.stored:
                self.show(wanted.content, wanted.change)
                self._store(name, wanted)
        self.show(self.newest)

    def newest_aside(self) -> list[Tensor]:
        """The newest version once more, in memory that may be used for something else between a
        step and its `end_step`.
        """
        self._put_aside()
        return self._aside

    def end_step(self, newest: Hashable) -> None:
        """The parameters are the next version, which has this name."""
        self._is_aside = False
        self._holds = self.newest = newest

    def restart(self, newest: Hashable) -> None:
        """Let the parameters be the newest version, under another name; nothing else is kept."""
        self._wanted.clear()
        self.show(self.newest)
        self._is_aside = False  # from now on others may write into the parameters
        self._holds = self.newest = newest

    def held_bytes(self) -> int:
        """Parameters, what is aside, and what is kept."""
        held: list[Sequence[Tensor]] = [self._update.parameters, self._aside, *self._room.values()]
        return sum(tensor.nbytes for tensors in held for tensor in tensors)

    def _memory(self) -> list[Tensor]:
        """The parameters, as tensors whose changes autograd does not see."""
        parameters = self._update.parameters
        if any(p.data_ptr() != v.data_ptr() for p, v in zip(parameters, self._values, strict=True)):
            self._values = [
                parameter.data for parameter in parameters
            ]  # a layer has moved them, as recurrent ones do on a GPU
        return self._values

    def _put_aside(self) -> None:
        if not self._is_aside:
            self._aside = self._aside or list(map(torch.empty_like, self._memory()))
            copy(self._aside, self._memory())
            self._is_aside = True

    def _store(self, name: str, wanted: _Wanted) -> None:
        """Copy what the parameters hold, which is wanted."""
        if not wanted.stored:
            if name not in self._room:
                self._room[name] = list(map(torch.empty_like, self._memory()))
            copy(self._room[name], self._memory())
            wanted.stored = True
