"""Models with arbitrary forwards, compared with plain training of the unmodified model."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.tracing.traced_models import (
    MODELS,
    Result,
    Returning,
    UNet,
    tokens,
)
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from penstock.errors import ChainError
from penstock.modules.randomness import may_draw
from penstock.modules.state_names import state_of
from penstock.runtime.pipeline import Pipeline
from penstock.tracing.form import call
from penstock.tracing.traced_chain import chain

every_model = pytest.mark.parametrize("name", MODELS)


def tensors(value):
    """The tensors in a value."""
    value = [value.scores, value.parts] if isinstance(value, Result) else value
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def model_and_inputs(name):
    """Return a model, a copy of it, and a function that creates its inputs."""
    torch.manual_seed(0)
    kind, inputs = MODELS[name]
    model = kind()
    return model, copy.deepcopy(model), inputs


def cut_everywhere(traced, inputs):
    """Return the output of a chain whose layers are all on different ranks."""
    value = inputs
    for index, module in enumerate(traced.modules):
        value = module(value)
        if index in traced.exits:
            crossing = traced.exits[index](value)
            assert all(
                isinstance(leaf, (torch.Tensor, int)) for leaf in pytree.tree_leaves(crossing)
            )
            value = traced.entries[index + 1](crossing, inputs)
    return value


def loss(output, _target):
    """Return a loss to which all outputs contribute."""
    return sum((tensor.float() ** 2).mean() for tensor in tensors(output))


@every_model
def test_a_traced_chain_gives_the_models_outputs_gradients_buffers_and_state(name):
    """With all possible cuts, other batch sizes and lengths than the example's, in training and in
    evaluation.
    """
    model, plain, inputs = model_and_inputs(name)
    traced = chain(model, inputs(3, 6))
    held = {}
    for layer, module in zip(traced.layers, traced.modules, strict=True):
        held |= state_of(layer.name, module)
    assert {key: value.data_ptr() for key, value in held.items()} == {
        key: value.data_ptr() for key, value in model.state_dict().items()
    }
    for samples, length, training in ((5, 6, True), (1, 6, True), (2, 4, False)):
        batch = inputs(samples, length)
        for module in (plain, *traced.modules):
            module.train(training)
        expected, output = call(plain, copy.deepcopy(batch)), cut_everywhere(traced, batch)
        assert type(output) is type(expected)
        assert pytree.tree_structure(output) == pytree.tree_structure(expected)
        for one, other in zip(tensors(output), tensors(expected), strict=True):
            torch.testing.assert_close(one, other)
        loss(expected, None).backward()
        loss(output, None).backward()
        for (key, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), key
            if one.grad is not None:
                torch.testing.assert_close(one.grad, other.grad, msg=key)
        for one, other in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["unet", "resnet", "rounded", "statistics"])
def test_a_pipeline_of_three_stages_trains_a_traced_model_as_plain_training_does(name):
    """Long skips, tied weights, masks and statistics across real boundaries; the user's own model
    is trained.
    """
    model, plain, inputs = model_and_inputs(name)
    traced = chain(model, inputs(4, 6))
    third = len(traced) // 3
    pipe = Pipeline(
        traced,
        loss=loss,
        balance=[third, third, len(traced) - 2 * third],
        schedule="1f1b",
        micro_batches=2,
        executor="threads",
    )
    batch = inputs(4, 6)
    batch_loss = pipe.train_batch(batch, torch.zeros(4))
    total = 0.0
    for first in (0, 2):
        part = pytree.tree_map(
            lambda leaf: leaf[first : first + 2] if isinstance(leaf, torch.Tensor) else leaf,  # noqa: B023
            batch,
        )
        part_loss = loss(call(plain, part), None) / 2
        part_loss.backward()
        total += float(part_loss.detach())
    assert float(batch_loss) == pytest.approx(total)
    for (key, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), key
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, msg=key)
    state = pipe.state_dict()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key], value)


def test_layers_are_the_modules_with_weights_in_execution_order_with_their_names():
    """The finest chain: the ops around a module belong to its layer, and ops without weights are no
    layer.
    """
    model, _, inputs = model_and_inputs("unet")
    traced = chain(model, inputs(2, 0))
    assert [layer.name for layer in traced] == [
        "downs.0",
        "downs.1",
        "middle",
        "ups.0",
        "joins.0",
        "ups.1",
        "joins.1",
        "head",
    ]
    assert [layer.kind for layer in traced][2:4] == ["Conv2d", "ConvTranspose2d"]
    assert traced[0].parameters == ("downs.0.weight", "downs.0.bias")
    assert traced.modules[0].extra_repr() == "layer 0 of UNet"


def test_a_skip_value_crosses_only_the_boundaries_between_its_ends():
    """The planner counts the bytes that cross each boundary."""
    model, _, inputs = model_and_inputs("unet")
    batch = inputs(2, 0)
    traced = chain(model, batch)
    value, counts = batch, []
    for index, module in enumerate(traced.modules[:-1]):
        value = module(value)
        counts.append(len(traced.exits[index](value)))
    assert counts == [1, 2, 3, 2, 2, 1, 1]


class Late(nn.Module):
    """Inputs, and values computed from them, that the first layers do not use; and a head tied to
    the embedding.
    """

    def __init__(self):
        super().__init__()
        self.embedding, self.inner, self.head = (
            nn.Embedding(11, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 11, bias=False),
        )
        self.head.weight = self.embedding.weight
        self.register_buffer("angles", torch.arange(4.0), persistent=False)

    def forward(self, source, labels):
        places = torch.arange(source.shape[1])[:, None] * self.angles
        table = torch.cat([places.sin(), places.cos()], dim=-1)
        mask = (source > 3)[..., None]
        inner = self.inner(self.embedding(source))
        logits = self.head((inner + table).masked_fill(mask, 0.0))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def test_inputs_and_values_computed_from_inputs_only_do_not_cross():
    """Every rank has the batch, so masks, tables and labels are recomputed where they are used."""
    model, batch = Late(), (tokens(2, 6), tokens(2, 6))
    traced = chain(model, batch)
    value = batch
    for index, module in enumerate(traced.modules[:-1]):
        value = module(value)
        crossing = traced.exits[index](value)
        assert [tuple(tensor.shape) for tensor in crossing.values()] == [(2, 6, 8)]
        value = traced.entries[index + 1](crossing, batch)
    torch.testing.assert_close(traced.modules[-1](value), model(*batch))


def test_a_weight_used_in_two_places_is_tied_under_the_first_of_its_names():
    """The planner must know that two layers share it, and checkpoints have both names."""
    traced = chain(Late(), (tokens(2, 6), tokens(2, 6)))
    assert traced.aliases["head.weight"] == traced.aliases["embedding.weight"] == "embedding.weight"
    assert [traced[index].name for index in traced.description.tied["embedding.weight"]] == [
        "embedding",
        "head",
    ]


def test_a_layer_knows_whether_it_draws_and_drops_by_the_seed():
    """Only layers that draw random numbers get a seed from seed, step, layer and micro-batch."""
    torch.manual_seed(0)
    model = Returning()
    model.second = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 2))
    traced = chain(model, torch.randn(4, 8))
    assert [may_draw(module) for module in traced.modules] == [False, True, False]
    outputs = []
    for balance in ([1, 2], [2, 1]):
        model.zero_grad()
        pipe = Pipeline(
            traced,
            loss=loss,
            balance=balance,
            schedule="gpipe",
            micro_batches=2,
            executor="threads",
            seed=3,
        )
        pipe.train_batch(torch.ones(4, 8), torch.zeros(4))
        outputs.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))


def test_a_model_without_an_example_is_refused_with_the_call_to_write():
    """The message has the line to write."""
    with pytest.raises(
        ChainError,
        match=r"UNet is not an nn\.Sequential.*ps\.chain\(model, example\).*ps\.chain\(\[model\.stem",
    ):
        chain(UNet())


def test_hooks_on_a_modules_backward_are_refused():
    """A trace has no backward of modules, so the hook would never run."""
    model = UNet()
    model.middle.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ChainError, match=r"middle has hooks on its backward"):
        chain(model, torch.randn(2, 3, 8, 8))


def test_a_sequential_is_taken_as_it_is_with_an_example_or_without():
    """Its layers are the user's own modules."""
    whole = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert chain(whole, torch.randn(2, 2)).modules == tuple(whole)
