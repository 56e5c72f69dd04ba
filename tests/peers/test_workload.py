"""Models, data and initial weights: equal however a model is divided."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.peers.job import Job
from penstock.peers.setup import RankSpec, Setup
from penstock.peers.workload import flat_layers, grouped, workload
from penstock.zoo.catalogue import model

VGG = {"classes": 10, "image": 32, "width": 2, "dropout": 0.0}


def job(rank=0, lengths=(7, 12), **more) -> Job:
    """A rank of two stages of a small VGG-19."""
    fields = {"model": "vgg19", "model_options": VGG, "data": "random", "batch": 4}
    setup = Setup(**{**fields, "stages": 2, "micro_batches": 2, "lengths": lengths, **more})
    return Job(RankSpec("plain", setup, rank, 2, 1, 0, ""))


def test_a_layer_without_parameters_belongs_to_the_layer_before_it():
    """A VGG-19 has 19 layers, and no stage is without parameters."""
    layers = flat_layers(model("vgg19", device="meta", **VGG))
    groups = grouped(layers)
    assert len(groups) == 19
    assert [part for group in groups for part in group.layers] == layers
    assert all(list(group.parameters()) for group in groups)


def test_weights_do_not_depend_on_where_the_model_is_cut():
    """All systems begin with the same weights, to the bit; another seed has others."""
    whole = nn.Sequential(*job().layers())
    stages = nn.Sequential(*job().stage(0), *job(1).stage(1))
    for first, second in zip(whole.parameters(), stages.parameters(), strict=True):
        assert torch.equal(first, second)
    other = nn.Sequential(*job(seed=1).layers())
    assert not torch.equal(next(whole.parameters()), next(other.parameters()))


def test_boundaries_have_the_shapes_that_the_stages_exchange():
    """Without memory, also after a stage was made."""
    one = job()
    first = one.stage(0)
    inputs, _ = one.workload.first_batch()
    output = first(inputs[:2])
    assert one.boundary(0).shape == inputs[:2].shape
    assert one.boundary(1).shape == output.shape
    assert one.boundary(2).shape == (2, 10)
    assert one.boundary(1).is_meta


@pytest.mark.parametrize(
    ("name", "options", "inputs", "targets"),
    [
        ("mlp", {"layers": 2}, (4, 64), (4,)),
        ("vgg11", VGG, (4, 3, 32, 32), (4,)),
        ("gpt", {"layers": 2, "tokens": 8}, (4, 8), (4, 8)),
        ("gnmt", {"layers": 4, "hidden": 8, "vocabulary": 9}, (4, 2, 40), (4, 40)),
    ],
)
def test_random_data_fits_every_kind_of_model(name, options, inputs, targets):
    """One batch, the same in every process, on which the loss is a number."""
    setup = Setup(name, options, "random", 4, 1, 1)
    work = workload(setup)
    assert work.inputs.shape == inputs
    assert work.targets.shape == targets
    assert torch.equal(work.inputs, workload(setup).inputs)
    network = nn.Sequential(*Job(RankSpec("plain", setup, 0, 1, 1, 0, "")).layers())
    assert work.loss(network(work.inputs), work.targets).isfinite()
    assert len(list(work.epoch(3))) == 1


def test_gradients_of_one_process_are_those_of_plain_training_and_wrong_ones_are_seen(tmp_path):
    """What every system is checked by, before it is timed."""
    from dataclasses import replace

    from penstock.peers.catalogue import system
    from penstock.peers.job import write_gradients

    setup = job().setup
    path = tmp_path / "gradients.safetensors"
    names = write_gradients(setup, path)
    spec = RankSpec("penstock-pipe", setup, 0, 1, 1, 0, "", str(path))
    right, wrong = Job(spec), Job(replace(spec, setup=replace(setup, seed=1)))
    for one in (right, wrong):
        step = system("penstock-pipe").make(one)
        step(*one.workload.first_batch())
    assert set(right.errors) == set(names)
    assert max(right.errors.values()) < 1e-4 * right.largest_gradient
    assert max(wrong.errors.values()) > 1e-2 * wrong.largest_gradient
