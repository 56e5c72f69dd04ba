"""Describe the report on a sound schedule as text: staleness, versions and memory per stage."""

from __future__ import annotations

from penstock.text_table import row
from penstock.verify.verify import Report


def describe(report: Report) -> str:
    """Describe a report in lines for a terminal."""
    stages, ranks = len(report.versions), len(report.peak_on_rank)
    summary = f"{report.schedule} is sound: {stages} stages on {ranks} ranks"
    return "\n".join([summary, *(f"  {line}" for line in figures(report))])


def figures(report: Report) -> list[str]:
    """Return the lines of a report without the first, which names the schedule."""
    staleness_max = row(report.staleness_max)
    staleness_mean = row(f"{mean:.4g}" for mean in report.staleness_mean)
    lines = [
        (
            f"staleness per stage       max {staleness_max}, mean {staleness_mean}, "
            f"weight rule {report.weights}"
        )
    ]
    if any(report.staleness_across):
        across = row(report.staleness_across)
        lines.append(f"staleness to replicas     at most {across} batches")
    in_flight, on_rank = row(report.peak_in_flight), row(report.peak_on_rank)
    return [
        *lines,
        f"weight versions per stage {row(report.versions)}",
        f"peak in flight per stage  {in_flight}, per rank {on_rank}",
        (
            f"channel depth             {report.channel_depth} "
            "(messages a blocking channel must buffer)"
        ),
    ]
