"""`penstock report`: a report of a training run or of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.errors import FileError

if TYPE_CHECKING:
    from penstock.report.document import Report


def report(
    source: Annotated[
        Path, typer.Argument(help="Folder of a training run (runs/NAME), or a plan (plan.json).")
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            help="HTML file to write; default: report.html in the run's folder, or "
            "PLAN-report.html beside the plan."
        ),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(help="Folder for report.md with its figures as SVG, as well."),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Folder for the tables and curves as CSV, as well.")
    ] = None,
) -> None:
    """Write a report as one HTML file that needs no network: plan and reasons, predicted and
    measured timeline, memory, loss, and suggestions.

    Example: penstock report runs/vgg11_bn-digits --markdown report --csv report
    """
    from penstock.report.csv import make_folder, write_csv
    from penstock.report.html import write_html
    from penstock.report.markdown import write_markdown
    from penstock.report.sources import move_sources

    content, default = _load(source)
    path = out or default
    for folder in (markdown, csv):
        if folder is not None:
            make_folder(folder)  # so that nothing is written if one cannot be made
    write_html(move_sources(content, default.parent, path.parent), path)
    typer.echo(f"wrote {path}")
    if markdown is not None:
        write_markdown(move_sources(content, default.parent, markdown), markdown)
        typer.echo(f"wrote {markdown / 'report.md'}")
    if csv is not None:
        tables = write_csv(content, csv)
        typer.echo(f"wrote {len(tables)} tables into {csv}")


def _load(source: Path) -> tuple[Report, Path]:
    """Return the report of a run or a plan, and where its HTML file stands by default.

    Raises:
        FileError: the source is neither, or is damaged.
    """
    from penstock.report.run_report import plan_report, run_report

    if (source / "records.jsonl").exists():
        raise FileError(
            f"{source} is the folder of a study, whose own command writes its report: "
            f"penstock study … --out {source}"
        )
    if source.is_dir():
        return run_report(source), source / "report.html"
    if not source.exists():
        raise FileError(
            f"{source} does not exist: name the folder of a run, such as runs/NAME, or a plan's file"
        )
    return plan_report(source), source.with_name(f"{source.stem}-report.html")
