"""The papers again, by simulation: published numbers and ours side by side."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from side_by_side import Section, table

HERE = Path(__file__).parent
#: Papers in the order of the page: each a module with `sections`.
PAPERS = ("study", "bapipe", "pipedream", "dapple", "gpipe")
START, END = "<!-- tables, written by run.py -->", "<!-- end of the tables -->"


def simulate(papers: Sequence[str]) -> dict[str, list[Section]]:
    """All sections of some papers."""
    results = {}
    start = time.perf_counter()

    def report(words: str) -> None:
        print(f"{time.perf_counter() - start:6.0f} s  {words}", file=sys.stderr, flush=True)

    for paper in papers:
        results[paper] = importlib.import_module(paper).sections(report)
    return results


def page(sections: Sequence[Section]) -> str:
    """A table of how far off each table is, then all of them."""
    overview = table(
        ("table", "how far off"), [(section.title, section.summary()) for section in sections]
    )
    return "\n\n".join([overview, *(section.markdown() for section in sections)])


def merged_results(
    path: Path, sections_of_paper: dict[str, list[Section]]
) -> dict[str, list[dict[str, Any]]]:
    """What results.json had, and what was found now instead of it."""
    before = json.loads(path.read_text(encoding="utf-8"))["papers"] if path.exists() else {}
    results = dict(before)
    for paper, sections in sections_of_paper.items():
        results[paper] = [section.data() for section in sections]
    return {paper: results[paper] for paper in PAPERS if paper in results}


def rewritten(text: str, tables: str) -> str:
    """A page with new tables between its marks."""
    head, _, rest = text.partition(START)
    _, _, tail = rest.partition(END)
    return f"{head}{START}\n\n{tables}\n\n{END}{tail}"


def main() -> None:
    """Print the tables, write results.json and the README's tables."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--only", default=",".join(PAPERS), help=f"some of {','.join(PAPERS)}")
    words.add_argument("--out", type=Path, default=HERE / "results.json")
    words.add_argument("--page", type=Path, default=HERE / "README.md")
    arguments = words.parse_args()
    papers = [paper for paper in PAPERS if paper in arguments.only.split(",")]
    unknown = set(arguments.only.split(",")) - set(PAPERS)
    if unknown:
        words.error(f"no paper called {', '.join(sorted(unknown))}: there are {', '.join(PAPERS)}")
    results = merged_results(arguments.out, simulate(papers))
    machine = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    arguments.out.write_text(
        json.dumps({"machine": machine, "papers": results}, indent=1) + "\n", encoding="utf-8"
    )
    sections_of_paper = {}
    for paper, sections in results.items():
        sections_of_paper[paper] = [Section.of(data) for data in sections]
    print(page([section for paper in papers for section in sections_of_paper[paper]]))
    if arguments.page.exists():
        whole_page = page(
            [section for sections in sections_of_paper.values() for section in sections]
        )
        arguments.page.write_text(
            rewritten(arguments.page.read_text(encoding="utf-8"), whole_page), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
