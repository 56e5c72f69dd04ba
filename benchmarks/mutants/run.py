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
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

from defects import DEFECTS, Defect

ROOT = Path(__file__).parents[2]
#: Exit status of pytest when it knows no test of a given name.
_NO_SUCH_TEST = 4
#: The name of a test in a line of pytest, without its parameters and the message behind it.
_FAILED_TEST = re.compile(r"FAILED (tests/\S+?::\w+)")


def run_tests(copy: Path, tests: Sequence[str], limit_s: float) -> str:
    """Return how tests end on the copy: passed, failed, time out, or not there."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
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
    if status == _NO_SUCH_TEST:
        return "not there"
    if status not in (1, 2):  # neither a failed test nor a module that cannot be imported
        raise SystemExit(f"pytest cannot run {' '.join(tests)}: {lines[-1:]}")
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (failures or lines[-1:])[0]


def check(
    copy: Path, defect: Defect, limit_s: float, last_line: str | None = None
) -> dict[str, object]:
    """Apply a defect, run the tests, and restore the file.

    Args:
        copy: of the repository.
        defect: to apply.
        limit_s: seconds for the tests.
        last_line: pytest's line of the test that failed when the defect was checked last: it runs
            first, and the others only if it passes.
    """
    path = copy / "src" / "penstock" / defect.file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    row: dict[str, object] = {"what": defect.what, "file": defect.file}
    if text.count(defect.old) != 1:
        return {**row, "result": "stale", "by": f"the text occurs {text.count(defect.old)} times"}
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_text(text.replace(defect.old, defect.new), encoding="utf-8")
    started = time.monotonic()
    try:
        outcome = "passed"
        last_test = _FAILED_TEST.match(last_line or "")
        if last_test is not None:
            outcome = run_tests(copy, [last_test[1]], limit_s)
        if outcome in ("passed", "not there"):
            outcome = run_tests(copy, defect.tests, limit_s)
        if outcome == "not there":
            raise SystemExit(f"there are no such tests: {' '.join(defect.tests)}")
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=times)  # compiled kernels of the sound file stay valid
    row["result"] = {"passed": "survived", "time out": "time out"}.get(outcome, "killed")
    return {**row, "by": outcome, "seconds": round(time.monotonic() - started)}


def make_copy(folder: Path) -> Path:
    """Copy what the tests need into a folder, and return it."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "tests", "benchmarks", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    return folder


def check_all(
    defects: Sequence[Defect], jobs: int, limit_s: float, last_lines: Mapping[str, str]
) -> list[dict[str, object]]:
    """Check all defects, `jobs` at a time, each in a copy of its own; print a line for each.

    Args:
        defects: to check.
        jobs: how many at a time.
        limit_s: seconds for the tests of a defect.
        last_lines: by defect, the line of the test that runs first (see `check`).
    """
    copies: Queue[Path] = Queue()

    def check_in_copy(defect: Defect) -> dict[str, object]:
        """Check one defect in a copy that is free."""
        copy = copies.get()
        try:
            row = check(copy, defect, limit_s, last_lines.get(defect.what))
        finally:
            copies.put(copy)
        print(f"{row['result']:9} {row.get('seconds', 0):4} s  {row['what']}: {row['by']}")
        sys.stdout.flush()
        return row

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for job in range(jobs):
            copies.put(make_copy(Path(folder) / str(job)))
        with ThreadPoolExecutor(jobs) as executor:
            return list(executor.map(check_in_copy, defects))


def count_results(rows: Sequence[dict[str, object]]) -> dict[str, int]:
    """Return the number of rows with each result."""
    return {
        result: sum(row["result"] == result for row in rows)
        for result in ("killed", "survived", "time out", "stale")
    }


def read_rows(path: Path) -> dict[str, dict[str, object]]:
    """Return the rows of a file of results by defect; none if there is no file."""
    rows = json.loads(path.read_text())["defects"] if path.exists() else []
    return {row["what"]: row for row in rows}


def write_results(rows: Sequence[dict[str, object]], path: Path, command: str) -> None:
    """Write the command and its rows, and those of defects that were not checked this time."""
    row_of = read_rows(path) | {str(row["what"]): row for row in rows}
    listed = [row_of[defect.what] for defect in DEFECTS if defect.what in row_of]
    results = {"command": command, "counts": count_results(listed), "defects": listed}
    path.write_text(json.dumps(results, indent=1) + "\n")


def main() -> int:
    """Print a line per defect and write results.json. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help="regular expression that a defect's line contains"
    )
    parser.add_argument("--jobs", type=int, default=1, help="defects to check at a time")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for a defect's tests")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results.json")
    parser.add_argument(
        "--last-first",
        action="store_true",
        help="first run the test that failed last according to the output file",
    )
    arguments = parser.parse_args()
    chosen = [
        defect for defect in DEFECTS if re.search(arguments.only, f"{defect.what} {defect.file}")
    ]
    last_lines = {}
    if arguments.last_first:
        last_lines = {what: str(row["by"]) for what, row in read_rows(arguments.output).items()}
    rows = check_all(chosen, arguments.jobs, arguments.limit, last_lines)
    counts = count_results(rows)
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    write_results(rows, arguments.output, shlex.join(["run.py", *sys.argv[1:]]))
    return int(counts["killed"] < len(rows))


if __name__ == "__main__":
    sys.exit(main())
