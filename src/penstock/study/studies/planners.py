"""`penstock study planners`: every planner on the clusters of the papers, by one simulator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from penstock.profile.profile import Profile
from penstock.report.document import Chart, Column, Page, Report, Section, Series, Table, Value
from penstock.study.catalogue import register
from penstock.study.cell import Cell, options
from penstock.study.records import Outcome, Record
from penstock.study.settings import Settings
from penstock.study.tables import reason_of

STUDY = "planners"
#: By name: model, its options, and samples per batch.
_WORKLOADS: dict[str, tuple[str, dict[str, int], int]] = {
    "vgg16": ("vgg16", {"image": 224}, 1024),
    "resnet50": ("resnet50", {"image": 224}, 1024),
    "gnmt16": ("gnmt16", {"hidden": 1024}, 1024),
    "gpt-1.3b": (
        "gpt",
        {"layers": 24, "width": 2048, "heads": 32, "tokens": 1024, "vocabulary": 50304},
        512,
    ),
}
_SMALL_WORKLOADS = ("vgg16", "gpt-1.3b")
_CLUSTERS = {
    "small": ("4xV100-10GbE", "PipeDream-A"),
    "full": (
        "4xV100-10GbE",
        "PipeDream-A",
        "PipeDream-B",
        "PipeDream-C",
        "DAPPLE-A",
        "DAPPLE-B",
        "DAPPLE-C",
        "BaPipe-4xV100",
        "BaPipe-8xV100",
        "Chimera",
        "DGX-A100",
        "DGX-H100",
    ),
}
#: Seconds per plan; "small" has to end within minutes on two cores.
_BUDGET_S = {"small": 10.0, "full": 60.0}
_TOKENS_OF_GNMT = 50


def measure(cell: Cell, folder: Path) -> Outcome:
    """Plan with the planner that the cell names, and return the plan's simulated step.

    Raises:
        PenstockError: the planner has no plan for this model and cluster.
    """
    del folder
    from penstock.cluster.cluster import cluster
    from penstock.search.catalogue import plan

    target = cluster(str(cell.option("cluster")))
    profile = _profile(cell, target.devices[0].name)
    started = time.perf_counter()
    best = plan(
        profile,
        target,
        cell.batch,
        planner=cell.system,
        budget_s=_BUDGET_S[str(cell.option("scale"))],
    )
    planning_s = time.perf_counter() - started
    predicted = best.predicted
    return Outcome(
        seconds=(predicted.step_s,),
        peak_bytes=predicted.peak_memory,
        extra={
            "schedule": best.schedule_name,
            "stages": best.stages,
            "ranks": best.ranks,
            "micro_batches": best.micro_batches,
            "recompute": best.recompute.value,
            "lengths": list(best.lengths),
            "bubble_ratio": predicted.bubble_ratio,
            "lower_bound_s": predicted.lower_bound_s,
            "data_parallel_s": predicted.data_parallel_s,
            "planning_s": planning_s,
        },
    )


def _profile(cell: Cell, device: str) -> Profile:
    """Return the analytic profile of a cell's model on a device."""
    import torch

    from penstock.measure.analytic import analytic
    from penstock.zoo.catalogue import model

    values = dict(cell.model_options)
    network = model(cell.model, device="meta", **values)
    if cell.model == "gpt":
        example = torch.empty(1, int(str(values["tokens"])), dtype=torch.int64, device="meta")
    elif cell.model.startswith("gnmt"):
        example = torch.empty(1, 2, _TOKENS_OF_GNMT, dtype=torch.int64, device="meta")
    else:
        side = int(str(values["image"]))
        example = torch.empty(1, 3, side, side, device="meta")
    return analytic(network, example, device, batch=cell.batch)


@register(
    STUDY,
    about="Which planner finds the fastest plan on the clusters of the papers, simulated?",
    measure=measure,
    limit_s=120.0,
)
class Planners:
    """Every planner, on the same profiles and clusters; one simulator judges all plans."""

    def cells(self, settings: Settings) -> list[Cell]:
        """Return a cell per planner, model and cluster. Planning is deterministic: one
        repetition.
        """
        from penstock.search.catalogue import PLANNERS

        names = _WORKLOADS if settings.scale == "full" else _SMALL_WORKLOADS
        cells = []
        for name in names:
            model, model_options, batch = _WORKLOADS[name]
            for cluster in _CLUSTERS[settings.scale]:
                for planner in PLANNERS.entries():
                    cells.append(
                        Cell(
                            STUDY,
                            planner,
                            model=model,
                            model_options=options(dict(model_options)),
                            batch=batch,
                            options=options(cluster=cluster, scale=settings.scale, workload=name),
                        )
                    )
        return cells

    def report(self, settings: Settings, records: Sequence[Record]) -> Report:
        """Return a section per model and cluster."""
        groups: dict[tuple[str, str], list[Record]] = {}
        for record in records:
            key = (str(record.cell.option("workload")), str(record.cell.option("cluster")))
            groups.setdefault(key, []).append(record)
        sections, summary = [_overview(groups)], []
        for (workload, cluster), group in groups.items():
            sections.append(_section(workload, cluster, group))
            summary += _conclusion(workload, cluster, group)
        command = f"penstock study {STUDY} --scale {settings.scale}"
        title = "Planners on the clusters of the papers"
        return Report(title, (Page(STUDY, title, tuple(sections), command, tuple(summary)),))


