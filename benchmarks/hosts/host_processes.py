"""One process per host that imports torch and Penstock once, and runs every job in a fork.

Imports take longer than most jobs; a job in a fork has memory and process groups of its own.

In a worker script:

    if __name__ == "__main__":
        serve(run_job)
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from namespaces import Hosts

#: Seconds that a job may take.
LIMIT_S = 300
_PAUSE_S = 0.02


class HostProcesses:
    """A worker on every host, started by the constructor.

    Args:
        hosts: where the workers run.
        script: of the worker, which calls `serve`.
        folder: for the results and the output of jobs.
    """

    def __init__(self, hosts: Hosts, script: Path, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        self._workers: list[subprocess.Popen[str]] = []
        with ExitStack() as on_error:
            on_error.callback(self.close)
            for rank in range(len(hosts.names)):
                with self._log(rank).open("wb") as output:
                    words = [sys.executable, str(script)]
                    self._workers.append(
                        hosts.start(rank, words, {"OMP_NUM_THREADS": "1"}, output.fileno())
                    )
            on_error.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _log(self, rank: int) -> Path:
        """Return the file with the output of a host."""
        return self._folder / f"{rank}.log"

    def run(self, job: dict[str, Any], ranks: int) -> list[Any]:
        """Run a job on the first `ranks` hosts, and return what it returned on every one.

        Raises:
            RuntimeError: a process failed or took too long; the message has the end of its output.
        """
        port = _free_port()
        results = [self._folder / f"{rank}.json" for rank in range(ranks)]
        for rank, result in enumerate(results):
            result.unlink(missing_ok=True)
            variables = self._variables(rank, ranks, port)
            stdin = self._workers[rank].stdin
            assert stdin is not None
            stdin.write(json.dumps([job, variables, str(result)]) + "\n")
            stdin.flush()
        end_s = time.monotonic() + LIMIT_S
        while not all(result.exists() for result in results):
            texts = [self._log(rank).read_text(errors="replace") for rank in range(ranks)]
            if any(FAILED in text for text in texts) or time.monotonic() > end_s:
                ends = "\n".join(text[-1500:] for text in texts)
                raise RuntimeError(f"{job.get('system', 'a job')} failed:\n{ends}")
            time.sleep(_PAUSE_S)
        return [json.loads(result.read_text()) for result in results]

    def _variables(self, rank: int, ranks: int, port: int) -> dict[str, str]:
        """Return the environment of one rank of a job."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self._hosts.addresses[0],
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "eth0",
            # Namespaces share the machine's memory, which hosts do not.
            "PENSTOCK_SHARED_MEMORY": "0",
        }

    def close(self) -> None:
        """End the workers. `Hosts.remove` ends the jobs that they have left."""
        for worker in self._workers:
            worker.kill()
            worker.wait()


def _free_port() -> int:
    """Return a port that is free here, and so most likely in a fresh namespace."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


#: Last line of the output of a job that failed.
FAILED = "the job of this host has failed"


def serve(run_job: Callable[[dict[str, Any]], Any]) -> None:
    """Run the jobs of standard input until it ends, each in a fork.

    Args:
        run_job: runs one job, and returns what is JSON.
    """
    for line in sys.stdin:
        job, variables, result = json.loads(line)
        child = os.fork()
        if child:
            if os.waitpid(child, 0)[1]:
                print(FAILED, flush=True)
            continue
        os.environ.update(variables)
        content = json.dumps(run_job(job))
        # Renamed when complete, since the other end reads the file as soon as it exists.
        partial = Path(f"{result}.partial")
        partial.write_text(content)
        partial.rename(result)
        return
