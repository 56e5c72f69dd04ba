r"""Train under torchrun, on one host or on several.

    torchrun --nproc-per-node 2 examples/train_torchrun.py
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \
        examples/train_torchrun.py

Shows: Pipeline without a plan, save and load.
Story: one stage per process, with equal numbers of layers. Stop the program and start it
    again with any number of processes: it continues from the last epoch, since a checkpoint
    loads under any cut.
Takes: half a minute on two cores. Needs scikit-learn (the extra `data`) for the digits.
"""

import argparse
import os
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import penstock as ps
from penstock.partition.uniform import partition_uniform
from penstock.training.data.batches import batches
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
        help="folder of checkpoints, on a file system that all ranks share",
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
    done = [int(index.parent.name) for index in options.folder.glob("*/checkpoint.json")]
    if done:
        pipe.load(options.folder / str(max(done)))
    for epoch in range(max(done, default=-1) + 1, options.epochs):
        for loss in pipe.train(batches(x, y, BATCH, seed=0, epoch=epoch)):
            last = float(loss)
        right = pipe.forward(digits.test_inputs.flatten(1)).argmax(1) == digits.test_targets
        if rank == 0:
            print(
                f"epoch {epoch}: loss {last:.3f}, test accuracy {right.float().mean():.1%}",
                flush=True,
            )
        pipe.save(options.folder / str(epoch))
    pipe.close()


if __name__ == "__main__":
    main()
