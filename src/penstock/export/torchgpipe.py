"""Export to torchgpipe and FairScale: `balance`, the number of layers of each partition."""

from __future__ import annotations

from penstock.export.catalogue import Exported, register
from penstock.export.pipelines import (
    Pipelines,
    require_pipelines,
    selective_layers,
    unsupported_notes,
)
from penstock.plan.plan import Plan
from penstock.schedule.recompute import Recompute


@register(
    "torchgpipe",
    aliases=("fairscale",),
    source="torchgpipe 0.0.7, gpipe.py; FairScale 0.4.13, nn/pipe/pipe.py",
)
def torchgpipe(plan: Plan) -> Exported:
    """Export as a Python list such as `[3, 1, 2]`: the number of consecutive children of the
    `nn.Sequential` in each partition.

    For nested Sequentials, a layer of the plan is a child of the flattened one:
    `nn.Sequential(*penstock.chain(model).modules)`. Both libraries run GPipe with backwards in
    reverse order, in one process, so all devices must be on one node.

    Raises:
        PlanError: single stages have replicas, or the plan is asynchronous or recomputes only some
            layers.
    """
    reasons = []
    if plan.recomputed:
        reasons.append(
            f"layers {selective_layers(plan)} are recomputed, but the library recomputes a "
            "partition as a whole or not at all"
        )
    pipelines = require_pipelines("torchgpipe", plan, reasons)
    balance = list(plan.lengths)
    notes = unsupported_notes(plan, "gpipe", "GPipe")
    if pipelines.count > 1:
        notes.append(
            f"{pipelines.count} pipelines: one process for each, with its own devices, and "
            "DistributedDataParallel around GPipe"
        )
    if any("." in name for name in plan.layer_names):
        notes.append(
            "nested Sequentials: pass the flat one, nn.Sequential(*penstock.chain(model).modules)"
        )
    checkpoint = plan.recompute if plan.recompute.whole else Recompute.NEVER
    use = (
        f"GPipe(model, balance={balance}, devices={_devices(plan, pipelines)}, "
        f"chunks={pipelines.schedule.micro_batches}, checkpoint={checkpoint!r})"
    )
    return Exported(str(balance), use, tuple(notes))


def _devices(plan: Plan, pipelines: Pipelines) -> list[int]:
    """Return the device of each stage of the first pipeline."""
    rank_of_stage: dict[int, int] = {}
    for rank, stages in zip(pipelines.ranks[0], pipelines.placement, strict=True):
        for stage in stages:
            rank_of_stage[stage] = rank
    ranks = [rank for _, rank in sorted(rank_of_stage.items())]
    return [plan.devices[rank] for rank in ranks] if plan.devices else ranks
