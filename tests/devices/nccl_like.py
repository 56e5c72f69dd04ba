"""What NCCL demands of its callers, enforced on CPUs: `install()` in every rank before it makes a
Pipeline.

Process groups with backend "nccl" become a `Communicator` between two ranks, whose messages go
through the store:

- tensors are contiguous, on the device, and of a dtype that NCCL has; gloo takes none of the
  device's;
- tags mean nothing: messages match in the order of the calls on both sides, and must agree in dtype
  and size;
- all calls of a communicator run on one stream, one after another: two ranks that first send and
  then receive never finish, unless both calls are in one group (`batch_isend_irecv`);
- a communicator is connected when it is made with a device, else by its first transfer, where each
  side waits for the other;
- a send is over when its receive is posted;
- collectives of a communicator of all ranks must be the same calls in the same order;
- an abort ends all transfers, of which nobody hears: what was to be received is garbage (NaN here).

What it does not have: asynchrony. `wait()` fills the tensor, so that the host stands where a stream
would. `WAITS` counts waits that stop a host under NCCL ("host": those with a timeout) and waits of
streams ("stream").
"""

from __future__ import annotations

import collections
import json
import threading
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tests.devices import lookalike

#: Seconds for which a connection waits for the other side.
PATIENCE_S = [20.0]

#: How many waits stopped the host, and how many only a stream.
WAITS: collections.Counter[str] = collections.Counter()

#: Whether `new_group` connects what it makes, as torch does with `device_id`.
EAGER = [True]

#: The communicators that this rank has made.
COMMUNICATORS: list[Communicator] = []

_DTYPES = [
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]

_SEALED = threading.Event()


class NcclMisuse(Exception):
    """A call under which NCCL would hang, or mix up messages."""


def seal() -> None:
    """From now on no communicator may be made or connected."""
    _SEALED.set()


def unseal() -> None:
    """Communicators may be made again."""
    _SEALED.clear()


class Communicator:
    """One rank's end of what connects two ranks, or all of them."""

    def __init__(self, number: int, ranks: list[int], rank: int, store: Any) -> None:
        """Make it, not connected yet."""
        if _SEALED.is_set():
            raise NcclMisuse(f"a communicator of ranks {ranks} is made in the middle of a run")
        self.name = f"nccl-like/{number}"
        self.ranks, self.rank, self.store = ranks, rank, store
        self.peers = [other for other in ranks if other != rank]
        self.peer = self.peers[0] if self.peers else rank
        self.aborted = threading.Event()
        self.connected = False
        self.sequence: collections.Counter[str] = collections.Counter()
        self.position = 0
        self.group_open = False

    def abort(self) -> None:
        """End all transfers."""
        self.aborted.set()

    def connect(self) -> None:
        """Wait for the other side to do the same.

        Raises:
            NcclMisuse: it does not come.
        """
        if self.connected:
            return
        if _SEALED.is_set():
            raise NcclMisuse(f"the communicator of ranks {self.ranks} connects at a transfer")
        self.store.set(f"{self.name}/here/{self.rank}", "")
        until = time.monotonic() + PATIENCE_S[0]
        while not self.store.check([f"{self.name}/here/{peer}" for peer in self.peers]):
            if time.monotonic() > until:
                raise NcclMisuse(
                    f"rank {self.rank} connects the communicator of ranks {self.ranks}, and rank {self.peer} never does"
                )
            self.aborted.wait(0.0005)
        self.connected = True

    def check(self, tensor: torch.Tensor) -> None:
        """Connect, unless that is done.

        Raises:
            RuntimeError: NCCL refuses the tensor.
        """
        if not isinstance(tensor, lookalike.Lookalike):
            raise RuntimeError("No backend type associated with device type cpu")
        if tensor.dtype not in _DTYPES:
            raise RuntimeError(f"Unconvertible NCCL type {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        if self.aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted")
        self.connect()

    def enqueue(self, kind: str, tensor: torch.Tensor) -> NcclWork:
        """Begin a transfer. Raises as `check`."""
        self.check(tensor)
        number = self.sequence[kind]
        self.sequence[kind] += 1
        work = NcclWork(self, kind, number, self.position, tensor)
        if not self.group_open:
            self.position += 1
        return work

    def collect(self, kind: str, tensor: torch.Tensor, sources: list[int]) -> CollectiveWork:
        """Begin a call of all ranks, after which each has the sum of what the sources gave. Raises
        as `check`.
        """
        self.check(tensor)
        self.position += 1
        key = f"{self.name}/call/{self.position}"
        header = [kind, sources, str(tensor.dtype), tensor.numel()]
        data = tensor.inner.detach().reshape(-1).view(torch.uint8)
        content = json.dumps(header).encode() + b"\n" + data.numpy().tobytes()
        self.store.set(f"{key}/{self.rank}", content)
        return CollectiveWork(self, key, tensor, header)


