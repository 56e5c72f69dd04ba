"""torchgpipe's and FairScale's `balance`: how many layers each partition has."""

from __future__ import annotations

from penstock.export.catalogue import Exported, register
from penstock.export.pipelines import (
    pipelines_of,
    refuse,
    selective_layers,
    told,
    why_not_pipelines,
)
from penstock.plan.plan import Plan


@register(
    "torchgpipe",
    aliases=("fairscale",),
    source="torchgpipe 0.0.7, gpipe.py; FairScale 0.4.13, nn/pipe/pipe.py",
)
def torchgpipe(plan: Plan) -> Exported:
    """A Python list such as `[3, 1, 2]`: consecutive children of the `nn.Sequential` in every
    partition.

    Where Sequentials stand in one another, a layer of the plan is a child of the flattened one:
    `nn.Sequential(*penstock.chain(model).modules)`. Both libraries play GPipe with backwards in
    reverse order, in one process, so all devices are of one node.

    Raises:
        PlanError: the plan has stages with copies of their own, is asynchronous, or runs some
        layers again and not others.
    """
    found = pipelines_of(plan)
    reasons = [] if found is not None else [why_not_pipelines(plan)]
    if plan.recomputed:
        reasons.append(
            f"layers {selective_layers(plan)} run again: there a partition runs again whole, or not at all"
        )
    refuse("torchgpipe", reasons)
    assert found is not None
    rank_of = {
        stage: rank
        for rank, stages in zip(found.ranks[0], found.placement, strict=True)
        for stage in stages
    }
    devices = [plan.devices[rank] if plan.devices else rank for _, rank in sorted(rank_of.items())]
    text = str(list(plan.lengths))
    notes = told(plan, "gpipe", "GPipe")
    if found.count > 1:
        notes.append(
            f"{found.count} pipelines: a process for each, with its own devices, and DistributedDataParallel around GPipe"
        )
    if any("." in name for name in plan.layer_names):
        notes.append(
            "Sequentials in one another: give it the flat one, nn.Sequential(*penstock.chain(model).modules)"
        )
    checkpoint = "never" if plan.recompute == "selective" else plan.recompute
    return Exported(
        text,
        f"GPipe(model, balance={text}, devices={devices}, chunks={found.schedule.micro_batches}, checkpoint={checkpoint!r})",
        tuple(notes),
    )
