"""Rank processes that do not run the same: every rank raises one message with the ranks and
differences.
"""

from __future__ import annotations

import re

import pytest
import torch
from tests.ranks import disagreement
from tests.ranks.disagreement import X, Y, model
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import penstock as ps


def agree(ranks, name, *parts):
    """Check that every rank has the same text, with these parts."""
    texts = [results[name] for results in ranks]
    assert len(set(texts)) == 1, texts
    for part in parts:
        assert re.search(part, texts[0], re.DOTALL), texts[0]


def loss_of_a_first_batch():
    """Return the loss of the ranks' first batch on one device."""
    pipe = ps.Pipeline(
        model(),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        balance=[2, 3],
        micro_batches=2,
        executor="threads",
    )
    return float(pipe.train_batch(X, Y)), float(pipe.train_batch(X, Y))


def test_pipelines_that_differ_are_refused_on_every_rank_and_later_ones_work():
    """They are refused at construction, before anything is computed and without waiting for a
    deadline.
    """
    ranks = ps.launch(disagreement.constructions, 2)
    agree(
        ranks,
        "settings",
        "^RanksDiffer: ",
        "schedule: 1f1b with 2 stages, 2 micro-batches on rank 0; gpipe with 2 stages, 4",
        "seed: 0 on rank 0; 7 on rank 1",
        "boundary: None on rank 0; 'int8' on rank 1",
    )
    agree(
        ranks,
        "ranks",
        "ranks: 2 ranks on rank 0; 1 rank on rank 1",
        r"cut: stages of \[2, 3\] layers on rank 0",
    )
    agree(
        ranks,
        "weights",
        "weights of layer '0': values with checksum .* on rank 0; values",
        "torch.manual_seed",
    )
    agree(
        ranks,
        "dtype",
        "parameter '0.weight': .*float32, trained on rank 0; .*float64, trained on rank 1",
    )
    agree(ranks, "optimizer", "lr of the optimizer's group 0: 0.1 on rank 0; 1.1 on rank 1")
    first, second = (results["failure"] for results in ranks)
    assert first.startswith(
        "RunError: rank 1 could not make its Pipeline: ChainError: stage lengths [1, 1]"
    )
    assert second.startswith("ChainError: stage lengths [1, 1]")
    assert re.search("rank 1.*learning rate", ranks[0]["factory"])
    loss, _ = loss_of_a_first_batch()
    assert [results["after"] for results in ranks] == [loss, loss]
    assert [results["again"] for results in ranks] == [loss, loss]


def test_a_different_first_batch_is_refused_before_any_update():
    """Such as from a shuffling loader without a seed, a data-parallel sampler, or a part of a
    batch.
    """
    ranks = ps.launch(disagreement.batches, 2)
    agree(
        ranks,
        "content",
        "^RanksDiffer: the ranks have different batches in call 2",
        "values 0, 0.03125.* on rank 0",
        "values 0.03125, .* on rank 1",
        "seed the loader's shuffling",
    )
    agree(ranks, "evaluation", r"eval_batch with x \(8, 4\).* on rank 0.*x \(7, 4\).* on rank 1")
    agree(
        ranks,
        "sampler",
        "^SettingError: the loader's DistributedSampler gives every rank another one of 2 parts",
    )
    agree(ranks, "shuffled", "different batches in call 1")
    losses = loss_of_a_first_batch()
    for results in ranks:
        assert (results["first"], results["unchanged"]) == losses
        assert results["seeded"] == 16


def test_later_differences_are_found_without_the_deadline():
    """They are found with the loss of the batch, or, where ranks wait for each other, by their
    calls.
    """
    ranks = ps.launch(disagreement.later, 2)
    agree(
        ranks,
        "content",
        "^RanksDiffer: the ranks have different batches in call 22",
        "has already been computed",
    )
    agree(ranks, "shapes", r"^RanksDiffer: .*x \(8, 4\) .* on rank 0.*x \(7, 4\) .* on rank 1")
    agree(
        ranks,
        "loader",
        r"^RanksDiffer: .*call 25.*train_batch .* on rank 0.*the end of train\(\) on rank 1",
        "the same number of batches",
    )
    agree(
        ranks, "one_rank", "^RanksDiffer: .*call 21.*state_dict on rank 0.*train_batch .* on rank 1"
    )
    agree(ranks, "output", "^RanksDiffer: .*different batches.*forward with")
    agree(ranks, "asynchronous", "^RanksDiffer: the ranks have different batches")
    agree(ranks, "copied", "^RanksDiffer: the ranks have different batches in call 10")


@pytest.fixture(scope="module")
def model_readings():
    """Return the results of `disagreement.models` of every rank."""
    return ps.launch(disagreement.models, 2)


def test_reading_a_model_that_other_ranks_train_in_part_is_refused(model_readings):
    """`model.state_dict()` was 85 % off once, without an error."""
    for rank, results in enumerate(model_readings):
        assert set(results["fresh"].values()) == {""}
        assert set(results["filled"].values()) == {""}
        assert set(results["snapshot"].values()) == {""}
        for moment in ("stale", "closed"):
            names = ("state_dict()", "running", "pickling", "copying")
            for text, name in zip(results[moment].values(), names, strict=True):
                assert text.startswith(f"RunError: {name} of the model on rank {rank}")
        assert all(text.startswith("RunError") for text in results["traced"].values())
        assert results["equal"]
        assert results["traced output"]
        assert results["check"] < 1e-5
    trained = [[text != "RunError" for text in results["list"]] for results in model_readings]
    assert trained == [[True, True, False, False, False], [False, True, True, True, True]]


def test_a_second_pipeline_over_a_trained_model_has_the_trained_weights_or_is_refused(
    model_readings,
):
    """Under the same cut every rank continues with its layers; under another it would start with
    old ones.
    """
    agree(
        model_readings,
        "moved",
        "weights of layer '2': on rank 0, which is to train it, from before the training",
        r"load_into\(model\) first",
    )
    for results in model_readings:
        assert isinstance(results["again"], float)
        assert "training of the model" in results["threads"]


def test_an_average_over_ranks_is_that_of_one_device(model_readings):
    """Every rank averages its own stages and gets the whole average."""
    network = model()
    pipe = ps.Pipeline(
        network,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        balance=[2, 3],
        micro_batches=2,
        executor="threads",
    )
    plain = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    pipe.train_batch(X, Y)
    plain.update_parameters(network)
    second = ps.Pipeline(
        network,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        balance=[2, 3],
        micro_batches=2,
        executor="threads",
    )
    second.train_batch(X, Y)
    pipe.train_batch(X, Y)
    plain.update_parameters(network)
    for results in model_readings:
        for name, tensor in plain.module.state_dict().items():
            assert torch.equal(results["average"][name], tensor), name
