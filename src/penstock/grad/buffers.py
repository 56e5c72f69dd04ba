"""Buffers between a forward and its recomputation: the second sees what the first saw, and leaves
no trace.

Copies stand in the buffers' places meanwhile. Putting contents back into the buffers themselves
would not do: a graph may have saved them, and batch norm's kernels change theirs behind autograd's
version counters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

#: Larger buffers (masks, tables of positions, queues) are copied only while somebody changes them.
_LARGE_BYTES = 2**20

Contents = Mapping[tuple[nn.Module, str], Tensor]


class Buffers:
    """All buffers of some modules, persistent or not."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [module for module in modules if module._buffers]
        self._seen: dict[tuple[nn.Module, str], tuple[int, int]] = {}

    def contents(self) -> Contents:
        """Copies of what a forward is about to see."""
        found: dict[tuple[nn.Module, str], Tensor] = {}
        copies: dict[int, Tensor] = {}
        for module in self._modules:
            for key, buffer in module._buffers.items():
                if buffer is not None and self._may_change((module, key), buffer):
                    found[module, key] = copies.setdefault(id(buffer), buffer.detach().clone())
        return found

    @contextmanager
    def as_they_were(self, contents: Contents) -> Iterator[None]:
        """Let a forward see `contents`, which are used up."""
        own = {(module, key): module._buffers[key] for module, key in contents}
        try:
            for (module, key), content in contents.items():
                module._buffers[key] = content
            yield
        finally:
            for (module, key), buffer in own.items():
                module._buffers[key] = buffer

    def _may_change(self, place: tuple[nn.Module, str], buffer: Tensor) -> bool:
        """Small ones always may; large ones if they have changed since they were last asked for."""
        if buffer.numel() * buffer.element_size() <= _LARGE_BYTES:
            return True
        state = id(buffer), buffer._version
        changed = self._seen.get(place) != state
        self._seen[place] = state
        return changed
