"""Section on the simulated A100: points, quality of the fit, and a chart."""

from __future__ import annotations

import statistics

from penstock.report.document import Chart, Column, Section, Series, Table, Text, Value
from penstock.study.paper.fit_quality import (
    CLOSE,
    Point,
    distinct_points,
    r_squared,
    r_squared_within,
)
from penstock.study.paper.published import GPUS, published_cells
from penstock.study.paper.simulated import (
    fit_engine,
    fit_host,
    is_fitted,
    simulated_seconds,
)

_POINT_COLUMNS = (
    Column("libraries"),
    Column("M", "number", 0),
    Column("devices", "number", 0),
    Column("cells", "number", 0, "published numbers that are one number in the simulation"),
    Column("published", "seconds", about="geometric mean of the cells"),
    Column("spread", "percent", 0, "largest over smallest of the cells, less 1"),
    Column("simulated", "seconds"),
    Column("error", "percent", 0, "the larger over the smaller, less 1"),
    Column("fitted", about="whether a constant is fitted to one of the cells"),
)
_IN_ONE_PROCESS = "torchgpipe, FairScale"


def simulation_section() -> Section:
    """Return the section."""
    points = distinct_points()
    host, _ = fit_host()
    engine, _ = fit_engine()
    fitted = Text(
        "Simulated: GPipe with backwards in reverse order, a thread per device and one lock for "
        "all; DeepSpeed 1F1B with a process per device. The device itself is the A100's roofline; "
        f"the host's constants are fitted. One process: {host.launch_s * 1e6:.0f} us for a launch, "
        f"of which {host.locked:.0%} with the lock, and {host.task_s * 1e3:.2f} ms for each "
        "forward or backward of a stage, to the four cells of torchgpipe by time at M = 16. "
        f"DeepSpeed: {engine.launch_s * 1e6:.0f} us for a launch and {engine.task_s * 1e3:.2f} ms "
        "for each forward or backward, to its two cells by uniform on 2 and 8 devices."
    )
    blocks = (fitted, Text(quality_text(points)), _point_table(points), _quality_table(points))
    return Section("Simulated A100", (*blocks, _chart(points)))


def quality_text(points: list[Point]) -> str:
    """Return the quality of the fit in sentences, by distinct points."""
    predicted = [point for point in points if not point.fitted]
    close = sum(point.error <= CLOSE for point in predicted)
    errors = [point.error for point in predicted]
    spread = statistics.median(point.spread for point in points)
    return (
        f"The 48 published cells of {_IN_ONE_PROCESS} are {len(points)} distinct points, because "
        f"the four cells of a point are near-copies (spread: median {spread:.0%}). Constants are "
        f"fitted to {len(points) - len(predicted)} points; of the other {len(predicted)}, {close} "
        f"are within {CLOSE:.0%}, median error {statistics.median(errors):.0%}, worst "
        f"{max(errors):.0%}."
    )


def _point_table(points: list[Point]) -> Table:
    """Return a row per distinct point."""
    rows: list[tuple[Value, ...]] = []
    for point in points:
        rows.append(
            (
                _IN_ONE_PROCESS,
                point.micro_batches,
                point.gpus,
                4,
                point.published_s,
                point.spread,
                point.simulated_s,
                point.error,
                "yes" if point.fitted else "",
            )
        )
    for gpus in GPUS:
        cells = [
            cell for cell in published_cells() if cell.library == "deepspeed" and cell.gpus == gpus
        ]
        seconds = [cell.seconds for cell in cells]
        published_s = statistics.geometric_mean(seconds)
        simulated_s = simulated_seconds(cells[0])
        error = max(simulated_s / published_s, published_s / simulated_s) - 1
        fitted = "yes" if any(is_fitted(cell) for cell in cells) else ""
        spread = max(seconds) / min(seconds) - 1
        rows.append(
            ("DeepSpeed", 16, gpus, len(cells), published_s, spread, simulated_s, error, fitted)
        )
    return Table(
        "simulated",
        "Seconds of 25 epochs, published and simulated, by distinct points",
        _POINT_COLUMNS,
        tuple(rows),
        "At M = 1 the published times are not explained: two devices take 1.5 times as long as "
        "four, where one micro-batch visits all devices one after the other, however many they "
        "are.",
    )


def _quality_table(points: list[Point]) -> Table:
    """Return R² by number of micro-batches."""
    rows: list[tuple[Value, ...]] = []
    for micro_batches in (1, 8, 16):
        count = sum(point.micro_batches == micro_batches for point in points)
        rows.append((f"M = {micro_batches}", count, r_squared_within(points, micro_batches)))
    held_out = [point for point in points if not point.fitted]
    rows += [
        ("all M", len(points), r_squared_within(points)),
        ("held out", len(held_out), r_squared_within(held_out)),
    ]
    deepspeed = [cell for cell in published_cells() if cell.library == "deepspeed"]
    by_gpus = []
    for gpus in GPUS:
        seconds = [cell.seconds for cell in deepspeed if cell.gpus == gpus]
        by_gpus.append(statistics.geometric_mean(seconds))
    simulated = [
        simulated_seconds(next(cell for cell in deepspeed if cell.gpus == gpus)) for gpus in GPUS
    ]
    rows.append(("DeepSpeed", len(GPUS), r_squared(by_gpus, simulated)))
    columns = (Column("points"), Column("number", "number", 0), Column("R²", "number", 2))
    return Table(
        "fit",
        "R² of logarithms of seconds",
        columns,
        tuple(rows),
        "Over all M the value is mostly that of M itself: more micro-batches take longer. "
        "Negative: the mean of the published times is the better prediction.",
    )


def _chart(points: list[Point]) -> Chart:
    """Return published and simulated seconds by devices."""
    series = []
    for micro_batches in (1, 8, 16):
        chosen = [point for point in points if point.micro_batches == micro_batches]
        x = tuple(float(point.gpus) for point in chosen)
        series.append(
            Series(f"M = {micro_batches}, published", x, tuple(p.published_s for p in chosen))
        )
        series.append(
            Series(f"M = {micro_batches}, simulated", x, tuple(p.simulated_s for p in chosen))
        )
    return Chart(
        "simulated-chart",
        f"25 epochs of {_IN_ONE_PROCESS}: published and simulated",
        "devices",
        "seconds of 25 epochs",
        tuple(series),
        log_y=True,
        caption="One process stops scaling at four devices, and more micro-batches cost more "
        "launches than they save waiting.",
    )
