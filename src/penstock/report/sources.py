"""Links to raw data when a report stands in another folder than the data."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from penstock.report.document import Block, Chart, Page, Report, Section, Table


def move_sources(report: Report, folder: Path, target: Path) -> Report:
    """Return a report whose links to raw data are relative to another folder.

    Args:
        report: its links are relative to `folder`.
        folder: of the raw data.
        target: of the report.
    """
    if folder.resolve() == target.resolve():
        return report
    prefix = Path(os.path.relpath(folder.resolve(), target.resolve()))
    return replace(report, pages=tuple(_move_page(page, prefix) for page in report.pages))


def _move_page(page: Page, prefix: Path) -> Page:
    """Return a page with a path before its links to raw data."""
    sections = []
    for section in page.sections:
        blocks = tuple(_move_block(block, prefix) for block in section.blocks)
        sections.append(Section(section.title, blocks))
    return replace(page, sections=tuple(sections))


def _move_block(block: Block, prefix: Path) -> Block:
    """Return a block with a path before its links to raw data."""
    if not isinstance(block, Table | Chart):
        return block
    return replace(block, source=tuple(str(prefix / path) for path in block.source))
