"""Initialise the process group. Each rank is a process, started by torchrun, by srun, by `launch`, or
by the user's own init_process_group.

Whatever happens to another rank meanwhile, this one ends within a time limit: waits in the store
and in gloo's connection setup are native code, which nothing can interrupt, so a thread ends the
process if all else fails.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from penstock.errors import PenstockError, RunError
from penstock.standard_error import write_line
from penstock.transport.addresses import bind_address, interface_of
from penstock.transport.attempt_store import TIMEOUT_S, attempt_store, launcher_listens
from penstock.transport.communicators import close_gloo_group
from penstock.transport.host_memory import disable_memory_trimming
from penstock.transport.liveness.heartbeats import Heartbeats, wait_for_keys
from penstock.transport.liveness.store_watch import StoreWatch, wait_for_store
from penstock.transport.slurm import adopt_srun, started_by_srun
from penstock.transport.unix_store import launch_store

#: Variables that a launcher sets beside RANK.
_ADDRESS = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

#: Seconds after the limit in which native code may still return with an error of its own.
_GRACE_S = 2.0

#: Seconds to wait for the heartbeats to say which rank has broken a connection.
_LOSS_PATIENCE_S = 2.0

#: Seconds between two looks at the heartbeats, in `lost_ranks`.
_PAUSE_S = 0.02

#: Parts of gloo's messages on connections and time limits, for which it has no exception class.
_LOST_WORDS = ("gloo/transport", "onnection", "imed out", "imeout", "Broken pipe")

_HEARTBEATS: list[Heartbeats] = []


def started() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and (
        dist.is_initialized() or "RANK" in os.environ or started_by_srun(os.environ)
    )


def heartbeats() -> Heartbeats | None:
    """Return this rank's heartbeats; None for ranks of `launch`, whose launcher watches them."""
    return _HEARTBEATS[0] if _HEARTBEATS else None


def lost_ranks(patience_s: float = 0.0) -> str | None:
    """Return which ranks are lost, waiting up to `patience_s` seconds for that; None if none is."""
    watch = heartbeats()
    end_s = time.monotonic() + patience_s
    while watch is not None:
        reason = watch.reason()
        if reason is not None or time.monotonic() >= end_s:
            return reason
        time.sleep(_PAUSE_S)
    return None


@contextmanager
def naming_lost_ranks(action: str) -> Iterator[None]:
    """Convert errors of torch's store and of gloo within a `with` block.

    Args:
        action: what the rank does, for the message: "could not connect to the other ranks".

    Raises:
        RunError: a rank is lost, or did not answer in time.
    """
    try:
        yield
    except PenstockError:
        raise
    except (RuntimeError, ValueError) as error:
        text = str(error).partition("\n")[0]
        if not isinstance(error, dist.DistError) and not any(word in text for word in _LOST_WORDS):
            raise
        reason = lost_ranks(_LOSS_PATIENCE_S)
        if reason is None:
            reason = f"rank {os.environ.get('RANK', '?')} {action}: {text}"
        raise RunError(reason) from error


def join(timeout_s: float = TIMEOUT_S) -> int:
    """Initialise the process group if that has not been done, and return the number of ranks.

    From then on this process does not return freed memory to the system (see `host_memory`), also
    where a program has initialised the group itself: else its steps would take longer.

    Args:
        timeout_s: seconds to wait for the other ranks.

    Raises:
        RunError: this process was not started as a rank, or other ranks do not appear in time.
    """
    disable_memory_trimming()
    if not dist.is_initialized():
        adopt_srun()
        if "RANK" not in os.environ:
            raise RunError(
                "this process is alone: start it with torchrun --nproc-per-node N, or with "
                "ps.launch(fn, ranks=N)"
            )
        missing = [name for name in _ADDRESS if name not in os.environ]
        if missing and launch_store() is None:
            raise RunError(
                f"RANK is set, but not {', '.join(missing)}: start the ranks with torchrun or srun, "
                "which set all of them; or unset RANK"
            )
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        _choose_interface()
        with _time_limit(timeout_s, rank):
            try:
                _initialise(rank, size, timeout_s)
            # Also if the user interrupts: the other ranks wait for this one, and must hear of it.
            except BaseException:
                if (watch := heartbeats()) is not None:
                    watch.close(failed=True)
                raise
        atexit.register(_leave)
    # A program has initialised the group itself, so that nothing watches its ranks yet.
    elif not _HEARTBEATS and launch_store() is None and dist.get_world_size() > 1:
        with _time_limit(timeout_s, dist.get_rank()):
            store = dist.distributed_c10d._get_default_store()
            _start_heartbeats(store, dist.get_rank(), dist.get_world_size(), timeout_s)
    return dist.get_world_size()


