"""What a rank runs under torch's pipeline runtime, from an exported folder alone. Loaded by name in
every rank.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

WIDTH, CLASSES = 6, 3


def small_model() -> nn.Sequential:
    """Seven layers, always with the same weights, in double precision: the order of additions
    hardly shows.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = [
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
        ]
        return nn.Sequential(*parts, nn.Linear(WIDTH, CLASSES)).double()


def batch(samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and classes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (samples,), generator=generator)


def play(folder: Path) -> dict[str, Tensor]:
    """One step by torch; the gradients of this rank's stages by name, averaged over pipelines."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    facts = json.loads((folder / "stages.json").read_text())
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        groups = [dist.new_group(ranks) for ranks in facts["pipelines"]]
        mine = next(j for j, ranks in enumerate(facts["pipelines"]) if dist.get_rank() in ranks)
        count, group = len(groups), groups[mine]
        local_stages = facts["stages_of_rank"][dist.get_rank(group)]
        model, (x, y) = small_model(), batch(facts["batch"])
        x, y = x[mine::count], y[mine::count]
        modules = {
            stage: [model.get_submodule(name) for name in facts["modules_of_stage"][stage]]
            for stage in local_stages
        }
        names = {stage: facts["modules_of_stage"][stage] for stage in local_stages}
        parts = {stage: nn.Sequential(*modules[stage]) for stage in local_stages}
        total = len(facts["modules_of_stage"])
        stages = [
            PipelineStage(parts[stage], stage, total, torch.device("cpu"), group=group)
            for stage in local_stages
        ]
        runtime = _PipelineScheduleRuntime(
            stages, facts["micro_batches"], loss_fn=functional.cross_entropy
        )
        runtime._load_csv(str(folder / facts["schedule"]))
        runtime.step(
            *((x,) if 0 in local_stages else ()),
            **({"target": y} if total - 1 in local_stages else {}),
        )
        return {
            f"{name}.{key}": parameter.grad / count
            for stage in local_stages
            for name, module in zip(names[stage], modules[stage], strict=True)
            for key, parameter in module.named_parameters()
        }
    finally:
        dist.destroy_process_group()
