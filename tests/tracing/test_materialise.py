"""Weights that depend on a seed and the position in the chain, not on the cut.

The user's own modules are not changed.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from penstock.errors import ChainError
from penstock.modules.randomness import stream_seed
from penstock.tracing.materialise import materialise
from penstock.tracing.traced_chain import chain
from penstock.zoo.catalogue import model

CPU = torch.device("cpu")


def tensors(module):
    """Return all tensors of a module, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def equal(first, second):
    """Return whether two modules have the same tensors, to the bit."""
    ours, theirs = tensors(first), tensors(second)
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def small_resnet():
    """Convolutions, batch norms, residual blocks and a classifier, on meta."""
    return model("resnet18", device="meta", image=32, classes=3)


SMALL = nn.Sequential(
    OrderedDict(
        conv=nn.Conv2d(1, 2, 3, device="meta"),
        norm=nn.BatchNorm2d(2, device="meta"),
        relu=nn.PReLU(device="meta"),
        flat=nn.Flatten(),
        fc=nn.Linear(8, 4, device="meta"),
        drop=nn.Dropout(),
        head=nn.Linear(4, 2, device="meta"),
    )
)


@given(st.sets(st.integers(1, 6)), st.integers(0, 2**40))
@settings(deadline=None, max_examples=40)
def test_every_cut_gives_every_layer_the_same_weights(cuts, seed):
    """A comparison of two plans must start from the same model; ranks materialise only their own
    layers.
    """
    traced = chain(SMALL)
    whole = materialise(traced, range(7), CPU, seed)
    bounds = [0, *sorted(cuts), 7]
    for first, last in pairwise(bounds):
        for index, module in zip(
            range(first, last), materialise(traced, range(first, last), CPU, seed), strict=True
        ):
            assert equal(module, whole[index])


def test_layers_in_another_order_or_alone_have_the_same_weights():
    """A rank with several stages holds layers that are not adjacent."""
    traced = chain(small_resnet())
    whole = materialise(traced, range(len(traced)), CPU, 5)
    for indices in ([12, 0, 7], [3], [13]):
        for index, module in zip(indices, materialise(traced, indices, CPU, 5), strict=True):
            assert equal(module, whole[index])


def test_weights_equal_those_of_plain_construction_with_the_seed_of_the_layer():
    """Torch and the model define the initialisation; Penstock defines only the random seed."""
    makers = [
        lambda: nn.Conv2d(3, 4, 3),
        lambda: nn.MultiheadAttention(8, 2),
        lambda: nn.LSTM(3, 4, 2),
        lambda: nn.TransformerEncoderLayer(8, 2, 16),
        lambda: nn.Embedding(5, 3, padding_idx=1),
        lambda: nn.Bilinear(2, 3, 4),
        lambda: nn.BatchNorm2d(3),
        lambda: nn.GroupNorm(1, 3),
        lambda: nn.PReLU(3),
        lambda: nn.GRUCell(2, 3),
    ]
    with torch.device("meta"):
        traced = chain([make() for make in makers])
    for index, (module, make) in enumerate(
        zip(materialise(traced, range(len(makers)), CPU, 11), makers, strict=True)
    ):
        torch.manual_seed(stream_seed(11, -1, index))
        assert equal(module, make()), type(module).__name__


def test_other_seeds_and_other_places_give_other_weights():
    """Two equal layers with equal weights would learn the same, and studies over seeds need
    different weights.
    """
    with torch.device("meta"):
        traced = chain([nn.Linear(4, 4) for _ in range(20)])
    layers = [
        layer.weight for seed in range(20) for layer in materialise(traced, range(20), CPU, seed)
    ]
    assert len({tuple(weight.flatten().tolist()) for weight in layers}) == 400


def test_the_users_meta_model_stays_on_meta():
    """Every rank and every plan in a comparison start from the same description."""
    net = small_resnet()
    before = {id(module) for module in net.modules()}
    materialise(chain(net), range(14), CPU, 0)
    assert all(tensor.is_meta for tensor in tensors(net).values())
    assert {id(module) for module in net.modules()} == before


def test_real_layers_are_those_of_the_user_with_their_weights():
    """Users who pass a real model expect it to be trained, and read its weights afterwards."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU())
    before = {name: tensor.clone() for name, tensor in tensors(net).items()}
    parameters = list(net.parameters())
    modules = materialise(chain(net), [0, 1, 2], CPU, 3)
    assert all(ours is theirs for ours, theirs in zip(modules, net, strict=True))
    assert all(ours is theirs for ours, theirs in zip(net.parameters(), parameters, strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(net).items())


def test_a_real_layer_beside_one_on_meta_remains_that_of_the_user():
    """A pretrained body under a new head. Regression: the body was copied, so the user's weights
    were not trained.
    """
    body, head = nn.Linear(2, 2), nn.Linear(2, 3, device="meta")
    real, fresh = materialise(chain([body, head]), [0, 1], CPU, 0)
    assert real is body
    assert head.weight.is_meta
    assert fresh.weight.shape == (3, 2)


def test_a_real_weight_inside_a_layer_on_meta_keeps_its_values():
    """Initialising a layer's new bias must not initialise its given weight again, nor replace it."""
    layer = nn.Linear(3, 3, device="meta")
    given_weight = nn.Parameter(torch.eye(3))
    layer.weight = given_weight
    (real,) = materialise(chain([layer]), [0], CPU, 0)
    assert real.weight is given_weight
    assert torch.equal(given_weight, torch.eye(3))
    assert not real.bias.is_meta


