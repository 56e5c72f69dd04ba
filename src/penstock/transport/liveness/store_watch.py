"""The store's host before there are heartbeats: a rank that waits for the store says when it is lost.

Rank 0 hosts the store, or torchrun does. Until all ranks have written their addresses into it, they
know nothing of each other, and torch waits for a store that does not answer until its time limit.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Self

from torch._C._distributed_c10d import TCPStore

from penstock.errors import RunError
from penstock.standard_error import write_line
from penstock.transport.addresses import close_connections
from penstock.transport.liveness.join_progress import JoinProgress
from penstock.transport.liveness.stopped_processes import LIMIT_S, LOOK_S, LostSiblings

#: Seconds without an answer of the store after which it is lost: more than for heartbeats, since a
#: process that is swapped out answers late.
STORE_LIMIT_S = 8.0

#: Seconds for which a connection may take, and between two attempts.
_CONNECT_S, _PAUSE_S = 1.0, 0.1

#: Seconds after the loss of the store in which the main thread is to raise the error.
_EXCEPTION_S = 1.0


def wait_for_store(address: str, port: int, timeout_s: float, limit_s: float = LIMIT_S) -> None:
    """Wait until something listens at the store's address. Called by all ranks but the store's host.

    Args:
        address: of the store's host.
        port: of the store.
        timeout_s: seconds to wait.
        limit_s: seconds without an answer after which a host that has answered before is lost.

    Raises:
        RunError: rank 0 was stopped or has ended, its host is lost, or the time is over.
    """
    siblings = LostSiblings()
    started_s = answered_s = time.monotonic()
    answers = False
    progress = JoinProgress(timeout_s)
    # One message per host is enough.
    tells = os.environ.get("LOCAL_RANK", "0") == "0"
    while True:
        try:
            with socket.create_connection((address, port), _CONNECT_S):
                return
        except ConnectionRefusedError:  # the host is there, and nothing listens yet
            answers, answered_s = True, time.monotonic()
        except OSError:
            pass
        siblings.check([0])
        if tells:
            progress.look([0])
        now_s = time.monotonic()
        silent_s = now_s - answered_s
        if answers and silent_s >= limit_s:
            raise RunError(
                f"rank 0 on host {address} is missing: the host has not answered for "
                f"{silent_s:.1f} s, and the store of the run is not there yet"
            )
        if now_s - started_s > timeout_s:
            reason = "does not listen there" if answers else "has never answered"
            raise RunError(
                f"rank 0 on host {address} did not join the run within {timeout_s:.0f} s: its store "
                f"is to be at port {port}, and the host {reason}. Look at the output of its "
                "process; deadline_s sets how long the others wait"
            )
        time.sleep(_PAUSE_S)


class StoreWatch:
    """Asks the store every half second, within a `with` block, and ends waits for it when it is lost.

    torch's store answers from a thread of its own, also while its process computes or imports.

    Args:
        rank: this rank.
        address: of the store's host.
        port: of the store.
        host: who hosts the store, for the message.
        limit_s: seconds without an answer after which the store is lost.
    """

    def __init__(
        self, rank: int, address: str, port: int, host: str, limit_s: float = STORE_LIMIT_S
    ) -> None:
        self._rank, self._address, self._port = rank, address, port
        self._host, self._limit_s = host, limit_s
        self._done = threading.Event()
        self._answers = 0
        self._reason: str | None = None

    def __enter__(self) -> Self:
        for target in (self._ask, self._watch):
            threading.Thread(target=target, name="penstock-store-watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *details: object
    ) -> None:
        self._done.set()
        if self._reason is not None and isinstance(error, Exception):
            raise RunError(self._reason) from error

    def _ask(self) -> None:
        """Count the answers of the store, over a connection of this thread alone."""
        while not self._done.is_set():
            with suppress(RuntimeError):
                limit = timedelta(seconds=self._limit_s)
                store = TCPStore(self._address, self._port, is_master=False, timeout=limit)
                while not self._done.wait(LOOK_S):
                    store.check(["heartbeat/0"])
                    self._answers += 1
            self._done.wait(LOOK_S)

    def _watch(self) -> None:
        """End the waits of this rank when the store has not answered for too long.

        Looks are counted, and not seconds, of which some may pass while this process is stopped.
        """
        siblings = LostSiblings()
        answers, silent = 0, 0
        while self._reason is None:
            if self._done.wait(LOOK_S):
                return
            silent = silent + 1 if answers == self._answers else 0
            answers = self._answers
            try:
                siblings.check([0])
            except RunError as error:  # on this host, so that its process can be named
                self._reason = str(error)
            if silent * LOOK_S >= self._limit_s and self._reason is None:
                self._reason = (
                    f"{self._host} on host {self._address} is missing: the store of the run, which "
                    f"it hosts at port {self._port}, has not answered for {silent * LOOK_S:.1f} s "
                    "(its host is lost, or it has been stopped by a signal)"
                )
        close_connections(self._port)
        if not self._done.wait(_EXCEPTION_S):  # torch connects again until its time limit
            write_line(f"error: rank {self._rank}: {self._reason}")
            os._exit(1)
