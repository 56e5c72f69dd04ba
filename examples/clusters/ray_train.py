r"""Train on several hosts with Ray Train: one worker per host, one stage on each.

    pip install "ray[train]"
    ray start --head                       # on the first host
    ray start --address HEAD:6379          # on every other host
    python examples/clusters/ray_train.py --hosts 2

Shows: Pipeline in the workers of a TorchTrainer, which joins their processes; pipe.reader.
Story: Ray places a worker on every host and connects them by torch.distributed. Each worker makes
    the same Pipeline, and reads only what its stage needs. Rank 0 reports the losses.
Takes: a quarter of a minute on one machine.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.nn.functional import cross_entropy

BATCH = 32


def train_worker(config: dict[str, Any]) -> None:
    """Train as one worker."""
    import penstock as ps  # in the worker: Ray pickles this function

    torch.manual_seed(0)  # the same weights and data in every worker
    layers = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)]
    x = torch.randn(256, 32)
    y = x[:, :4].argmax(1)
    stages = ray.train.get_context().get_world_size()
    lengths = [len(layers) // stages + (s < len(layers) % stages) for s in range(stages)]
    pipe = ps.Pipeline(
        nn.Sequential(*layers),
        loss=cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        balance=lengths,
        schedule="1f1b",
        micro_batches=2 * stages,
        device="cpu",
    )
    for epoch in range(config["epochs"]):
        losses = [float(loss) for loss in pipe.train(pipe.reader(x, y, batch=BATCH, epoch=epoch))]
        with tempfile.TemporaryDirectory() as folder:
            weights = pipe.state_dict()  # of the whole model, on rank 0
            checkpoint = None
            if pipe.is_main:
                ps.save_weights(weights, Path(folder) / "weights.safetensors")
                checkpoint = Checkpoint.from_directory(folder)
            # Every worker reports; Ray keeps numbers that come with a checkpoint.
            ray.train.report({"epoch": epoch, "loss": sum(losses) / len(losses)}, checkpoint)
    pipe.close()


def train(hosts: int, epochs: int, storage: str) -> ray.train.Result:
    """Run the workers, each on a host of its own, and return the last report.

    Args:
        hosts: number of workers.
        epochs: to train.
        storage: a folder that all hosts share, for checkpoints.
    """
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"epochs": epochs},
        scaling_config=ScalingConfig(num_workers=hosts, placement_strategy="STRICT_SPREAD"),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=storage),
    )
    return trainer.fit()


def main() -> None:
    """Train, and print the last report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--storage", default=str(Path.home() / "ray_results"))
    options = parser.parse_args()
    result = train(options.hosts, options.epochs, options.storage)
    assert result.metrics is not None
    print(f"epoch {result.metrics['epoch']}: loss {result.metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
