"""Unmodified models of the transformers library, compared with plain training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils import _pytree as pytree

from penstock.errors import ChainError
from penstock.modules.state_names import state_of
from penstock.runtime.pipeline import Pipeline
from penstock.tracing.form import call
from penstock.tracing.graph_export import without_caches
from penstock.tracing.materialise import materialise
from penstock.tracing.traced_chain import chain

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 31,
}
OFF = {"attention_dropout": 0.0}
BERT_OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def ids(samples, length):
    return torch.randint(0, 31, (samples, length))


def masked(samples, length):
    """Return tokens of which the last one of the first sequence is padding."""
    mask = torch.ones(samples, length, dtype=torch.long)
    mask[0, -1] = 0
    return {"input_ids": ids(samples, length), "attention_mask": mask}


def gpt2():
    config = transformers.GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=2,
        vocab_size=31,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config), ids


def gpt2_with_labels():
    def inputs(samples, length):
        batch = ids(samples, length)
        return {"input_ids": batch, "labels": batch}

    return gpt2()[0], inputs


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **BERT_OFF)), masked


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_key_value_heads=1)
    ), masked


def t5():
    def inputs(samples, length):
        return {"input_ids": ids(samples, length), "labels": ids(samples, length - 1)}

    config = transformers.T5Config(
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        vocab_size=31,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    return transformers.T5ForConditionalGeneration(config), inputs


def vit():
    sizes = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    config = transformers.ViTConfig(**sizes, **BERT_OFF, image_size=8, patch_size=4, num_labels=3)
    return transformers.ViTForImageClassification(config), lambda samples, _: {
        "pixel_values": torch.randn(samples, 3, 8, 8)
    }


MODELS = {
    "gpt2": gpt2,
    "gpt2 with labels": gpt2_with_labels,
    "bert": bert,
    "llama": llama,
    "t5": t5,
    "vit": vit,
}


def model_and_inputs(name):
    """Return a model in training mode, a copy of it, and a function that creates its inputs."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.train()
    return model, copy.deepcopy(model), inputs


def loss(output, _target):
    return sum(
        (leaf.float() ** 2).mean()
        for leaf in pytree.tree_leaves(output)
        if isinstance(leaf, torch.Tensor)
    )


def grads(model):
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def part_of(inputs, first, last):
    """Return some samples of a batch."""
    return pytree.tree_map(lambda leaf: leaf[first:last], inputs)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_in_three_stages_is_the_model(name):
    """Outputs with their own classes, gradients, and the state's names and values; also for other
    lengths and batch sizes than the example's.
    """
    model, plain, inputs = model_and_inputs(name)
    traced = chain(model, inputs(3, 7))
    third = len(traced) // 3
    pipe = Pipeline(
        traced,
        loss=loss,
        balance=[third, third, len(traced) - 2 * third],
        schedule="1f1b",
        micro_batches=2,
        executor="threads",
    )
    for samples, length in ((6, 7), (4, 5)):
        batch = inputs(samples, length)
        model.zero_grad()
        plain.zero_grad()
        batch_loss, total = float(pipe.train_batch(batch, torch.zeros(samples))), 0.0
        for first in (0, samples // 2):
            with without_caches(plain):
                part_loss = loss(call(plain, part_of(batch, first, first + samples // 2)), None) / 2
            part_loss.backward()
            total += float(part_loss.detach())
        assert batch_loss == pytest.approx(total)
        expected = grads(plain)
        assert set(grads(model)) == set(expected)
        for key, grad in grads(model).items():
            torch.testing.assert_close(grad, expected[key], msg=key, rtol=1e-4, atol=1e-6)
    state = pipe.state_dict()
    assert set(state) == set(plain.state_dict())
    if name not in (
        "gpt2 with labels",
        "t5",
    ):  # a loss of one number has no samples to be put together by
        batch = inputs(4, 6)
        with without_caches(plain), torch.no_grad():
            expected_output = call(plain.eval(), batch)
        output = pipe.forward(batch)
        assert type(output) is type(expected_output)
        torch.testing.assert_close(output.logits, expected_output.logits)


def test_a_model_on_the_meta_device_gets_its_weights_as_its_library_draws_them():
    """Non-persistent tables that the constructor computes must be correct, and a layer's weights
    must not depend on the rank.
    """
    with torch.device("meta"):
        model = llama()[0]
    batch = masked(2, 6)
    traced = chain(model, batch)
    layers = [
        materialise(traced, [index], torch.device("cpu"), seed=5)[0].eval()
        for index in range(len(traced))
    ]
    again = materialise(traced, range(len(traced)), torch.device("cpu"), seed=5)
    state = {}
    for layer, one, other in zip(traced.layers, layers, again, strict=True):
        state |= state_of(layer.name, one)
        assert all(
            torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True)
        )
    real = llama()[0].eval()
    real.load_state_dict(state)
    assert float(state["model.layers.0.mlp.up_proj.weight"].std()) == pytest.approx(0.02, rel=0.2)
    value = batch
    for index, layer in enumerate(layers):
        value = layer(value)
        if index in traced.exits:
            value = traced.entries[index + 1](traced.exits[index](value), batch)
    torch.testing.assert_close(value.logits, real(**batch, use_cache=False).logits)


def test_keys_and_values_for_generation_are_refused_by_their_class():
    """They would be sent to the end of the pipeline and are useless for training; the error names
    their class.
    """
    model, _, inputs = model_and_inputs("gpt2")
    with pytest.raises(
        ChainError, match=r"GPT2LMHeadModel cannot be traced.*it returns a DynamicCache"
    ):
        chain(model, {"input_ids": inputs(2, 4), "use_cache": True})
