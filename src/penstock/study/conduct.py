"""Conduct: run the cases that have no record yet, several at a time, and keep each record as it
comes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from penstock.errors import PenstockError, RunError
from penstock.study.learn import learn
from penstock.study.question import Case
from penstock.study.record import Notebook, Record


@dataclass(frozen=True)
class Failed:
    """A case that could not be run, and why."""

    case: Case
    reason: str


#: Told of everything that ends, in the order in which it does.
Told = Callable[[Record | Failed], None]


def conduct(cases: Sequence[Case], notebook: Notebook, jobs: int, told: Told) -> list[Failed]:
    """Run what the notebook does not have yet. An interrupt loses the cases under way and no
    others.

    Args:
        cases: in the order in which they are begun.
        notebook: keeps the records.
        jobs: cases at a time, each in a process with one thread for its stages to compute in; 1
        runs them in this process. told: of each case that ends.

    Returns:
        The cases that failed; the others are run all the same, and these again the next time.

    Raises:
        RunError: a process was killed.
        FileError: a record cannot be written.
    """
    left = [case for case in cases if case.key not in notebook.records]
    failed: list[Failed] = []
    for found in _here(left) if jobs == 1 or len(left) < 2 else _in_processes(left, jobs):
        if isinstance(found, Failed):
            failed.append(found)
        else:
            notebook.add(found)
        told(found)
    return failed


def _tried(case: Case) -> Record | Failed:
    try:
        return learn(case)
    except PenstockError as error:
        return Failed(case, " ".join(str(error).split()))


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes with one thread meanwhile: sums are then the same wherever a case is run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _here(cases: Sequence[Case]) -> Iterator[Record | Failed]:
    with one_thread():
        yield from map(_tried, cases)


def _in_processes(cases: Sequence[Case], jobs: int) -> Iterator[Record | Failed]:
    before = set(multiprocessing.active_children())
    # Spawned: a fork would inherit torch's threads as they stand, locks and all.
    pool = ProcessPoolExecutor(min(jobs, len(cases)), multiprocessing.get_context("spawn"), _begin)
    try:
        futures: dict[Future[Record | Failed], Case] = {
            pool.submit(_tried, case): case for case in cases
        }
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool as error:
        raise RunError(
            f"a process that ran cases was killed, perhaps for memory: there were {jobs} at a time. What is done is kept; "
            "go on with fewer --jobs"
        ) from error
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """A process of the study begins: it leaves interrupts to the one that started it, and ends with
    it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