def _choose_interface() -> None:
    """Have gloo listen where the sockets of Penstock do.

    By default it listens on the address that the host's name resolves to, which is often another
    one than that by which the hosts reach each other, or open to more of them than need be.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = interface_of(bind_address())
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface


def _initialise(rank: int, size: int, timeout_s: float) -> None:
    """Meet the other ranks in a store, and connect to them."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=timeout_s)
    with naming_lost_ranks("could not connect to the other ranks"):
        with _watching_store(rank, size, timeout_s):
            store = _store(rank, size, timeout_s)
            store.set_timeout(timeout)
            if launch_store() is None:
                _start_heartbeats(store, rank, size, timeout_s)
            else:
                _wait_for_ranks(store, rank, size, timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _watching_store(rank: int, size: int, timeout_s: float) -> AbstractContextManager[object]:
    """Wait until the store of the ranks listens, and return a watch over it.

    Raises:
        RunError: rank 0, which is to host it, is lost.
    """
    launcher = launcher_listens()
    if size == 1 or launch_store() is not None or (rank == 0 and not launcher):
        return nullcontext()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    wait_for_store(address, port, timeout_s)
    return StoreWatch(rank, address, port, "torchrun" if launcher else "rank 0")


def _store(rank: int, size: int, timeout_s: float) -> Store:
    """Return the store of the ranks, as their launcher provides it."""
    store = launch_store()
    if store is not None:
        return store
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return attempt_store(rank, size, timeout_s)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_s)
    if rank != 0 or launcher_listens():
        return TCPStore(address, port, size, is_master=False, timeout=timeout)
    # torch would listen on all interfaces, whatever the address.
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((address, port), family=family, backlog=2048)
    return TCPStore(
        address,
        port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _wait_for_ranks(store: Store, rank: int, size: int, timeout_s: float) -> None:
    """Wait until all ranks have come to this point.

    Raises:
        RunError: some did not, in time.
    """
    store.set(f"joined/{rank}", "")
    keys = {peer: f"joined/{peer}" for peer in range(size)}
    wait_for_keys(store, keys, time.monotonic() + timeout_s)


def _start_heartbeats(store: Store, rank: int, size: int, timeout_s: float) -> None:
    """Start the heartbeats of this rank, whose loss of another ends torch's own waits as well."""
    if size == 1:
        return
    watch = Heartbeats(store, rank, size, timeout_s)
    _HEARTBEATS.append(watch)
    watch.on_loss(_abort_groups)


def _abort_groups() -> None:
    """End the waits for other ranks in all groups of gloo."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if "gloo" in dist.get_backend_config(group):
            close_gloo_group(group, dist.get_rank())


@contextmanager
def _time_limit(timeout_s: float, rank: int) -> Iterator[None]:
    """End the process if the `with` block takes longer than the limit."""
    done = threading.Event()

    def watch() -> None:
        """Wait for the end of the block."""
        if not done.wait(timeout_s + _GRACE_S):
            write_line(
                f"error: rank {rank} could not meet the other ranks within {timeout_s:.0f} s"
            )
            os._exit(1)

    threading.Thread(target=watch, name="penstock-join-limit", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _leave() -> None:
    """Destroy the process group at exit."""
    watch = heartbeats()
    if watch is not None and watch.loss is not None:
        return  # its connections to a host that is gone would be waited for
    if dist.is_initialized():
        dist.destroy_process_group()
