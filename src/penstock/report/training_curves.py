"""Curves of a training run: loss, accuracy, step time, learning rate and gradient norm."""

from __future__ import annotations

import statistics

from penstock.report.document import Chart, Section, Series
from penstock.report.run_folder import METRICS, RunFolder
from penstock.report.scaled import scaled_bytes, scaled_seconds

#: With a step this many times as long as the median, the scale is logarithmic: the first step of a
#: run includes starting costs, and would make all others look alike.
_LOG_RATIO = 5.0
#: More ranks make a chart of their shares unreadable.
_MAX_RANK_CURVES = 8


def training_section(run: RunFolder) -> Section | None:
    """Return the curves of a run; None before its first step."""
    charts = [
        _loss_chart(run),
        _accuracy_chart(run),
        _step_chart(run),
        _number_chart(run, "lr", "Learning rate", "learning rate"),
        _number_chart(run, "grad_norm", "Gradient norm before clipping", "norm"),
        _rank_chart(run, "busy", "Busy share of the ranks", "share of the step"),
        _rank_chart(run, "peak_memory", "Peak memory of the ranks", "memory"),
    ]
    blocks = tuple(chart for chart in charts if chart is not None)
    return Section("Training", blocks) if blocks else None


def _series(run: RunFolder, key: str, name: str, *, epochs: bool = False) -> Series | None:
    """Return a curve of the metrics, None if nothing was recorded."""
    x, y = run.metrics.curve(key, epochs=epochs)
    return Series(name, tuple(x), tuple(y)) if x else None


def _loss_chart(run: RunFolder) -> Chart | None:
    """Return the training loss by step, with the test loss after every epoch."""
    candidates = (
        _series(run, "loss", "training, every step"),
        _series(run, "test_loss", "test, after every epoch", epochs=True),
    )
    series = tuple(curve for curve in candidates if curve is not None)
    if not series:
        return None
    return Chart("loss", "Loss", "step", "loss", series, source=(METRICS,))


def _accuracy_chart(run: RunFolder) -> Chart | None:
    """Return the test accuracy after every epoch, if there are several."""
    x, y = run.metrics.curve("test_accuracy", epochs=True)
    if len(x) < 2:
        return None
    series = Series("test", tuple(x), tuple(100 * share for share in y))
    return Chart(
        "accuracy", "Test accuracy", "step", "correct predictions, %", (series,), source=(METRICS,)
    )


def _step_chart(run: RunFolder) -> Chart | None:
    """Return the time of every step, and the predicted time as a line."""
    x, y = run.metrics.curve("step_s")
    if not x:
        return None
    predicted = run.plan.predicted.step_s
    # The first step includes starting costs: it does not decide the unit.
    unit, factor = scaled_seconds([statistics.median(y), predicted])
    ends = (x[0], x[-1])
    series = (
        Series("measured", tuple(x), tuple(value / factor for value in y)),
        Series("predicted", ends, (predicted / factor,) * 2),
    )
    return Chart(
        "step-time",
        "Time of a step",
        "step",
        f"time, {unit}",
        series,
        log_y=max(y) > _LOG_RATIO * statistics.median(y),
        source=(METRICS,),
    )


def _number_chart(run: RunFolder, key: str, title: str, label: str) -> Chart | None:
    """Return the curve of a number that is recorded every step, unless it is constant."""
    curve = _series(run, key, "")
    if curve is None or len(set(curve.y)) == 1:
        return None
    return Chart(key.replace("_", "-"), title, "step", label, (curve,), source=(METRICS,))


def _rank_chart(run: RunFolder, key: str, title: str, label: str) -> Chart | None:
    """Return a value per rank after every epoch; None for fewer than two epochs or many ranks."""
    rows = _rows_of_ranks(run, key)
    counts = {len(numbers) for _, numbers in rows}
    if len(rows) < 2 or len(counts) != 1 or not 1 <= max(counts) <= _MAX_RANK_CURVES:
        return None
    factor = 1.0
    if key == "peak_memory":
        unit, factor = scaled_bytes([max(numbers) for _, numbers in rows])
        label = f"{label}, {unit}"
    series = []
    for rank in range(max(counts)):
        x = tuple(float(step) for step, _ in rows)
        series.append(Series(f"rank {rank}", x, tuple(row[rank] / factor for _, row in rows)))
    return Chart(key.replace("_", "-"), title, "step", label, tuple(series), source=(METRICS,))


def _rows_of_ranks(run: RunFolder, key: str) -> list[tuple[int, list[float]]]:
    """Return the step of every epoch that has one number per rank under a key, and the numbers."""
    rows = []
    for step, values in run.metrics.epochs.items():
        numbers = values.get(key)
        if isinstance(numbers, list) and all(isinstance(item, int | float) for item in numbers):
            rows.append((step, numbers))
    return rows
