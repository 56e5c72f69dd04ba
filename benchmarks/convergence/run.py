"""Which weight rules lose accuracy, and when? All of them on VGG-11 and on a character GPT, at 2, 4
and 8 stages, three seeds each.

The same as `penstock study convergence`, with its results kept here: results.json, table.md and the
figures. Records go to the study's folder as they come, so that an interrupted run goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from penstock.study.convergence.experiment import Experiment
from penstock.study.convergence.report import page, text
from penstock.study.convergence.study import Study

HERE = Path(__file__).parent
EXPERIMENT = Experiment(tasks=("digits", "gpt"), depths=(2, 4, 8), seeds=3)


def main() -> None:
    """Run what is not run yet, print the tables, keep the results here."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/convergence"),
        help="where records are kept as they come",
    )
    words.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="cases at a time"
    )
    arguments = words.parse_args()

    def say(line: object) -> None:
        print(line, file=sys.stderr, flush=True)

    results = Study(EXPERIMENT, arguments.folder, arguments.jobs).run(
        lambda _: lambda ended: say(ended.case), say
    )
    print(text(results))
    # All losses of all runs are a megabyte; means over nine batches or so make the same curves.
    (HERE / "results.json").write_text(results.as_json(thin=True))
    figures = sorted(arguments.folder.glob("*-*.png"))
    (HERE / "table.md").write_text(page(results, [figure.name for figure in figures]))
    for figure in figures:
        shutil.copy(figure, HERE / figure.name)


if __name__ == "__main__":
    main()
