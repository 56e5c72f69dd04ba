"""Value checks in a forward become ops that fail where the check would raise."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.tracing import checked
from torch.nn import functional

from penstock.errors import ChainError, RunError
from penstock.runtime.pipeline import Pipeline
from penstock.tracing.traced_chain import chain

CHECKS = [
    checked.by_comparison,
    checked.by_or,
    checked.by_else,
    checked.by_item,
    checked.by_name,
    checked.by_bool,
    checked.by_and,
    checked.by_chain,
    checked.by_torch,
]


def pipeline(model, example):
    return Pipeline(
        chain(model, example),
        loss=lambda output, target: functional.cross_entropy(
            output.flatten(0, 1), target.flatten()
        ),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        balance=[1, 1],
        schedule="1f1b",
        micro_batches=2,
        executor="threads",
    )


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_is_traced_and_fails_on_the_batch_that_fails_it(check):
    """Models check the range of labels and tokens in their forward: `if x.max() >= limit: raise`."""
    torch.manual_seed(0)
    model = checked.Checking(check)
    x, y = torch.randint(0, 8, (4, 5)), torch.randint(0, 3, (4, 5))
    pipe = pipeline(model, x)
    pipe.train_batch(x, y)
    x[3, 2] = 8
    with pytest.raises(
        RunError, match=r"this check of the model's has failed|Runtime assertion failed"
    ):
        pipe.train_batch(x, y)


@pytest.mark.parametrize("check", [checked.branches, checked.ambiguous, checked.inside])
def test_a_branch_that_does_more_than_check_stays_refused_and_torch_prints_nothing(check, capfd):
    """For `a and b` to be false neither needs to be false, and a call may use a truth value in any
    way.
    """
    with pytest.raises(
        ChainError, match=rf"in {check.__name__}: .*depends on the values of a tensor"
    ):
        chain(checked.Checking(check), torch.randint(0, 8, (4, 5)))
    out, err = capfd.readouterr()
    assert "def forward" not in out + err
    assert len(err.splitlines()) < 3


def speech(kind, config):
    transformers = pytest.importorskip("transformers")
    settings = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
                "conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_conv_pos_embeddings": 4, "layerdrop": 0.0,
                "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "apply_spec_augment": False, "hidden_dropout": 0.0,
                "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0, "activation_dropout": 0.0,
                "ctc_zero_infinity": True, "ctc_loss_reduction": "mean"}  # fmt: skip
    return getattr(transformers, kind)(getattr(transformers, config)(**settings))


@pytest.mark.parametrize(
    ("kind", "config"), [("Wav2Vec2ForCTC", "Wav2Vec2Config"), ("HubertForCTC", "HubertConfig")]
)
def test_ctc_models_with_labels_train_as_plain_pytorch(kind, config):
    """They check the range of labels, select as many labels as there are, and have a loss whose
    sizes follow the lengths.
    """
    torch.manual_seed(0)
    model = speech(kind, config).train()
    plain = copy.deepcopy(model)
    x, y = torch.randn(4, 60), torch.randint(1, 12, (4, 5))
    y[1, 3:] = -100
    traced = chain(model, {"input_values": x, "labels": y})
    pipe = Pipeline(
        traced,
        loss=lambda outputs, _: outputs["loss"],
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        balance=[5, len(traced) - 5],
        schedule="1f1b",
        micro_batches=2,
        executor="threads",
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        y[0, 4] = -100  # another number of labels than the example's
        pipe.train_batch({"input_values": x, "labels": y}, y)
        optimizer.zero_grad()
        for rows in (slice(0, 2), slice(2, 4)):
            (plain(input_values=x[rows], labels=y[rows]).loss / 2).backward()
        optimizer.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    y[0, 0] = 12
    with pytest.raises(RunError, match=r"labels\.max\(\) >= self\.config\.vocab_size.*has failed"):
        pipe.train_batch({"input_values": x, "labels": y}, y)
