"""Layers that may work on slices of sequences: known ones, and those that declare it."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.conformance.models import image_data, resnet_like, small_gpt, vgg_like
from tests.conformance.slice_programs import terapipe
from torch import Tensor, nn

import penstock as ps
from penstock.errors import SettingError
from penstock.schedule.slicing import Slicing
from penstock.tracing.slices import check_slices, has_past, is_per_token
from penstock.tracing.traced_chain import chain
from penstock.zoo.blocks.layers import NormalEmbedding, NormalLinear

SLICED = terapipe(1, Slicing.even("tokens", 2, 1))

PER_TOKEN = [
    nn.Linear(8, 8),
    nn.Linear(8, 3),
    nn.LayerNorm(8),
    nn.RMSNorm(8),
    nn.Dropout(0.5),
    nn.GELU(),
    nn.ReLU(inplace=True),
    nn.SiLU(),
    nn.Tanh(),
    nn.Identity(),
    nn.PReLU(),
    nn.Softmax(dim=-1),
    nn.LogSoftmax(dim=-1),
    nn.GLU(),
    nn.Hardtanh(),
    nn.Softplus(),
    NormalLinear(8, 8, std=0.1),
    nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Dropout(0.1))),
    nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
]
NOT_PER_TOKEN = [
    nn.BatchNorm1d(6),
    nn.GroupNorm(2, 6),
    nn.InstanceNorm1d(6),
    nn.Conv1d(6, 6, 3),
    nn.LSTM(8, 8),
    nn.MultiheadAttention(8, 2),
    nn.TransformerEncoderLayer(8, 2),
    nn.LayerNorm([6, 8]),
    nn.PReLU(6),
    nn.Softmax(dim=1),
    nn.GLU(dim=1),
    nn.Flatten(),
    nn.Dropout1d(0.5),
    nn.MaxPool1d(2),
    nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(6)),
    nn.ModuleList([nn.Linear(8, 8)]),
    nn.Embedding(9, 8, max_norm=1.0),
    nn.Embedding(9, 8, scale_grad_by_freq=True),
    nn.Softmax(),
]


def named(modules):
    """Return parameters with readable test names."""
    return [
        pytest.param(module, id=f"{index}-{type(module).__name__}")
        for index, module in enumerate(modules)
    ]


@pytest.mark.parametrize("module", named(PER_TOKEN))
def test_layers_in_the_list_of_per_token_layers_work_token_by_token(module):
    """For a single token, each listed layer returns the same values as for the whole sequence."""
    assert is_per_token(module)
    module = copy.deepcopy(module).eval()
    x = torch.randn(3, 6, 8)
    whole = module(x.clone())
    assert torch.allclose(
        torch.cat([module(part.clone()) for part in x.split([1, 3, 2], dim=1)], dim=1),
        whole,
        atol=1e-6,
    )


def test_embeddings_look_tokens_up_one_by_one():
    """A slice of the tokens gives a slice of the vectors."""
    for module in (nn.Embedding(9, 8), NormalEmbedding(9, 8, std=1.0)):
        assert is_per_token(module)
        x = torch.randint(0, 9, (3, 6))
        assert torch.equal(
            torch.cat([module(part) for part in x.split([1, 5], dim=1)], dim=1), module(x)
        )


@pytest.mark.parametrize("module", named(NOT_PER_TOKEN))
def test_layers_that_look_further_or_might_are_not_taken_for_such(module):
    """Settings matter: a norm over two dimensions, or a softmax over tokens, uses other tokens."""
    assert not is_per_token(module)


class Own(nn.Module):
    """A user's layer without a declaration."""

    def forward(self, x: Tensor) -> Tensor:
        """Use every token."""
        return x - x.mean(dim=1, keepdim=True)


class Marked(Own):
    """A user's layer that declares `per_token`."""

    per_token = True


