"""What ranks run under torch's own pipeline runtime. Loaded by name in every rank."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

WIDTH, CLASSES = 6, 3
#: Linear maps and tanh in turn: two layers for each of 8 stages.
LAYERS = 16
FORMATS = ("compute_only", "compute_comms")


class Case(NamedTuple):
    """A schedule as torch is given it: a file in each of its forms, and the stages of each rank."""

    key: str
    folder: Path
    stages: int
    micro_batches: int
    stages_of_rank: tuple[tuple[int, ...], ...]

    def file(self, form: str) -> Path:
        """The CSV of one form."""
        return self.folder / f"{self.key}.{form}.csv"


def small_model() -> nn.Sequential:
    """Always the same weights; in double precision, so that the order of additions hardly shows."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for layer in range(LAYERS // 2):
            layers += [nn.Linear(WIDTH, WIDTH if 2 * layer + 2 < LAYERS else CLASSES), nn.Tanh()]
        return nn.Sequential(*layers).double()


def batch(micro_batches: int) -> tuple[Tensor, Tensor]:
    """Two samples per micro-batch."""
    generator = torch.Generator().manual_seed(1)
    samples = 2 * micro_batches
    return torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64), torch.randint(
        0, CLASSES, (samples,), generator=generator
    )


def connect_other_ranks_only() -> None:
    """Let stages of one rank exchange no first message: torch before 2.13 sends it to the rank
    itself, which gloo refuses ("Pair is not connected").
    """
    from torch.distributed.pipelining.stage import _PipelineStageBase

    first_messages = _PipelineStageBase._get_init_p2p_neighbors_ops

    def to_other_ranks(stage: Any) -> list[dist.P2POp]:
        """See `_PipelineStageBase._get_init_p2p_neighbors_ops`."""
        return [op for op in first_messages(stage) if op.peer != dist.get_rank()]

    _PipelineStageBase._get_init_p2p_neighbors_ops = to_other_ranks


def play(case: Case, form: str, group: dist.ProcessGroup) -> dict[str, Any]:
    """One step of torch's runtime on this rank: the gradients of its stages by name, and the
    batch's loss where it is known.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    model, (x, y) = small_model(), batch(case.micro_batches)
    layers_per_stage = LAYERS // case.stages
    rank_stages = case.stages_of_rank[dist.get_rank(group)]
    parts = {
        stage: model[stage * layers_per_stage : (stage + 1) * layers_per_stage]
        for stage in rank_stages
    }
    stages = [
        PipelineStage(parts[stage], stage, case.stages, torch.device("cpu"), group=group)
        for stage in rank_stages
    ]
    runtime = _PipelineScheduleRuntime(stages, case.micro_batches, loss_fn=functional.cross_entropy)
    runtime._load_csv(str(case.file(form)), format=form)
    losses: list[Tensor] = []
    inputs = (x,) if 0 in rank_stages else ()
    if case.stages - 1 in rank_stages:
        runtime.step(*inputs, target=y, losses=losses)
    else:
        runtime.step(*inputs)
    gradients = {
        name: p.grad
        for name, p in model.named_parameters()
        if int(name.split(".")[0]) // layers_per_stage in rank_stages
    }
    return {"gradients": gradients, "loss": torch.stack(losses).mean() if losses else None}


def play_all(
    cases: list[Case], forms: tuple[str, ...] = FORMATS
) -> dict[tuple[str, str], dict[str, Any]]:
    """Every case in every form, one process group per number of ranks; a rank that is not of a
    case's group passes it over.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    connect_other_ranks_only()
    try:
        groups = {
            ranks: dist.new_group(list(range(ranks)))
            for ranks in sorted({len(case.stages_of_rank) for case in cases})
        }
        results = {}
        for case in cases:
            ranks = len(case.stages_of_rank)
            for form in forms if dist.get_rank() < ranks else ():
                try:
                    results[case.key, form] = play(case, form, groups[ranks])
                except Exception as error:
                    error.add_note(f"in {case.key}, {form}")
                    raise
        return results
    finally:
        dist.destroy_process_group()
