"""Layers measured one by one, and counted by a roofline, against the real step."""

from __future__ import annotations

import time
from collections.abc import Mapping

from kit.section import Section
from kit.systems import plain_accumulate
from kit.timing import time_in_turns
from kit.workloads import Cell, gpt2, mlp, vgg19

import penstock as ps
from penstock.profile.profile import Profile


def measure(section: Section) -> None:
    """Three rows per model: one for each micro-batch size."""
    small = section.smoke
    cells = [
        (vgg19(smoke=small), (1, 4, 16)),
        (gpt2(smoke=small), (1, 2, 8)),
        (mlp(smoke=small), (1, 4, 16)),
    ]
    if small:
        cells = [(cell, counts[1:2]) for cell, counts in cells]
    for cell, counts in cells:
        if section.seconds_left() < 5:
            section.row(cell.name, "skipped", note="out of time")
            continue
        _measure_cell(section, cell, counts)
        section.free()


def _measure_cell(section: Section, cell: Cell, counts: tuple[int, ...]) -> None:
    cell.allow_tf32()
    x, y = cell.first_batch(section.device)
    batch = len(x)
    counts = tuple(count for count in counts if count <= batch)
    sizes = tuple(sorted({batch // count for count in counts}))
    started = time.perf_counter()
    try:
        with cell.mixed(section.device):
            profile = ps.profile(
                cell.first_model(),
                x,
                sizes=sizes,
                device=section.device,
                repeats=2 if section.smoke else 5,
                loss=cell.loss,
                targets=y,
            )
    except Exception as error:  # noqa: BLE001 - rows of this model are lost
        section.row(f"{cell.name} profile", "failed", note=repr(error)[:300])
        return
    seconds = time.perf_counter() - started
    for count in counts:
        one = cell.with_micro_batches(count)
        name = f"{cell.name} b{batch // count}"
        section.attempt(name, lambda one=one: _row(section, one, profile, batch) | {"s": seconds})


def _row(section: Section, cell: Cell, profile: Profile, batch: int) -> dict[str, object]:
    size = batch // cell.micro_batches
    system = plain_accumulate(cell, section.device)
    series = time_in_turns(
        {"step": system.gather},
        section.device,
        smoke=section.smoke,
        seconds_left=section.seconds_left,
    )["step"]
    if series.error is not None:
        raise RuntimeError(series.error)
    real_s = series.median_s()
    assert real_s is not None
    layers_s = cell.micro_batches * sum(profile.step_seconds(size))
    row: dict[str, object] = {
        "samples": size,
        "layers_ms": layers_s * 1e3,
        "step_ms": real_s * 1e3,
        "layers_to_step": layers_s / real_s,
    }
    for column in ("host_s", "device_s"):
        found_s = series.median_s(column)
        if found_s is not None:
            row[f"step_{column.replace('_s', '_ms')}"] = found_s * 1e3
    return row | _analytic(section, cell, size, real_s)


def _analytic(section: Section, cell: Cell, size: int, real_s: float) -> Mapping[str, object]:
    """The roofline of this card, where Penstock has a preset of it."""
    versions = section.found("facts", "versions")
    card = next((name for name in ("H100", "H200") if name in str(versions.get("gpu"))), None)
    named = card or "H100"
    x, y = cell.first_batch(section.device)
    roofline = ps.analytic(
        cell.first_model(),
        x.cpu(),
        named,
        sizes=(size,),
        dtype="float32" if cell.autocast is None else "bfloat16",
        loss=cell.loss,
        targets=y.cpu(),
    )
    seconds = cell.micro_batches * sum(roofline.step_seconds(size))
    fields: dict[str, object] = {"analytic_ms": seconds * 1e3, "analytic_of": named}
    if card is not None:
        fields["analytic_to_step"] = seconds / real_s
    return fields
