"""The hosts of a study: started when a system first needs one, shared by systems with the same
modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import final

from penstock.peers.catalogue import System
from penstock.peers.host import Host


@final
class Hosts:
    """Hosts by what they have loaded. Use as a context manager: its end ends all processes.

    Args:
        environments: folder of a library, by the name of its system.
        logs: folder for what the hosts print.
    """

    def __init__(self, environments: Mapping[str, Path], logs: Path) -> None:
        self._environments = dict(environments)
        self._logs = logs
        self._hosts: dict[tuple[object, ...], Host] = {}

    def of(self, system: System) -> Host:
        """Return the host of a system. Call it in the main thread, see `Host`."""
        folder = self._environments.get(system.name) if system.packages else None
        return self.start(system.name, system.imports, folder, system.variables)

    def start(
        self,
        name: str,
        imports: tuple[str, ...],
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Host:
        """Return the host with some modules; `name` is that of its log."""
        key = (imports, folder, tuple((variables or {}).items()))
        if key not in self._hosts:
            self._logs.mkdir(parents=True, exist_ok=True)
            log = self._logs / f"host-{name}.txt"
            log.unlink(missing_ok=True)
            self._hosts[key] = Host(imports, folder, log, variables)
        return self._hosts[key]

    def end(self) -> None:
        """End all hosts, and with them every process forked from them."""
        for host in self._hosts.values():
            host.end()
        self._hosts.clear()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