Groups = dict[tuple[str, str], list[Record]]


def _planned(group: Sequence[Record]) -> dict[str, Record]:
    """Return the records with a plan by planner, the fastest plan first."""
    planned = [record for record in group if record.ok]
    planned.sort(key=lambda record: record.outcome.seconds[0])
    return {record.cell.system: record for record in planned}


def _overview(groups: Groups) -> Section:
    """Return for each planner its step over the shortest of all planners, per model and cluster."""
    planners: dict[str, None] = {}
    for group in groups.values():
        planners.update(dict.fromkeys(record.cell.system for record in group))
    columns = [Column("planner")]
    columns += [
        Column(f"{workload} on {cluster}", "number", 2, "step over the shortest of all planners")
        for workload, cluster in groups
    ]
    rows: list[tuple[Value, ...]] = []
    for planner in planners:
        row: list[Value] = [planner]
        for group in groups.values():
            planned = _planned(group)
            fastest = min((record.outcome.seconds[0] for record in planned.values()), default=0.0)
            record = planned.get(planner)
            row.append(record.outcome.seconds[0] / fastest if record and fastest else None)
        rows.append(tuple(row))
    caption = "1.00: the fastest plan. Empty: the planner has no plan; the sections below say why."
    table = Table(
        "planners", "All planners", tuple(columns), tuple(rows), caption, ("records.jsonl",)
    )
    return Section("Overview", (table,))


_COLUMNS = (
    Column("planner"),
    Column("step", "seconds", about="simulated"),
    Column("to the fastest", "number", 2),
    Column("schedule"),
    Column("S", "number", 0, "stages"),
    Column("ranks", "number", 0),
    Column("M", "number", 0, "micro-batches"),
    Column("recompute"),
    Column("bubble", "percent", 0),
    Column("peak of a rank", "bytes"),
    Column("planned in", "seconds"),
    Column("note"),
)


def _section(workload: str, cluster: str, group: Sequence[Record]) -> Section:
    """Return the table and chart of one model on one cluster."""
    planned = _planned(group)
    fastest = min((record.outcome.seconds[0] for record in planned.values()), default=0.0)
    rows = [_row(record, fastest) for record in planned.values()]
    empty: tuple[Value, ...] = (None,) * (len(_COLUMNS) - 2)
    for record in group:
        if not record.ok:
            rows.append((record.cell.system, *empty, reason_of([record])))
    name = f"{workload}-on-{cluster}".replace(".", "-").replace("+", "-").lower()
    title = f"{workload} on {cluster}"
    table = Table(name, title, _COLUMNS, tuple(rows), "", ("records.jsonl",))
    return Section(title, (table, _chart(f"{name}-chart", title, planned)))


def _row(record: Record, fastest: float) -> tuple[Value, ...]:
    """Return the row of a planner with a plan."""
    extra, step = record.outcome.extra, record.outcome.seconds[0]
    return (
        record.cell.system,
        step,
        step / fastest if fastest else None,
        extra["schedule"],
        extra["stages"],
        extra["ranks"],
        extra["micro_batches"],
        extra["recompute"],
        extra["bubble_ratio"],
        max(record.outcome.peak_bytes, default=None),
        extra["planning_s"],
        "",
    )


def _chart(name: str, title: str, planned: dict[str, Record]) -> Chart:
    """Return each plan as a point: time of a step against memory."""
    series = []
    for planner, record in planned.items():
        peak = max(record.outcome.peak_bytes, default=0) / 2**30
        series.append(Series(planner, (record.outcome.seconds[0],), (peak,)))
    return Chart(
        name,
        f"Plans for {title}",
        "seconds a step, simulated",
        "GiB on the fullest rank",
        tuple(series),
        "scatter",
        caption="Lower left is better: a shorter step with less memory.",
    )


def _conclusion(workload: str, cluster: str, group: Sequence[Record]) -> list[str]:
    """Return which planner is the fastest, and where auto and data parallelism are."""
    planned = _planned(group)
    if not planned:
        return [f"{workload} on {cluster}: no planner has a plan."]
    first, record = next(iter(planned.items()))
    step = record.outcome.seconds[0]
    text = f"{workload} on {cluster}: the plan of {first} is the fastest"
    others = []
    for name in ("auto", "data-parallel"):
        if name in planned and name != first:
            others.append(
                f"{name} takes {planned[name].outcome.seconds[0] / step:.2f} times as long"
            )
    return [f"{text}; {', '.join(others)}." if others else f"{text}."]
