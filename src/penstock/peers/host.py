"""A host: one process per library, with the library loaded, from which fresh processes are
forked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from penstock.peers.messages import PeerFailed, PeerMissing

#: Imported in every host. torch.optim loads torch._dynamo when the first optimizer is made: loaded
#: beforehand, it counts for no system.
ALWAYS = ("torch", "torch._dynamo", "penstock.peers.rank", "penstock.peers.job")


@final
class Host:
    """The process of one library. Start hosts in the main thread: the kernel ends a host with the
    thread that started it.

    Args:
        imports: modules to load.
        folder: where the library is installed; put in front of the path of this process only.
        log: file for what the process prints.
        variables: environment variables to set.
    """

    def __init__(
        self,
        imports: Sequence[str],
        folder: Path | None,
        log: Path,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        self._versions: dict[str, str] | None = None
        self._missing: str | None = None
        names = [*imports, *(name for name in ALWAYS if name not in imports)]
        request = json.dumps({"imports": names, "parent": os.getpid()})
        # -P: a module in the current folder must not take the place of a library.
        command = [sys.executable, "-P", "-m", "penstock.peers.host_process", request]
        with log.open("ab") as errors:
            self.process = subprocess.Popen(  # noqa: S603 - this interpreter, no shell
                command,
                env=_environment(folder, variables or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                text=True,
            )

    def ready(self) -> dict[str, str]:
        """Wait until the modules are loaded, and return their versions.

        Raises:
            PeerMissing: a module is not installed.
            PeerFailed: the process ended while loading.
        """
        if self._versions is None and self._missing is None:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            if not line:
                raise PeerFailed(f"its imports ended the process; see {self.log}")
            message = json.loads(line)
            self._versions, self._missing = message.get("versions"), message.get("missing")
        if self._versions is None:
            raise PeerMissing(f"not installed: no module {self._missing}")
        return self._versions

    def fork(self, address: str, log: Path) -> None:
        """Fork a process, which connects to a socket and prints into a log.

        Raises:
            PeerFailed: the host has ended.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"address": address, "log": str(log)}) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise PeerFailed(f"the host process has ended; see {self.log}") from error

    def end(self) -> None:
        """End the process, and with it all processes forked from it."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def _environment(folder: Path | None, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a rank's process."""
    paths = [str(folder)] if folder else []
    # Penstock itself may be on the path only because of where Python was started.
    paths += [str(Path(__file__).parents[2])]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        **variables,
    }
