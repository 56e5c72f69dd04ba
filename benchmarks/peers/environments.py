"""Folders that peers are installed in: each is put in front of the path of its own processes
only.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from adapters.catalogue import System

HERE = Path(__file__).parent
#: Where `--install` puts them.
FOLDERS = HERE / ".environments"
#: Lines NAME=PATH, for peers that are installed elsewhere already.
FILE = HERE / "environments.txt"


def environments(assignments: Iterable[str], peers: Iterable[str]) -> dict[str, Path]:
    """By peer: from the command line, else from `environments.txt`, else from `.environments/`."""
    folders = {peer: FOLDERS / peer for peer in peers if (FOLDERS / peer).is_dir()}
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    for entry in [*lines, *assignments]:
        name, _, path = entry.partition("=")
        if path and not entry.startswith("#"):
            folders[name.strip()] = Path(path.strip()).expanduser().resolve()
    return folders


def install(systems: Mapping[str, System], peers: Iterable[str]) -> None:
    """Put peers' packages into folders of their own. torch is the one that is there, so they bring
    none.
    """
    packages_of_peer = {
        system.peer: system.packages
        for system in systems.values()
        if system.packages and system.peer in peers
    }
    for peer, packages in packages_of_peer.items():
        folder = FOLDERS / peer
        print(f"installing {' '.join(packages)} into {folder}", flush=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-build-isolation",
            "--upgrade",
            "--target",
            str(folder),
            *packages,
        ]
        subprocess.run(command, check=True)
