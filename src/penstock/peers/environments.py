"""Folders that libraries are installed in, each put on the path of its own processes only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from penstock.errors import RunError, SettingError, UnknownName
from penstock.peers.catalogue import System, systems

#: Environment variable with another place for installed libraries.
FOLDER_VARIABLE = "PENSTOCK_PEERS"


def default_folder() -> Path:
    """Return the folder in which `install` puts libraries, one subfolder per library."""
    if FOLDER_VARIABLE in os.environ:
        return Path(os.environ[FOLDER_VARIABLE]).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return cache / "penstock" / "peers"


def find_environments(assignments: Iterable[str]) -> dict[str, Path]:
    """Return the folder of each library that has one: those of `install`, and assigned ones.

    Args:
        assignments: texts `NAME=PATH`.

    Raises:
        SettingError: a text has no name or path, or the path is no folder.
        UnknownName: there is no system of that name.
    """
    names = systems()
    folders = {name: default_folder() / name for name in names}
    environments = {name: folder for name, folder in folders.items() if folder.is_dir()}
    for assignment in assignments:
        name, equals, path = assignment.partition("=")
        if not equals or not name or not path:
            raise SettingError(f"--environment {assignment}: write NAME=PATH")
        if name not in names:
            raise UnknownName("system", name, names)
        folder = Path(path).expanduser().resolve()
        if not folder.is_dir():
            raise SettingError(f"--environment {assignment}: there is no folder {folder}")
        environments[name] = folder
    return environments


def installable() -> dict[str, System]:
    """Return the systems that need packages besides torch."""
    return {name: system for name, system in systems().items() if system.packages}


def install(names: Iterable[str]) -> dict[str, Path]:
    """Install libraries with pip, each into its own folder.

    Their dependencies are not installed: torch is the one of this environment, and the packages
    that a library needs besides are listed in its file in `systems/`.

    Args:
        names: of systems; none: all that need packages.

    Returns:
        The folder by name.

    Raises:
        SettingError: a name is of no system that needs packages.
        RunError: pip failed.
    """
    available = installable()
    chosen = list(names) or list(available)
    for name in chosen:
        if name not in available:
            raise SettingError(
                f"{name!r} cannot be installed; there are: {', '.join(sorted(available))}"
            )
    folders = {}
    for name in chosen:
        folders[name] = default_folder() / name
        _pip(available[name].packages, folders[name])
    return folders


def _pip(packages: tuple[str, ...], folder: Path) -> None:
    """Install packages into a folder with pip, without what they depend on."""
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
    process = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    if process.returncode:
        lines = (process.stderr or process.stdout).strip().splitlines()
        reason = lines[-1] if lines else f"status {process.returncode}"
        raise RunError(f"pip could not install {' '.join(packages)}: {reason}")
