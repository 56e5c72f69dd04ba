r"""Train under torchrun, on one host or on several.

    torchrun --nproc-per-node 2 examples/train_torchrun.py
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \
        examples/train_torchrun.py

Shows: Pipeline without a plan, Checkpoints.
Story: one stage per process, with equal numbers of layers. Stop the program and start it
    again with any number of processes: it continues from its newest checkpoint, which loads
    under any cut. With torchrun's --max-restarts 3 it does so by itself when a process fails,
    and with --nnodes 1:2 also when a host leaves or joins.
Takes: half a minute on two cores. Needs scikit-learn (the extra `data`) for the digits.
"""

import argparse
import os
from itertools import islice
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import penstock as ps
from penstock.partition.uniform import partition_uniform
from penstock.training.data.batches import batches, count_batches
from penstock.training.data.catalogue import dataset
from penstock.zoo.catalogue import model

BATCH = 64


def main() -> None:
    """Train on every rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/torchrun"),
        help="folder of checkpoints",
    )
    options = parser.parse_args()

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(
        max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"]))
    )
    digits = dataset("digits")
    x, y = digits.train_inputs.flatten(1), digits.train_targets
    layers = model("mlp", device="meta", features=64, hidden=1024, layers=4, classes=10)
    pipe = ps.Pipeline(
        layers,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        balance=partition_uniform(len(layers), ranks),
        schedule="1f1b",
        micro_batches=2 * ranks,
    )
    per_epoch = count_batches(len(x), BATCH)
    with ps.Checkpoints(options.folder, every="1min") as checkpoints:
        checkpoints.resume(pipe)
        while pipe.step < options.epochs * per_epoch:
            epoch, trained = divmod(pipe.step, per_epoch)
            for inputs, targets in islice(batches(x, y, BATCH, seed=0, epoch=epoch), trained, None):
                loss = pipe.train_batch(inputs, targets)
                if checkpoints.step(pipe):  # SIGTERM: the checkpoint is complete
                    return
            right = pipe.forward(digits.test_inputs.flatten(1)).argmax(1) == digits.test_targets
            if rank == 0:
                print(
                    f"epoch {epoch}: loss {loss:.3f}, test accuracy {right.float().mean():.1%}",
                    flush=True,
                )
            checkpoints.save(pipe)
        checkpoints.finish(pipe)
    pipe.close()


if __name__ == "__main__":
    main()