@pytest.mark.parametrize(
    "make", [small_resnet, lambda: nn.Sequential(nn.Linear(2, 2))], ids=["meta", "real"]
)
def test_torchs_random_numbers_are_left_as_they_were(make):
    """Creating a model must not change the order in which the user's data loader shuffles."""
    built = make()
    before = torch.get_rng_state()
    materialise(chain(built), [0], CPU, 1)
    assert torch.equal(torch.get_rng_state(), before)


class Scale(nn.Module):
    """A module with a weight and no method to initialise it."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))


class Masked(nn.Module):
    """A module with a buffer and no method to initialise it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(2, 2).tril(), persistent=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            Scale,
            r"^0\.inner \(Scale\) is on the meta device and has weights of its own, but no reset_parameters\(\) to initialise them\. Give",
        ),
        (Masked, r"^0\.inner \(Masked\) is on the meta device"),
        (
            lambda: weight_norm(nn.Linear(2, 2)),
            r"^0\.inner\.parametrizations\.weight \(ParametrizationList\) is on the meta device",
        ),
    ],
)
def test_a_module_that_cannot_draw_its_weights_is_named(make, message):
    """Uninitialised memory would be trained without an error. A module with memory needs no method."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make()

    with torch.device("meta"):
        traced = chain([Block(), nn.ReLU()])
    before = torch.get_rng_state()
    with pytest.raises(ChainError, match=message):
        materialise(traced, [0], CPU, 0)
    assert torch.equal(torch.get_rng_state(), before)
    materialise(chain([Block()]), [0], CPU, 0)


def test_a_shared_weight_stays_one_tensor_with_the_first_layers_values():
    """Otherwise embedding and head would differ after the first step; the head's own bias is
    initialised, and this must not change the weight.
    """
    with torch.device("meta"):
        embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5)
    head.weight = embedding.weight
    traced = chain([embedding, nn.LayerNorm(4, device="meta"), head])
    first, _, last = materialise(traced, [0, 1, 2], CPU, 9)
    assert last.weight is first.weight
    alone = materialise(chain([nn.Embedding(5, 4, device="meta")]), [0], CPU, 9)[0]
    assert torch.equal(first.weight, alone.weight)
    bound = 1 / 4**0.5
    assert 0 < last.bias.abs().max() <= bound


def test_a_layer_used_twice_stays_one_layer():
    """One optimizer step must move both uses."""
    shared = nn.Linear(3, 3, device="meta")
    first, _, last = materialise(chain([shared, nn.ReLU(), shared]), [0, 1, 2], CPU, 0)
    assert first is last
    assert not first.weight.is_meta


def test_two_names_of_one_tensor_in_one_module_stay_one_tensor_with_drawn_values():
    """A module may have a weight under two names; its reset then fills both."""

    class Symmetric(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.Parameter(torch.empty(3, 3))
            self.right = self.left
            self.reset_parameters()

        def reset_parameters(self):
            nn.init.ones_(self.left)

    with torch.device("meta"):
        traced = chain([Symmetric()])
    (real,) = materialise(traced, [0], CPU, 0)
    assert real.left is real.right
    assert torch.equal(real.left, torch.ones(3, 3))


def test_batch_norm_starts_with_its_running_statistics():
    """With uninitialised running variances training works and evaluation does not."""
    with torch.device("meta"):
        traced = chain(
            [
                nn.Conv2d(1, 4, 3),
                nn.BatchNorm2d(4),
                nn.BatchNorm1d(2, affine=False),
                nn.BatchNorm1d(2, track_running_stats=False),
            ]
        )
    _, norm, plain, untracked = materialise(traced, range(4), CPU, 0)
    assert torch.equal(norm.running_mean, torch.zeros(4))
    assert torch.equal(norm.running_var, torch.ones(4))
    assert torch.equal(norm.num_batches_tracked, torch.tensor(0))
    assert torch.equal(norm.weight, torch.ones(4))
    assert torch.equal(plain.running_var, torch.ones(2))
    assert untracked.running_mean is None
    norm(torch.randn(3, 4, 2, 2))
    assert norm.num_batches_tracked.item() == 1


def test_frozen_parameters_and_dtypes_stay():
    """They are part of the description that the user makes on the meta device."""
    with torch.device("meta"):
        layer = nn.Linear(2, 2, dtype=torch.bfloat16)
    layer.weight.requires_grad_(False)
    (real,) = materialise(chain([layer]), [0], CPU, 0)
    assert not real.weight.requires_grad
    assert isinstance(real.weight, nn.Parameter)
    assert real.bias.requires_grad
    assert real.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("make", "run"),
    [
        (lambda: nn.MultiheadAttention(4, 2, batch_first=True), lambda layer, x: layer(x, x, x)[0]),
        (lambda: nn.LSTM(4, 4, 2, batch_first=True), lambda layer, x: layer(x)[0]),
        (
            lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
            lambda layer, x: layer(x),
        ),
    ],
    ids=["attention", "LSTM", "transformer"],
)
def test_modules_that_keep_their_weights_in_odd_places_run_after_it(make, run):
    """Attention calls its reset `_reset_parameters`, and an LSTM has a second list of its weights,
    which must not stay on the meta device.
    """
    with torch.device("meta"):
        traced = chain([make()])
    (layer,) = materialise(traced, [0], CPU, 0)
    run(layer, torch.randn(2, 3, 4)).sum().backward()
    assert [
        name
        for name, parameter in layer.named_parameters()
        if parameter.grad is None or parameter.is_meta
    ] == []
