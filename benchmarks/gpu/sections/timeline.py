"""Seconds of ops as Penstock's clock has them, beside the kernels' as torch.profiler has them; one
trace for Perfetto.
"""

from __future__ import annotations

import gzip
import warnings
from typing import Any

import torch
from kit.section import Section
from kit.systems import Make, pipeline, plain_accumulate
from kit.workloads import equal_cut, gpt2
from torch.profiler import ProfilerActivity, profile

import penstock as ps

STEPS = 2


def measure(section: Section) -> None:
    """Two rows, one file."""
    section.attempt("1f1b", lambda: _trace(section))
    if section.needs_gpu("host waits in a step"):
        section.attempt("host waits in a step", lambda: _waits(section))


def _trace(section: Section) -> dict[str, object]:
    cell = gpt2(smoke=section.smoke)
    model = cell.first_model().to(section.device)
    pipe = ps.Pipeline(
        model,
        loss=cell.loss,
        optimizer=cell.make_optimizer,
        balance=equal_cut(len(model)),
        schedule="1f1b",
        micro_batches=cell.micro_batches,
        executor="threads",
        autocast=cell.autocast,
        device=section.device,
    )
    x, y = cell.first_batch(section.device)
    for _ in range(STEPS):
        pipe.train_batch(x, y)
    section.synchronize()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * section.on_gpu
    with profile(activities=activities) as profiler:
        pipe.train_batch(x, y)
        section.synchronize()
    timeline = pipe.timeline()
    pipe.close()
    file = section.out / "timeline.json.gz"
    plain = section.rows_file.with_name("timeline.json")
    ps.draw(timeline, str(plain))
    file.write_bytes(gzip.compress(plain.read_bytes()))
    ops_s = sum(event.end - event.start for event in timeline.compute)
    row: dict[str, Any] = {
        "ops_ms": ops_s * 1e3,
        "makespan_ms": timeline.makespan * 1e3,
        "union_ms": union_s([(event.start, event.end) for event in timeline.compute]) * 1e3,
        "busy_share_max": max(timeline.busy) / timeline.makespan,
        "file_KiB": file.stat().st_size / 1024,
    }
    if section.on_gpu:
        # Stages share one stream, so an op's seconds have those of another thread's kernels in
        # them: the union is compared.
        kernels_us = sum(
            event.self_device_time_total
            for event in profiler.key_averages()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        row["kernels_ms"] = kernels_us / 1e3
        row["union_to_kernels"] = row["union_ms"] * 1e3 / max(kernels_us, 1e-9)
    return row


def _waits(section: Section) -> dict[str, object]:
    """How often a steady step makes the host wait for the device, by torch's own count, beside
    plain accumulation.
    """
    cell = gpt2(smoke=section.smoke)
    counts: dict[str, object] = {}
    makers: dict[str, Make] = {"penstock": pipeline, "plain": plain_accumulate}
    for name, make in makers.items():
        system = make(cell, section.device)
        for _ in range(STEPS):
            system.step()
        section.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                system.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [item for item in caught if "synchroniz" in str(item.message)]
        counts[name] = len(waits)
        system.close()
    return counts


def union_s(spans: list[tuple[float, float]]) -> float:
    """Seconds that at least one span covers.

    >>> union_s([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