class NcclWork:
    """A transfer of a communicator."""

    def __init__(
        self, owner: Communicator, kind: str, number: int, position: int, tensor: torch.Tensor
    ) -> None:
        """Begin it."""
        self.owner, self.kind, self.tensor, self.position = owner, kind, tensor, position
        source = owner.rank if kind == "send" else owner.peer
        self.key = f"{owner.name}/{source}/{number}"
        self.over = False
        if kind == "send":
            data = tensor.inner.detach().reshape(-1).contiguous().view(torch.uint8)
            header = [position, str(tensor.dtype), tensor.numel()]
            content = json.dumps(header).encode() + b"\n" + data.numpy().tobytes()
            owner.store.set(self.key, content)
        else:
            owner.store.set(f"{self.key}/posted", "")

    def is_completed(self) -> bool:
        """Whether both sides have begun it."""
        if self.owner.aborted.is_set() or self.over:
            return True
        key = self.key if self.kind == "receive" else f"{self.key}/posted"
        return bool(self.owner.store.check([key]))

    def wait(self, timeout: Any = None) -> bool:
        """Stand until both sides have begun it, and take what has come."""
        WAITS["stream" if timeout is None else "host"] += 1
        while not self.is_completed():
            self.owner.aborted.wait(0.0005)
        if self.kind == "receive" and not self.over:
            self._take()
        self.over = True
        return True

    def _take(self) -> None:
        """Fill the tensor.

        Raises:
            NcclMisuse: the sender has sent something else, or elsewhere in its stream.
        """
        into = self.tensor.inner.detach()
        if self.owner.aborted.is_set():
            into.fill_(float("nan") if into.is_floating_point() else 0)
            return
        header, data = bytes(self.owner.store.get(self.key)).split(b"\n", 1)
        position, dtype, count = json.loads(header)
        if (dtype, count) != (str(into.dtype), into.numel()):
            raise NcclMisuse(
                f"rank {self.owner.peer} sent {dtype} x {count}, rank {self.owner.rank} receives {into.dtype} x {into.numel()}"
            )
        if position != self.position:
            raise NcclMisuse(
                f"the receive is call {self.position} of rank {self.owner.rank} and the send is call {position} of rank {self.owner.peer}"
            )
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(into.dtype)
        into.copy_(content.reshape(into.shape))