class Scaled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Use every token."""
        return super().forward(x) / x.norm()


class Remembers(nn.Module):
    """Passes on the sum of all tokens so far."""

    def forward_slice(self, value, past):
        """Add the sum of earlier slices."""
        before = 0 if past is None else past[:, None]
        total = value.cumsum(1) + before
        return total, total[:, -1]

    def forward(self, x: Tensor) -> Tensor:
        """Return cumulative sums."""
        return self.forward_slice(x, None)[0]


def test_an_unknown_layer_is_accepted_if_it_declares_per_token():
    """`per_token = True` on a class, or on one module."""
    assert not is_per_token(Own())
    assert is_per_token(Marked())
    one = Own()
    one.per_token = True
    assert is_per_token(one)
    assert is_per_token(nn.Sequential(Marked(), nn.ReLU()))
    assert not is_per_token(nn.Sequential(Own(), nn.ReLU()))


def test_a_layer_that_has_been_changed_is_another_layer():
    """By a subclass, by a forward set on the object, or by the declaration `per_token = False`."""
    patched, denied = nn.Linear(8, 8), nn.Linear(8, 8)
    patched.forward = lambda x: x - x.mean(dim=1, keepdim=True)
    denied.per_token = False
    assert not any(map(is_per_token, (Scaled(8, 8), patched, denied)))


def test_the_zoos_gpt_hands_on_positions_keys_and_values():
    """Embedding and blocks use earlier tokens; norm and head do not."""
    traced = chain(small_gpt())
    check_slices(traced, SLICED)
    assert [has_past(module) for module in traced.modules] == [True, True, True, False, False]


def test_a_schedule_that_cuts_no_sequences_takes_any_model():
    """Slices of samples are micro-batches."""
    traced = chain(resnet_like())
    check_slices(traced, ps.schedule("1f1b", 2, 2))
    check_slices(traced, terapipe(1, Slicing.even("samples", 2, 1)))


def test_a_layer_that_is_not_causal_is_refused_by_name_with_a_remedy():
    """The error comes before training: a batch norm over half a sequence trains without an error,
    to another result.
    """
    model = nn.Sequential(
        nn.Embedding(9, 8),
        Own(),
        nn.Linear(8, 8),
        nn.BatchNorm1d(6),
        nn.LSTM(8, 8),
        nn.TransformerEncoderLayer(8, 2),
    )
    with pytest.raises(
        SettingError,
        match=r"terapipe by hand cuts sequences into slices, over which this model is not known to be "
        r"causal:",
    ) as error:
        check_slices(chain(model), SLICED)
    lines = str(error.value).split("\n  ")
    assert lines[1:] == [
        "layer 1 (Own) may look at other tokens than its own",
        "layer 3 (BatchNorm1d) takes its statistics over all tokens of a sequence, which no slice has",
        "layer 4 (LSTM) looks at tokens beside each token",
        "layer 5 (TransformerEncoderLayer) looks at all tokens of a sequence",
        lines[-1],
    ]
    assert "per_token = True" in lines[-1]
    assert "forward_slice(value, past) -> (value, past)" in lines[-1]
    assert "such as 1f1b" in lines[-1]


def test_a_pipeline_refuses_it_before_anything_runs_and_names_no_more_than_it_must():
    """All ranks raise the error when the pipeline is created."""
    model, loss = vgg_like(), nn.functional.cross_entropy
    with pytest.raises(
        SettingError, match=r"layer 0\.0 \(Conv2d\) looks at tokens beside each token"
    ):
        ps.Pipeline(model, loss=loss, balance=[15], schedule=SLICED, executor="threads")
    with pytest.raises(SettingError, match=r"and 14 more"):
        check_slices(chain([Own() for _ in range(20)]), SLICED)
    pipe = ps.Pipeline(model, loss=loss, balance=[15], executor="threads")
    pipe.train_batch(*image_data(2))


@pytest.mark.parametrize(
    "hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_hooks_on_a_layer_that_hands_on_are_refused(hook):
    """They would run with forward and not with forward_slice."""
    layer = Remembers()
    check_slices(chain([layer]), SLICED)
    getattr(layer, hook)(lambda *_: None)
    with pytest.raises(
        SettingError,
        match=r"layer 0 \(Remembers\) has hooks, which run with forward and not with forward_slice",
    ):
        check_slices(chain([layer]), SLICED)
