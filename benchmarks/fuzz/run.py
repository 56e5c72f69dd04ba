"""Read damaged files of every kind for some minutes, and report what is neither read nor refused
with one line.

The files, and the ways to damage them, are those of tests/files; seeds are random and recorded, so
that a failure can be repeated with --seed.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.files.damage import damaged  # noqa: E402 - of the repository, located by the line above
from tests.files.readers import READERS, run  # noqa: E402

#: Files that are drawn from one seed. Later draws of a seed repeat more of what was drawn before.
FILES_PER_SEED = 100

#: Seconds for one file. Slower readers are reported; hundreds of files take 1 ms each.
LIMIT_S = 1.0


@dataclass
class Tally:
    """What became of the files of one kind.

    Attributes:
        files, accepted: number of files, and of those that were read without a message.
        slowest_s: seconds of the slowest file.
        failures: what was neither read nor refused with one line in time.
    """

    files: int = 0
    accepted: int = 0
    slowest_s: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)


def problem(message: str | None, seconds: float) -> str | None:
    """Return what is wrong with the message of a refused file, or with its seconds."""
    if seconds > LIMIT_S:
        return f"took {seconds:.2f} s"
    if message is None:
        return None
    if "\n" in message or not message.isprintable():
        return f"message of several lines: {message[:200]!r}"
    return "message of 1,000 characters or more" if len(message) >= 1000 else None


def read_files(kind: str, number: int, tally: Tally, folder: Path) -> None:
    """Read the files of one kind that a seed gives."""
    reader = READERS[kind]
    content = reader.content(folder)
    tree = reader.parse(content) if reader.parse else None

    @seed(number)
    @settings(
        max_examples=FILES_PER_SEED,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(damaged(content, tree))
    def read(file: bytes) -> None:
        """Read one file, and count it."""
        begin = time.process_time()
        message: str | None = None
        failure: str | None
        try:
            message = run(reader, file, folder)
            failure = problem(message, time.process_time() - begin)
        except Exception:  # noqa: BLE001 - any exception that a reader lets out is a failure
            failure = traceback.format_exc(limit=-2)
        tally.files += 1
        tally.accepted += message is None and failure is None
        tally.slowest_s = max(tally.slowest_s, time.process_time() - begin)
        if failure is not None:
            tally.failures.append({"seed": number, "problem": failure, "file": file[:2000].hex()})

    read()


def _peak_mib() -> int:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> int:
    """Read files until the time is over, write results.json. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="time to spend")
    parser.add_argument(
        "--only", default="", help="read only kinds of files with this in their names"
    )
    parser.add_argument("--seed", type=int, default=None, help="draw the files of one seed only")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results.json")
    arguments = parser.parse_args()
    kinds = [kind for kind in READERS if arguments.only in kind]
    tallies = {kind: Tally() for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for kind in kinds:  # what a reader imports and keeps does not count as memory of a file
            run(READERS[kind], READERS[kind].content(Path(folder)), Path(folder))
    before_mib = _peak_mib()
    end = time.monotonic() + 60 * arguments.minutes
    while time.monotonic() < end:
        number = random.SystemRandom().getrandbits(32)
        number = number if arguments.seed is None else arguments.seed
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            for kind in kinds:
                read_files(kind, number, tallies[kind], Path(folder))
        if arguments.seed is not None:
            break
    failures = sum(len(tally.failures) for tally in tallies.values())
    for kind, tally in tallies.items():
        print(
            f"{kind:<32} {tally.files:>7} files, {tally.accepted:>6} accepted, slowest "
            f"{tally.slowest_s:.2f} s, {len(tally.failures)} failures"
        )
        for problem_text in {failure["problem"] for failure in tally.failures}:
            print(f"    {problem_text}")
    results = {
        "minutes": arguments.minutes,
        "files": sum(tally.files for tally in tallies.values()),
        "failures": failures,
        "peak_memory_mib": _peak_mib(),
        "peak_memory_of_files_mib": _peak_mib() - before_mib,
        "python": platform.python_version(),
        "kinds": {kind: asdict(tally) for kind, tally in tallies.items()},
    }
    if not arguments.only and arguments.seed is None:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
