"""Check the wheel and the source distribution in a folder: `check_package.py dist`.

Each must hold every file of the package, the licence and the type marker, and nothing else: no
tests, no caches. The wheel is then installed without torch into an environment of its own, where
`tests/test_without_torch.py` states what must work; here two commands show that it starts.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "penstock"
CACHES = {".pyc", ".nbi", ".nbc"}
#: What a source distribution has beside the package.
SDIST_FILES = {
    "CHANGELOG.md",
    "LICENSE",
    "MANIFEST.in",
    "PKG-INFO",
    "README.md",
    "pyproject.toml",
    "setup.cfg",
    "setup.py",
}


def package_files() -> set[str]:
    """Return the files of the package in this repository, below `penstock/`."""
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in CACHES)
    return {path.relative_to(PACKAGE).as_posix() for path in files}


def wheel_problems(path: Path) -> list[str]:
    """Return what is missing from the wheel, and what does not belong there."""
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        metadata_name = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(metadata_name).decode()
    installed = {name for name in names if ".dist-info/" not in name}
    expected = {f"penstock/{name}" for name in package_files()}
    problems = [f"{path.name} lacks {name}" for name in sorted(expected - installed)]
    problems += [f"{path.name} has {name}" for name in sorted(installed - expected)]
    if not any(name.endswith("licenses/LICENSE") for name in names):
        problems.append(f"{path.name} has no licence")
    # On a package index, such a link leads nowhere.
    dead = re.findall(r"\]\((?![a-z]+://)([^)\s]+)\)", metadata)
    problems += [f"the description in {path.name} links to {target}" for target in dead]
    if "# Penstock" not in metadata:
        problems.append(f"{path.name} has no description")
    return problems


def sdist_problems(path: Path) -> list[str]:
    """Return what is missing from the source distribution, and what does not belong there."""
    with tarfile.open(path) as archive:
        members = [member.name for member in archive.getmembers() if member.isfile()]
    names = {name.partition("/")[2] for name in members}
    metadata = {name for name in names if name.startswith("src/penstock.egg-info/")}
    expected = {f"src/penstock/{name}" for name in package_files()} | SDIST_FILES
    problems = [f"{path.name} lacks {name}" for name in sorted(expected - names)]
    problems += [f"{path.name} has {name}" for name in sorted(names - expected - metadata)]
    return problems


def check_installation(wheel: Path) -> None:
    """Install the wheel without torch into a fresh environment and run it there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        constraints = str(ROOT / "constraints.txt")
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-c", constraints, str(wheel)], check=True)
        start = [python, "-m", "penstock"]
        subprocess.run([*start, "doctor"], check=True, cwd=folder)
        ran = subprocess.run([*start, "train"], check=False, cwd=folder, capture_output=True)
    message = ran.stderr.decode()
    if ran.returncode != 2 or "pip install 'penstock[torch]'" not in message:
        sys.exit(f"penstock train without torch: status {ran.returncode}, {message}")


def main() -> None:
    """Check the distributions in the folder that the command line names."""
    folder = Path(sys.argv[1])
    wheels, sources = list(folder.glob("*.whl")), list(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sources) != 1:
        sys.exit(f"{folder} must hold one wheel and one source distribution, and nothing else")
    problems = wheel_problems(wheels[0]) + sdist_problems(sources[0])
    if problems:
        sys.exit("\n".join(problems))
    check_installation(wheels[0])
    print(f"{wheels[0].name} and {sources[0].name} are complete")


if __name__ == "__main__":
    main()
