"""Data parallelism of Penstock beside DistributedDataParallel, in turn, in the same processes.

Every rank holds both: torch's DDP (gloo, gradient_as_bucket_view) and a `ps.Pipeline` of one stage
with a replica on every rank. A round takes some steps of each, in an order that changes from round
to round; a step ends when the last rank is through with it. Both keep freed memory, as Penstock's
ranks do. Printed are the medians and the median of the ratios within a round.

    python benchmarks/data-parallel/run.py --model gpt --ranks 2
    python benchmarks/data-parallel/run.py --model vgg19 --ranks 2 --rounds 5 --steps 2
    python benchmarks/data-parallel/run.py --model gpt --ranks 2 --optimizer adamw
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock.zoo.catalogue import model
from penstock.zoo.gpt import gpt_loss

Loss = Callable[[Tensor, Tensor], Tensor]

#: By name: the options of the model, and the samples of a batch.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "gpt": ({}, 32),
    "vgg19": ({"image": 32, "classes": 100, "dropout": 0.0}, 64),
    "mlp": ({}, 64),
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}


def measured(name: str, options: dict[str, Any]) -> dict[str, float]:
    """Train in turn on this rank; return medians in seconds, and the median ratio."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    network, x, y, loss = _workload(name)
    make = OPTIMIZERS[options["optimizer"]]
    layer_count = len(ps.chain(network).layers)
    programs = "\n".join(f"rank {r} | 0F{r} 0B{r} 0U1" for r in range(ranks))
    pipe = ps.Pipeline(
        copy.deepcopy(network),
        loss=loss,
        optimizer=make,
        balance=[layer_count],
        schedule=ps.Schedule.parse(programs),
    )
    replicated = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = make(replicated.parameters())
    local_x, local_y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]

    def ddp() -> None:
        """Train one batch with DDP."""
        loss(replicated(local_x), local_y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def penstock() -> None:
        """Train one batch with Penstock."""
        pipe.train_batch(x, y)

    systems = {"ddp": ddp, "penstock": penstock}
    seconds: dict[str, list[float]] = {system: [] for system in systems}
    for number in range(-1, options["rounds"]):
        order = sorted(systems, reverse=number % 2 == 0)
        for system in order:
            steps = []
            for _ in range(options["steps"]):
                dist.barrier()
                started = time.perf_counter()
                systems[system]()
                dist.barrier()
                steps.append(time.perf_counter() - started)
            if number >= 0:  # the first round warms up
                seconds[system].append(statistics.median(steps))
    ratios = [
        ours / theirs for ours, theirs in zip(seconds["penstock"], seconds["ddp"], strict=True)
    ]
    pipe.close()
    return {
        "ddp_s": statistics.median(seconds["ddp"]),
        "penstock_s": statistics.median(seconds["penstock"]),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def _workload(name: str) -> tuple[nn.Sequential, Tensor, Tensor, Loss]:
    """Return model, inputs, targets and loss."""
    options, batch = MODELS[name]
    torch.manual_seed(0)
    if name == "gpt":
        tokens = torch.randint(0, 512, (batch, 128))
        return model("gpt", **options), tokens, tokens, gpt_loss
    if name == "vgg19":
        images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 100, (batch,))
        return model("vgg19", **options), images, labels, cross_entropy
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(batch, 512), torch.randn(batch, 512), mse_loss


def main() -> None:
    """Read the arguments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    arguments = parser.parse_args()
    options = vars(arguments)
    results = ps.launch(measured, arguments.ranks, arguments.model, options, threads=1)
    print(json.dumps(options | {k: round(v, 4) for k, v in results[0].items()}))


if __name__ == "__main__":
    main()
