"""Apply hand-made defects to a copy of the source, one at a time, and see whether the mirrored
tests notice.

A defect is killed if a test fails, and has survived if all tests pass. If they do not end in time,
that is said: the defect may hang, or the machine is busy. A defect whose text the source no longer
has is stale: adapt it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from defects import DEFECTS, Defect

ROOT = Path(__file__).parents[2]


def run_tests(copy: Path, defect: Defect, limit_s: float) -> str:
    """Return how the mirrored tests end on the copy: passed, failed, or time out."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *defect.tests]
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return "time out"
        output.seek(0)
        lines = output.read().splitlines()
    if status == 0:
        return "passed"
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (failures or lines[-1:] or [f"status {status}"])[0]


def check(copy: Path, defect: Defect, limit_s: float) -> dict[str, object]:
    """Apply a defect, run the tests, and restore the file."""
    path = copy / "src" / "penstock" / defect.file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    row: dict[str, object] = {"what": defect.what, "file": defect.file}
    if text.count(defect.old) != 1:
        return {**row, "result": "stale", "by": f"the text occurs {text.count(defect.old)} times"}
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_text(text.replace(defect.old, defect.new), encoding="utf-8")
    started = time.monotonic()
    try:
        outcome = run_tests(copy, defect, limit_s)
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=times)  # compiled kernels of the sound file stay valid
    row["result"] = {"passed": "survived", "time out": "time out"}.get(outcome, "killed")
    return {**row, "by": outcome, "seconds": round(time.monotonic() - started)}


def main() -> int:
    """Print a line per defect and write results.json. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help="regular expression that a defect's line contains"
    )
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for a defect's tests")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results.json")
    arguments = parser.parse_args()
    chosen = [
        defect for defect in DEFECTS if re.search(arguments.only, f"{defect.what} {defect.file}")
    ]
    rows = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        for name in ("src", "tests", "benchmarks", "docs", "examples"):
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
            shutil.copy(ROOT / name, copy)
        for defect in chosen:
            row = check(copy, defect, arguments.limit)
            rows.append(row)
            print(f"{row['result']:9} {row.get('seconds', 0):4} s  {row['what']}: {row['by']}")
            sys.stdout.flush()
    counts = {
        result: sum(row["result"] == result for row in rows)
        for result in ("killed", "survived", "time out", "stale")
    }
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    if not arguments.only:
        arguments.output.write_text(
            json.dumps({"counts": counts, "defects": rows}, indent=1) + "\n"
        )
    return int(counts["killed"] < len(rows))


if __name__ == "__main__":
    sys.exit(main())
