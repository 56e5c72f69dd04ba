"""GPT: shapes, causality, initial weights, loss."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.zoo.catalogue import model
from penstock.zoo.gpt import gpt_loss

TINY = {"layers": 3, "width": 16, "heads": 4, "tokens": 8, "vocabulary": 13}


@settings(deadline=None, max_examples=25)
@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 4),
    head_width=st.integers(1, 5),
    tokens=st.integers(1, 9),
    v=st.integers(1, 20),
)
def test_parameter_count_follows_the_stated_formula(layers, heads, head_width, tokens, v):
    """The docstring's formula is what people size experiments by."""
    w = heads * head_width
    network = model(
        "gpt", device="meta", layers=layers, width=w, heads=heads, tokens=tokens, vocabulary=v
    )
    stated = layers * (12 * w**2 + 13 * w) + 2 * v * w + tokens * w + 2 * w
    assert sum(parameter.numel() for parameter in network.parameters()) == stated


def test_the_chain_is_embedding_blocks_norm_head():
    """Blocks are equal and each one layer; that is what makes GPT the plain case for pipelines."""
    network = model("gpt", device="meta", **TINY)
    assert list(network._modules) == ["embedding", "blocks", "norm", "head"]
    assert "blocks.2.attention.qkv.weight" in network.state_dict()
    assert list(network.buffers()) == []


@pytest.mark.parametrize("length", [1, 5, 8])
def test_sequences_up_to_the_context_length_give_logits_per_token(length):
    """Shorter sequences use the first positions."""
    network = model("gpt", **TINY)
    assert network(torch.zeros(2, length, dtype=torch.int64)).shape == (2, length, 13)


def test_sequence_longer_than_the_context_is_refused_with_both_numbers():
    """On a GPU the look-up would end in a device-side assertion that names nothing."""
    network = model("gpt", **TINY)
    with pytest.raises(
        SettingError,
        match="made with tokens=8, but the input has 9 per sequence: make it with tokens=9",
    ):
        network(torch.zeros(1, 9, dtype=torch.int64))


def in_slices(network, tokens, lengths):
    """The model's output slice by slice, each layer handing on its past."""
    outputs, pasts = [], {}
    for part in tokens.split(lengths, dim=1):
        value, pasts["embedding"] = network.embedding.forward_slice(part, pasts.get("embedding"))
        for number, block in enumerate(network.blocks):
            value, pasts[number] = block.forward_slice(value, pasts.get(number))
        outputs.append(network.head(network.norm(value)))
    return torch.cat(outputs, dim=1), pasts


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda lengths: sum(lengths) <= 8)
)
def test_slices_of_a_sequence_give_what_the_whole_gives(lengths):
    """Keys, values and positions of earlier tokens are handed on; cut anywhere, the logits and
    gradients stay.
    """
    torch.manual_seed(0)
    network = model("gpt", **TINY)
    tokens = torch.randint(0, 13, (2, sum(lengths)))
    whole = network(tokens)
    sliced, pasts = in_slices(network, tokens, lengths)
    assert torch.allclose(sliced, whole, atol=1e-6)
    assert pasts["embedding"] == sum(lengths)
    assert [tuple(tensor.shape) for tensor in pasts[0]] == [(2, 4, sum(lengths), 4)] * 2
    weights = list(network.parameters())
    grads = (torch.autograd.grad(out.square().sum(), weights) for out in (sliced, whole))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*grads, strict=True))


def test_slices_count_against_the_context_length_together():
    """Position 8 of a model with 8 positions is one too many, in whatever slice it comes."""
    network = model("gpt", **TINY)
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    with pytest.raises(
        SettingError,
        match="made with tokens=8, but the input has 9 per sequence: make it with tokens=9",
    ):
        in_slices(network, tokens, [6, 3])


def test_later_tokens_do_not_change_earlier_logits():
    """A model that sees the token it shall predict learns nothing, with a splendid loss."""
    torch.manual_seed(0)
    network = model("gpt", **TINY)
    tokens = torch.randint(0, 13, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 13
    before, after = network(tokens), network(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_position_matters():
    """Attention alone takes tokens as a bag; the learned positions must reach it."""
    torch.manual_seed(0)
    logits = model("gpt", **TINY)(torch.full((1, 8), 3))
    assert not torch.allclose(logits[0, 0], logits[0, 7])


def test_heads_that_do_not_divide_the_width_are_refused_with_a_width_that_fits():
    """Torch would fail on a reshape in the first forward."""
    with pytest.raises(SettingError, match=r"width=16 among heads=3.* for example 18"):
        model("gpt", device="meta", **(TINY | {"heads": 3}))


def test_projections_into_the_residual_stream_start_smaller():
    """The variance of the stream then does not grow with depth: 0.02 / sqrt(2 x layers)."""
    torch.manual_seed(0)
    block = model("gpt", layers=8, width=128).blocks[0]
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert block.attention.projection.weight.std().item() == pytest.approx(0.005, rel=0.03)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.005, rel=0.03)


def test_dropout_acts_in_training_only():
    """Evaluation is a function of the input."""
    torch.manual_seed(0)
    network = model("gpt", dropout=0.5, **TINY)
    tokens = torch.randint(0, 13, (2, 8))
    assert not torch.equal(network(tokens), network(tokens))
    network.eval()
    assert torch.equal(network(tokens), network(tokens))


def test_loss_of_equal_logits_is_the_logarithm_of_the_vocabulary():
    """The mean over tokens, not the sum: micro-batches of equal size then weigh the same."""
    assert gpt_loss(
        torch.zeros(2, 5, 13), torch.zeros(2, 5, dtype=torch.int64)
    ).item() == pytest.approx(math.log(13))


def test_loss_compares_every_token_with_its_target():
    """Flattening logits and targets in different orders would still give a number."""
    targets = torch.arange(6).view(2, 3)
    sure = 50.0 * torch.nn.functional.one_hot(targets, 7).float()
    assert gpt_loss(sure, targets).item() < 1e-6
    assert gpt_loss(sure, targets.flip(0)).item() > 40


def test_gpt_learns_a_batch_in_a_few_steps():
    """Initial weights of 0.02 give a start near ln(vocabulary), and the gradient finds its way
    down.
    """
    torch.manual_seed(0)
    network = model("gpt", **TINY)
    tokens = torch.randint(0, 13, (4, 9))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = gpt_loss(network(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(13), abs=0.1)
    assert losses[-1] < 0.5 * losses[0]
