"""DeepSpeed's `parts`: where each stage begins, and the end."""

from __future__ import annotations

from penstock.export.catalogue import Exported, register
from penstock.export.pipelines import (
    pipelines_of,
    refuse,
    segment_lengths,
    selective_layers,
    told,
    uneven_batch,
    why_not_pipelines,
)
from penstock.partition.uniform import partition_uniform
from penstock.plan.plan import Plan


@register(
    "deepspeed", source="DeepSpeed 0.19.8, runtime/pipe/module.py, PipelineModule._partition_layers"
)
def deepspeed(plan: Plan) -> Exported:
    """A Python list such as `[0, 3, 7]`: stage k has the layers from entry k up to the one before
    entry k + 1.

    `partition_method` cannot be given a list, so a subclass sets it:

        class Planned(PipelineModule):
            def _partition_layers(self, method="uniform"):
                self.parts = [0, 3, 7]
                stage = self._topo.get_coord(self.global_rank).pipe
                self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    Pipelines side by side are the topology's data axis: `ProcessTopology(axes=["data", "pipe"],
    dims=[pipelines, stages])` numbers the ranks as the plan does. DeepSpeed plays 1F1B.

    Raises:
        PlanError: the plan has several stages on a rank, stages with copies of their own, or
        micro-batches of several sizes, is
            asynchronous, or runs some layers again and not others.
    """
    found = pipelines_of(plan)
    reasons = [] if found is not None else [why_not_pipelines(plan)]
    if found is not None and not found.linear:
        reasons.append(
            f"{plan.schedule_name} has {found.schedule.stages} stages on {len(found.placement)} ranks: there rank k has "
            "stage k, and no other"
        )
    if (uneven := uneven_batch(plan)) is not None:
        reasons.append(uneven)
    if plan.recomputed and _interval(plan) is None:
        reasons.append(
            f"layers {selective_layers(plan)} run again: activation_checkpoint_interval=n runs all layers again, every n of a "
            "stage together"
        )
    refuse("deepspeed", reasons)
    assert found is not None
    parts = [0, *(end for _, end in plan.bounds)]
    per_pipeline = found.schedule.micro_batches
    method = ' (partition_method="uniform" does the same)' if _uniform(plan) else ""
    use = (
        f"a subclass of PipelineModule whose _partition_layers sets parts={parts}{method}, num_stages={plan.stages}; in the config "
        f'"gradient_accumulation_steps": {per_pipeline}, "train_micro_batch_size_per_gpu": {plan.batch // plan.micro_batches}'
    )
    notes = told(plan, "1f1b", "1F1B")
    if found.count > 1:
        notes.append(
            f'{found.count} pipelines: topology=ProcessTopology(axes=["data", "pipe"], dims=[{found.count}, {plan.stages}])'
        )
    if plan.recompute == "selective" and plan.recomputed:
        notes.append(f"recomputation (selective): activation_checkpoint_interval={_interval(plan)}")
    elif plan.recompute in ("except_last", "always"):
        except_last = " for the last micro-batch too" if plan.recompute == "except_last" else ""
        notes.append(
            f"recomputation: activation_checkpoint_interval={max(plan.lengths)} recomputes every stage whole{except_last}"
        )
    return Exported(str(parts), use, tuple(notes))


def _interval(plan: Plan) -> int | None:
    """How many layers of a stage run again together, where all do; None where they do not, or not
    in equal numbers.
    """
    found = max((b - a for of_stage in segment_lengths(plan) for a, b in of_stage), default=0)
    for of_stage, length in zip(segment_lengths(plan), plan.lengths, strict=True):
        if of_stage != [(at, min(at + found, length)) for at in range(0, length, found)]:
            return None
    return found


def _uniform(plan: Plan) -> bool:
    return list(plan.lengths) == partition_uniform(plan.layers, plan.stages)
