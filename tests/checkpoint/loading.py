"""Small checkpoints, and pipelines that load them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.conformance.reference import differences
from torch import nn
from torch.optim import Adam

import penstock as ps
from penstock.checkpoint.checkpoint_files import write_file
from penstock.checkpoint.checkpoint_index import read_index, write_index
from penstock.checkpoint.checkpoint_load import load
from penstock.checkpoint.checkpoint_options import CheckpointOptions
from penstock.checkpoint.optimizer_checkpoint import names_of
from penstock.errors import FileError


def pipeline(optimizer=Adam, seed=0, sizes=(3, 4, 2), balance=(2, 1)):
    """Return a pipeline, of two stages by default."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(*sizes[:2]), nn.BatchNorm1d(sizes[1]), nn.Linear(*sizes[1:]))
    return ps.Pipeline(
        model,
        loss=nn.functional.mse_loss,
        balance=[*balance],
        micro_batches=2,
        optimizer=optimizer and (lambda params: optimizer(params, lr=0.01)),
        executor="threads",
    )


def train(pipe, steps=2):
    """Train for some steps and return the pipeline."""
    generator = torch.Generator().manual_seed(pipe.step)
    for _ in range(steps):
        pipe.train_batch(torch.randn(4, 3, generator=generator), torch.ones(4, 2))
    return pipe


def contents(folder):
    """Return all tensors of a checkpoint by name."""
    return {
        key: tensor
        for name in read_index(folder).files
        for key, tensor in load_file(folder / name).items()
    }


def rewrite(folder, change=lambda tensors, texts: None, **fields):
    """Write the files of a checkpoint again with changed tensors and texts, and a fitting index."""
    index = read_index(folder)
    sums = {}
    for name in index.files:
        tensors = load_file(folder / name)
        with safe_open(folder / name, framework="pt") as content:
            texts = content.metadata()
        change(tensors, texts)
        sums[name] = write_file(folder / name, tensors, texts)
    write_index(folder, replace(index, sums=sums, **fields))


def state_of(pipe):
    """Return everything that loading changes, by the names of a checkpoint."""
    assembly = pipe._assembly
    tensors = {f"model/{name}": tensor for name, tensor in pipe.state_dict().items()}
    for stage in assembly.stages:
        names = names_of(stage)
        optimizer = stage.update.optimizer
        for parameter, state in optimizer.state.items() if optimizer else ():
            for key, value in state.items():
                tensors[f"optimizer/{names[parameter]}/{key}"] = value.clone()
    return tensors


def load_into(pipe, folder, versioned=(), begin_anew=None, local=None, **options):
    """Load a checkpoint into the stages of a pipeline."""
    placed = pipe._assembly.placed
    if local is not None:
        stages = [placed.local[number] for number in local]
        placed = replace(placed, local=stages, at_home=stages)
    return load(folder, pipe._world, placed, versioned, CheckpointOptions(**options), begin_anew)


def refusal_of(pipe, folder, kind=FileError, **options):
    """Return the message of an error, after which nothing has changed."""
    before = state_of(pipe)
    with pytest.raises(FileError) as refusal:
        load_into(pipe, folder, **options)
    assert type(refusal.value) is kind
    assert differences(state_of(pipe), before) == []
    return str(refusal.value)
