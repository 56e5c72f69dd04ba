"""Does a step take what the plan said, and as much memory? Predicted before the run, four stages as
threads on one device.

Stages that share a device take turns, so that a step is predicted as the sum of all ranks' work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from kit.rehearsal import rehearse
from kit.section import Section
from kit.systems import pipeline
from kit.timing import time_in_turns
from kit.workloads import STAGES, Cell, equal_cut, gpt2, mlp, vgg19

import penstock as ps
from penstock.plan.plan import Plan
from penstock.profile.profile import Profile
from penstock.search.best_plan import plan_proposal
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest

#: How far the memory of a rank that is played alone may be off.
MEMORY_TOLERANCE = 0.01


@dataclass(frozen=True)
class Prediction:
    """Of one configuration: seconds of a step, and bytes by the plan's own account, summed over
    ranks.
    """

    cell: Cell
    recompute: str
    step_s: float
    peak_bytes: int

    @property
    def label(self) -> str:
        """Such as "vgg19 M=16 recompute always"."""
        return f"{self.cell.label} recompute {self.recompute}"


def measure(section: Section) -> None:
    """All predictions of a model, then its runs."""
    small = section.smoke
    models = [
        (vgg19(smoke=small), (1, 4, 16)),
        (gpt2(smoke=small), (4, 8)),
        (mlp(smoke=small), (16,)),
    ]
    for cell, counts in models:
        if section.seconds_left() < 6:
            section.row(cell.name, "skipped", note="out of time")
            continue
        batch = len(cell.first_batch(torch.device("cpu"))[0])
        chosen = sorted({min(count, batch // 2) for count in counts})
        try:
            predictions = _predictions(section, cell, chosen, batch)
        except Exception as error:  # noqa: BLE001 - rows of this model are lost
            section.row(f"{cell.name} profile", "failed", note=repr(error)[:300])
            continue
        for one in predictions:
            section.attempt(one.label, lambda one=one: _run(section, one), least_s=3)
            section.free()
    for cell in (gpt2(smoke=small, micro_batches=4), vgg19(smoke=small)):
        name = f"rehearse {STAGES} ranks, {cell.label}"
        section.attempt(name, lambda cell=cell: _rehearsed(section, cell), least_s=6)
        section.free()


def _predictions(section: Section, cell: Cell, counts: list[int], batch: int) -> list[Prediction]:
    x, y = cell.first_batch(section.device)
    cell.allow_tf32()
    with cell.mixed(section.device):
        profile = ps.profile(
            cell.first_model(),
            x,
            sizes=sorted({batch // count for count in counts}),
            device=section.device,
            repeats=2 if section.smoke else 5,
            loss=cell.loss,
            targets=y,
        )
    predictions = []
    for count in counts:
        for recompute in ("never", "always"):
            predictions.append(_predicted(profile, cell.with_micro_batches(count), recompute))
    return predictions


def _predicted(profile: Profile, cell: Cell, recompute: str) -> Prediction:
    cluster = ps.cluster(f"local:{STAGES}")
    request = PlanRequest(profile, cluster, profile.batch, recompute=recompute)
    cut = tuple(equal_cut(len(profile)))
    plan: Plan = plan_proposal(request, Proposal(cut, "1f1b", cell.micro_batches, (), recompute))
    timeline = ps.simulate(plan, profile, cluster)
    return Prediction(cell, recompute, sum(timeline.busy), sum(plan.predicted.peak_memory))


def _run(section: Section, predicted: Prediction) -> dict[str, object]:
    if section.on_gpu:
        torch.cuda.reset_peak_memory_stats(section.device)
        before = torch.cuda.memory_allocated(section.device)

    def sgd(parameters: object) -> torch.optim.SGD:
        """Return the optimizer that was planned for."""
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)

    system = pipeline(predicted.cell, section.device, recompute=predicted.recompute, optimizer=sgd)
    series = time_in_turns(
        {"step": system.step},
        section.device,
        smoke=section.smoke,
        seconds_left=section.seconds_left,
    )["step"]
    if series.error is not None:
        raise RuntimeError(series.error)
    measured_s = series.median_s()
    assert measured_s is not None
    row: dict[str, Any] = {
        "predicted_ms": predicted.step_s * 1e3,
        "measured_ms": measured_s * 1e3,
        "predicted_to_measured": predicted.step_s / measured_s,
        "predicted_MiB": predicted.peak_bytes / 2**20,
    }
    if section.on_gpu:
        allocated = torch.cuda.max_memory_allocated(section.device) - before
        row["allocated_MiB"] = allocated / 2**20
        row["reserved_MiB"] = torch.cuda.max_memory_reserved(section.device) / 2**20
        row["predicted_to_allocated"] = predicted.peak_bytes / allocated
    timeline = system.timeline()
    if timeline is not None and timeline.peak_memory is not None:
        own_peak = sum(timeline.peak_memory)
        row["own_account_MiB"] = own_peak / 2**20
        if section.on_gpu:
            row["own_to_allocated"] = own_peak / allocated
    system.close()
    return row


def _rehearsed(section: Section, cell: Cell) -> dict[str, object]:
    """Each rank alone, against the same rank among the others: its memory by Penstock's own account
    must be the same, its seconds without the others' kernels between them are less.
    """
    warm = 1 if section.smoke else 3
    alone = []
    for rank in range(STAGES):
        alone.append(rehearse(cell, rank, section.device, warm))
        section.free()
    together = pipeline(cell, section.device)
    for _ in range(warm + 1):
        together.step()
    timeline = together.timeline()
    together.close()
    assert timeline is not None
    peaks = timeline.peak_memory
    assert peaks is not None
    memory_error = max(
        abs(one.own_peak_bytes / peak - 1) for one, peak in zip(alone, peaks, strict=True)
    )
    row: dict[str, Any] = {
        "status": "measured" if memory_error < MEMORY_TOLERANCE else "wrong",
        "alone_busy_ms": [one.busy_s * 1e3 for one in alone],
        "together_busy_ms": [seconds * 1e3 for seconds in timeline.busy],
        "alone_MiB": [one.own_peak_bytes / 2**20 for one in alone],
        "together_MiB": [peak / 2**20 for peak in peaks],
        "largest_memory_error": memory_error,
    }
    if section.on_gpu:
        row["alone_allocated_MiB"] = [(one.allocated_bytes or 0) / 2**20 for one in alone]
    return row
