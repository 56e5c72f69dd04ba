"""Run the cases of a study that have no record yet, several in parallel."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch

from penstock.errors import PenstockError, RunError
from penstock.files.text import one_line
from penstock.measure.torch_threads import torch_threads
from penstock.study.convergence.experiment import Case
from penstock.study.convergence.records import Record, RecordFile
from penstock.study.convergence.train_case import train_case


@dataclass(frozen=True)
class Failed:
    """A case that could not be run, and why."""

    case: Case
    reason: str


#: Called with the result of each case, in the order in which they end.
Report = Callable[[Record | Failed], None]


def run_cases(
    cases: Sequence[Case], record_file: RecordFile, jobs: int, report: Report
) -> list[Failed]:
    """Run the cases that have no record yet, and add their records to the file.

    Each record is written when its case ends, so an interrupt loses only the cases in progress.

    Args:
        cases: in the order in which to start them.
        record_file: the records.
        jobs: number of cases to run in parallel, each in a process that computes with one thread; 1
            runs them in this process.
        report: called with each result.

    Returns:
        The cases that failed. They do not stop the others, and run again the next time.

    Raises:
        RunError: a process was killed.
        FileError: a record cannot be written.
    """
    pending = [case for case in cases if case.key not in record_file.records]
    if jobs == 1 or len(pending) < 2:
        results = _run_in_this_process(pending)
    else:
        results = _run_in_processes(pending, jobs)
    failed: list[Failed] = []
    for result in results:
        if isinstance(result, Failed):
            failed.append(result)
        else:
            record_file.add(result)
        report(result)
    return failed


def _try_case(case: Case) -> Record | Failed:
    """Train a case; a PenstockError becomes a `Failed` with its message on one line."""
    try:
        return train_case(case)
    except PenstockError as error:
        return Failed(case, one_line(error))


def _run_in_this_process(cases: Sequence[Case]) -> Iterator[Record | Failed]:
    """Run cases one after the other."""
    # With one thread, as in the other processes, so that sums are the same wherever a case runs.
    with torch_threads(1):
        yield from map(_try_case, cases)


def _run_in_processes(cases: Sequence[Case], jobs: int) -> Iterator[Record | Failed]:
    """Run cases in a pool of processes, and yield each result when its case ends.

    Raises:
        RunError: a process was killed.
    """
    # Those are not of this pool, and must not be ended with it.
    older_children = set(multiprocessing.active_children())
    # Spawned: a fork would inherit torch's threads in their current state, locks included.
    pool = ProcessPoolExecutor(
        min(jobs, len(cases)), multiprocessing.get_context("spawn"), _start_worker
    )
    try:
        futures: list[Future[Record | Failed]] = [pool.submit(_try_case, case) for case in cases]
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool as error:
        raise RunError(
            f"a process that ran cases was killed, perhaps for memory: {jobs} ran in parallel. "
            "Finished cases are recorded; continue with fewer --jobs"
        ) from error
    except BaseException:
        # Workers ignore Ctrl-C, and `shutdown` would wait for the cases that they run.
        for child in set(multiprocessing.active_children()) - older_children:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Initialise a worker process: it ignores Ctrl-C, which its parent handles, and exits when its
    parent does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Wait for the parent process to end, then exit."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