class CollectiveWork:
    """A collective call."""

    def __init__(
        self,
        owner: Communicator,
        key: str,
        tensor: torch.Tensor,
        header: list[Any],
    ) -> None:
        """Begin it."""
        self.owner, self.key, self.tensor, self.header = owner, key, tensor, header
        self.over = False

    def is_completed(self) -> bool:
        """Whether all ranks have begun it."""
        if self.owner.aborted.is_set() or self.over:
            return True
        return bool(self.owner.store.check([f"{self.key}/{rank}" for rank in self.owner.ranks]))

    def wait(self, timeout: Any = None) -> bool:
        """Stand until all ranks have begun it, and take the sum.

        Raises:
            NcclMisuse: another rank has begun another call.
        """
        WAITS["stream" if timeout is None else "host"] += 1
        while not self.is_completed():
            self.owner.aborted.wait(0.0005)
        if self.over:
            return True
        self.over = True
        into = self.tensor.inner.detach()
        if self.owner.aborted.is_set():
            into.fill_(float("nan") if into.is_floating_point() else 0)
            return True
        parts = {}
        for rank in self.owner.ranks:
            header, data = bytes(self.owner.store.get(f"{self.key}/{rank}")).split(b"\n", 1)
            if json.loads(header) != self.header:
                raise NcclMisuse(f"rank {rank} calls {json.loads(header)}, not {self.header}")
            parts[rank] = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(into.dtype)
        total = torch.stack([parts[rank] for rank in self.header[1]]).sum(0)
        into.copy_(total.reshape(into.shape))
        return True


class P2POp(NamedTuple):
    """See `torch.distributed.P2POp`."""

    op: Any
    tensor: torch.Tensor
    peer: int
    group: Any = None
    tag: int = 0


def _check_host(tensor: torch.Tensor) -> None:
    """Refuse what gloo cannot read.

    Raises:
        RuntimeError: a tensor of the device.
    """
    if isinstance(tensor, lookalike.Lookalike):
        raise RuntimeError("[gloo/transport/tcp/pair.cc] writev: Bad address")


def install() -> None:
    """Put all this in torch.distributed's place, in this process."""
    new_group, isend, irecv = dist.new_group, dist.isend, dist.irecv
    numbers = iter(range(1 << 30))

    def make_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        device_id: Any = None,
        **options: Any,
    ) -> Any:
        """See `torch.distributed.new_group`."""
        if backend != "nccl":
            return new_group(ranks, timeout, backend, **options)
        number = next(numbers)
        if dist.get_rank() not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        store = dist.distributed_c10d._get_default_store()
        communicator = Communicator(number, list(ranks), dist.get_rank(), store)
        COMMUNICATORS.append(communicator)
        if device_id is not None and EAGER[0]:
            communicator.connect()
        return communicator

    def send(tensor: Any, dst: Any = None, group: Any = None, tag: int = 0) -> Any:
        """See `torch.distributed.isend`."""
        if isinstance(group, Communicator):
            return group.enqueue("send", tensor)
        _check_host(tensor)
        return isend(tensor, dst, group, tag=tag)

    def receive(tensor: Any, src: Any = None, group: Any = None, tag: int = 0) -> Any:
        """See `torch.distributed.irecv`."""
        if isinstance(group, Communicator):
            return group.enqueue("receive", tensor)
        _check_host(tensor)
        return irecv(tensor, src, group, tag=tag)

    def batch(ops: list[P2POp]) -> list[Any]:
        """See `torch.distributed.batch_isend_irecv`: calls of one group have one place in the
        stream.
        """
        group = ops[0].group
        if not isinstance(group, Communicator):
            return [op.op(op.tensor, op.peer, op.group, op.tag) for op in ops]
        group.group_open = True
        works = [op.op(op.tensor, op.peer, group) for op in ops]
        group.group_open = False
        group.position += 1
        return works

    broadcast, all_reduce = dist.broadcast, dist.all_reduce

    def copy(tensor: Any, src: Any = None, group: Any = None, async_op: bool = False) -> Any:
        """See `torch.distributed.broadcast`."""
        if isinstance(group, Communicator):
            return group.collect("broadcast", tensor, [src])
        _check_host(tensor)
        return broadcast(tensor, src, group, async_op)

    def add(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False):
        """See `torch.distributed.all_reduce`."""
        if isinstance(group, Communicator):
            return group.collect("sum", tensor, group.ranks)
        _check_host(tensor)
        return all_reduce(tensor, op, group, async_op)

    dist.new_group, dist.isend, dist.irecv = make_group, send, receive
    dist.broadcast, dist.all_reduce = copy, add
    dist.P2POp, dist.batch_isend_irecv = P2POp, batch
