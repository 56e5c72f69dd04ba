"""The tests marked `gpu`, by pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree as ET

from kit.section import Section

ROOT = Path(__file__).parents[3]
FILES = ("tests/devices/test_gpu.py", "tests/measure/test_card_ipc.py")


def measure(section: Section) -> None:
    """Counts, and the names of what failed."""
    section.attempt("pytest -m gpu", lambda: _run(section))
    section.require_right()


def _run(section: Section) -> dict[str, object]:
    report = section.out / "junit.xml"
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={report}", *FILES]
    if find_spec("xdist") is not None and not section.smoke:
        words += ["-n", "6"]
    if find_spec("pytest_timeout") is not None:
        words += ["--timeout", "60"]
    exit_status = _here(words[3:]) if section.smoke else _in_process(words, section)
    suite = ET.parse(report).getroot()
    cases = list(suite.iter("testcase"))
    bad = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = [str(case.get("name")) for case in bad]
    passed = len(cases) - len(bad) - len(skipped)
    counts = {"passed": passed, "failed": len(bad), "skipped": len(skipped), "names": names}
    if exit_status != 0:
        return {"status": "failed", "pytest_exit": exit_status, **counts}
    if section.on_gpu and passed == 0:
        return {"status": "failed", "note": "nothing was run", **counts}
    return {"status": "measured" if section.on_gpu else "not on this machine", **counts}


def _in_process(words: list[str], section: Section) -> int:
    """Run pytest in a process of its own, with what deterministic cuBLAS needs."""
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    seconds = max(5.0, section.seconds_left())
    return subprocess.run(words, cwd=ROOT, env=environment, timeout=seconds, check=False).returncode


def _here(words: list[str]) -> int:
    """Run pytest in this process: to import torch again would take most of a smoke run's time."""
    import pytest

    os.chdir(ROOT)
    return int(pytest.main(words))
