"""summary.txt: what a reader wants to know first."""

from __future__ import annotations

from collections import Counter

from kit.results import Results, Row

#: What a row says besides its name and status.
HIDDEN = ("row", "status")


def summary(results: Results) -> str:
    """The whole run as text: verdicts on predictions last, where a terminal shows them."""
    machine = results.machine
    lines = [
        f"Penstock GPU benchmark, commit {results.kit}",
        f"{results.ended} after {results.seconds:.0f} s of {results.limit_s:.0f} s",
        f"{machine.get('gpu') or 'no GPU'}, device {results.device}",
        f"torch {machine.get('torch')}, Python {machine.get('python')}",
    ]
    if results.smoke:
        lines.append("small sizes (--smoke): it shows that everything runs, and times mean nothing")
    for section in results.sections:
        counts = Counter(row["status"] for row in section.rows)
        counted = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        lines += ["", f"{section.name}: {section.status}, {section.seconds:.1f} s; {counted}"]
        lines += [f"  {_line(row)}" for row in section.rows]
        if section.error:
            lines += [f"  | {line}" for line in section.error.splitlines()]
    lines += ["", "expected"]
    lines += [f"  {_expected(row)}" for row in results.expected if row["found"] is not None]
    verdicts = Counter(row["verdict"] for row in results.expected)
    lines.append("verdicts: " + ", ".join(f"{count} {name}" for name, count in verdicts.items()))
    statuses = Counter(section.status for section in results.sections)
    lines.append("sections: " + ", ".join(f"{count} {name}" for name, count in statuses.items()))
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    values = [f"{key} {value}" for key, value in row.items() if key not in HIDDEN]
    status = "" if row["status"] == "measured" else f"[{row['status']}] "
    return f"{row['row']:44} {status}{'  '.join(values)}"[:400]


def _expected(row: Row) -> str:
    range_ = "no prediction" if row["low"] is None else f"{row['low']} to {row['high']}"
    return f"{row['row']:64} {row['found']:>10}  ({range_}) {row['verdict']}"
