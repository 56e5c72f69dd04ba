"""Buffers during recomputation: the second forward reads what the first one read.

Its changes are undone. Copies take the place of the buffers meanwhile. Writing old contents into
the buffers themselves would be wrong: a graph may have saved them, and the kernels of batch norm
change them without touching autograd's version counter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

#: Larger buffers (masks, tables of positions, queues) are copied only while forwards change them.
_LARGE_BYTES = 2**20

Contents = Mapping[tuple[nn.Module, str], Tensor]


class Buffers:
    """The buffers of some modules, persistent or not."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [module for module in modules if module._buffers]
        self._last_states: dict[tuple[nn.Module, str], tuple[int, int]] = {}

    def contents(self) -> Contents:
        """Return copies of the buffers that a forward may change, as it is about to read them."""
        contents: dict[tuple[nn.Module, str], Tensor] = {}
        copies: dict[int, Tensor] = {}
        for module in self._modules:
            for key, buffer in module._buffers.items():
                if buffer is not None and self._may_change((module, key), buffer):
                    contents[module, key] = copies.setdefault(id(buffer), buffer.detach().clone())
        return contents

    @contextmanager
    def with_contents(self, contents: Contents) -> Iterator[None]:
        """Put the tensors of `contents` in the place of the buffers in this context.

        Args:
            contents: result of `contents`; a forward may change its tensors.
        """
        originals = {(module, key): module._buffers[key] for module, key in contents}
        try:
            for (module, key), content in contents.items():
                module._buffers[key] = content
            yield
        finally:
            for (module, key), buffer in originals.items():
                module._buffers[key] = buffer

    def _may_change(self, place: tuple[nn.Module, str], buffer: Tensor) -> bool:
        """Return whether to copy a buffer: it is small, or has changed since the last call."""
        if buffer.numel() * buffer.element_size() <= _LARGE_BYTES:
            return True
        state = id(buffer), buffer._version
        changed = self._last_states.get(place) != state
        self._last_states[place] = state
        return changed
