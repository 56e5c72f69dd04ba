"""The store of one attempt under torchrun.

torchrun restarts all ranks after a failure, and when hosts join or leave. Since torch 2.5 the ranks
of all attempts share the store of its rendezvous, so that a restarted rank would read the addresses
of the attempt before. Nothing in a rank's environment tells attempts apart:
`TORCHELASTIC_RESTART_COUNT` stays the same when hosts join or leave. So rank 0 numbers the
attempts, and the ranks that are there now find each other by a handshake.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from penstock.errors import RunError
from penstock.transport.liveness.stopped_processes import LostSiblings

#: Seconds for which ranks wait for each other; torchrun has started all of them already.
TIMEOUT_S = 300.0

#: Seconds between two looks into the store: few beside the start of a process, many beside a look.
_PAUSE_S = 0.02


def launcher_listens() -> bool:
    """Return whether the launcher has the store at MASTER_PORT, so that rank 0 is a client too.

    torch reads the same variable (torch/distributed/rendezvous.py).
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def attempt_store(rank: int, size: int, timeout_s: float = TIMEOUT_S) -> Store:
    """Return a store that only the ranks of this attempt use.

    Args:
        rank: this rank.
        size: number of ranks.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        RunError: a rank does not appear, or has been stopped by a signal.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = launcher_listens()
    store = TCPStore(
        address,
        port,
        size,
        is_master=rank == 0 and not agent,
        timeout=timedelta(seconds=timeout_s),
        multi_tenant=not agent,
    )
    return separate_attempts(PrefixStore("penstock-attempts", store), rank, size, timeout_s)


def separate_attempts(store: Store, rank: int, size: int, timeout_s: float = TIMEOUT_S) -> Store:
    """Agree on a prefix that no earlier attempt has used.

    Every rank but the first publishes a random greeting. Rank 0 answers the greetings that it sees
    with the number of the attempt, until all ranks have confirmed that number: an answer to a
    greeting of an earlier attempt is not read: its process has ended.

    Args:
        store: the store of all attempts.
        rank: this rank.
        size: number of ranks.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        RunError: a rank does not appear, or has been stopped by a signal.
    """
    deadline_s = time.monotonic() + timeout_s
    if rank == 0:
        number = store.add("attempt", 1)
        _answer(store, number, set(range(1, size)), deadline_s, timeout_s)
    else:
        greeting = secrets.token_hex(8)
        store.set(f"greeting/{rank}", greeting)
        answer = f"answer/{greeting}"
        siblings = LostSiblings()
        while not store.check([answer]):
            siblings.check([0])
            _pause(deadline_s, "rank 0", timeout_s)
        number = int(store.get(answer))
        store.set(f"confirmed/{number}/{rank}", "")
    return PrefixStore(f"attempt/{number}", store)


def _answer(
    store: Store, number: int, missing: set[int], deadline_s: float, timeout_s: float
) -> None:
    """Answer greetings until all ranks have confirmed the number of the attempt."""
    answered: dict[int, str] = {}
    siblings = LostSiblings()
    while missing:
        for rank in sorted(missing):
            if store.check([f"confirmed/{number}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"greeting/{rank}"]):
                greeting = store.get(f"greeting/{rank}").decode()
                # A greeting of an earlier attempt may stand there until the rank replaces it.
                if answered.get(rank) != greeting:
                    store.set(f"answer/{greeting}", str(number))
                    answered[rank] = greeting
        if missing:
            siblings.check(missing)
            ranks = "rank" + "s" * (len(missing) > 1) + f" {sorted(missing)}"
            _pause(deadline_s, ranks, timeout_s)


def _pause(deadline_s: float, waited_for: str, timeout_s: float) -> None:
    """Wait a moment.

    Raises:
        RunError: the deadline is over.
    """
    if time.monotonic() > deadline_s:
        raise RunError(f"{waited_for} did not join within {timeout_s:.0f} s of the start")
    time.sleep(_PAUSE_S)
