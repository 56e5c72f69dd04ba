"""Process groups whose processes are threads, for the collective operations of shared layers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace


class Meeting:
    """What the threads of a group exchange: every operation is one of all of them."""

    def __init__(self, size):
        self.size = size
        self._barrier = threading.Barrier(size, timeout=30)
        self._tensors = [None] * size

    def all(self, place, tensor):
        """Return the tensors of all threads, by place."""
        self._tensors[place] = tensor.clone()
        self._barrier.wait()
        tensors = list(self._tensors)
        self._barrier.wait()
        return tensors


class Group:
    """One thread's end of a group.

    Attributes:
        backend: its name.
        log: the operations, in order.
    """

    def __init__(self, meeting, place, backend="gloo"):
        self.meeting, self.place, self.backend = meeting, place, backend
        self.log = []


class Collectives:
    """Stands for `torch.distributed` in a module."""

    def all_reduce(self, tensor, *, group, async_op=False):
        """Sum tensors of one shape."""
        group.log.append(("all_reduce", tensor.numel()))
        tensors = group.meeting.all(group.place, tensor)
        assert {other.shape for other in tensors} == {tensor.shape}
        tensor.copy_(sum(tensors[1:], tensors[0]))
        return SimpleNamespace(wait=bool) if async_op else None

    def broadcast(self, tensor, *, group, group_src):
        """Copy the tensor of one thread."""
        group.log.append(("broadcast", tensor.numel()))
        tensor.copy_(group.meeting.all(group.place, tensor)[group_src])

    def get_backend(self, group):
        """Return the name of the backend."""
        return group.backend


class ScriptedMesh:
    """The place of a thread in a mesh of copies and of processes that share layers."""

    def __init__(self, groups, *, copies=1, width=1, coordinate=0):
        self.mesh = SimpleNamespace(device_type="cpu")
        self.groups, self.copies, self.width = groups, copies, width
        self.coordinate = coordinate
        self.dimensions = ("pp", *groups)

    def group(self, dimension):
        """Return the group of a dimension."""
        return self.groups[dimension]


def in_threads(count, function):
    """Call a function with the number of each thread; return the results in order."""
    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(function, n) for n in range(count)]]
