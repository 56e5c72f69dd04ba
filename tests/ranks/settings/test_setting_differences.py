"""Descriptions of what ranks run, and the differences between them."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from penstock.ranks.settings.run_config import Overrides, make_run_config
from penstock.ranks.settings.setting_differences import (
    Description,
    differences,
    message_of,
    shorten_texts,
)
from penstock.runtime.run_description import describe, describe_run
from penstock.stage.stage_builder import Training
from penstock.stage.training_options import TrainingOptions
from penstock.tracing.traced_chain import chain


def sgd(parameters):
    """Return an optimizer."""
    return torch.optim.SGD(parameters, lr=0.1)


def model(seed=0, width=8, drop=0.1, dtype=torch.float32):
    """Return a model of five layers."""
    torch.manual_seed(seed)
    layers = (
        nn.Linear(4, width),
        nn.Tanh(),
        nn.Dropout(drop),
        nn.BatchNorm1d(width),
        nn.Linear(width, 2),
    )
    return nn.Sequential(*layers).to(dtype)


def description(network=None, loss=nn.functional.mse_loss, seed=0, options=None, **words):
    """Describe the run of a rank with these settings."""
    traced = chain(model() if network is None else network)
    setting = make_run_config(
        traced, None, Overrides(**{"balance": [2, 3], "micro_batches": 2, **words})
    )
    return describe_run(traced, setting, Training(loss, sgd, seed, options or TrainingOptions()))


def shifted(loss, target, margin=0.5):
    """A loss with an additional argument."""
    return (loss - target - margin).square().mean()


def frozen():
    """Return a model with one frozen parameter."""
    network = model()
    network[0].bias.requires_grad_(False)
    return network


OTHERS = {
    "seed": ({"seed": 3}, "seed: 0 on rank 0; 3 on rank 1"),
    "cut": (
        {"balance": [3, 2]},
        r"cut: stages of \[2, 3\] layers on rank 0; stages of \[3, 2\] layers on rank 1",
    ),
    "schedule": (
        {"schedule": "gpipe"},
        "schedule: 1f1b with 2 stages, 2 micro-batches on rank 0; gpipe with",
    ),
    "micro-batches": ({"micro_batches": 4}, "with 2 stages, 4 micro-batches on rank 1"),
    "recompute": ({"recompute": "always"}, "recompute: 'never' on rank 0; 'always' on rank 1"),
    "layers": ({"recompute": [0]}, r"recomputed: \{\} on rank 0; \{0\} on rank 1"),
    "loss": ({"loss": shifted}, "loss: torch.nn.functional.mse_loss .*on rank 0; .*shifted.*0.5"),
    "clipping": (
        {"options": TrainingOptions(clip_grad_norm=1.0)},
        "clip_grad_norm: None on rank 0; 1.0 on rank 1",
    ),
    "autocast": (
        {"options": TrainingOptions(autocast="bfloat16")},
        "autocast: None on rank 0; 'bfloat16' on rank 1",
    ),
    "accumulate": (
        {"options": TrainingOptions(accumulate=2)},
        "accumulate: 1 on rank 0; 2 on rank 1",
    ),
    "boundary": (
        {"options": TrainingOptions(boundary="int8")},
        "boundary: None on rank 0; 'int8' on rank 1",
    ),
    "weights": (
        {"network": model(1)},
        "weights of layer '0': values with checksum .* on rank 0; values with checksum",
    ),
    "width": (
        {"network": model(width=9)},
        r"parameter '0.weight': \(8, 4\), float32, trained on rank 0; \(9, 4\)",
    ),
    "dtype": (
        {"network": model(dtype=torch.float64)},
        r"parameter '0.weight': .*float32.* on rank 0; .*float64",
    ),
    "dropout": ({"network": model(drop=0.5)}, r"module of layer 2: Dropout\(p=0.1.*Dropout\(p=0.5"),
    "mode": ({"network": model().eval()}, "module of layer 0: .* in evaluation mode on rank 1"),
    "frozen": (
        {"network": frozen()},
        "parameter '0.bias': .* trained on rank 0; .* not trained on rank 1",
    ),
    "number": (
        {"network": nn.Sequential(*model(), nn.Tanh()), "balance": [2, 4]},
        "layers: 5 layers on rank 0; 6 layers on rank 1",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_different_model_or_setting_is_reported_with_both_values(name):
    """With each of them the pipeline would train something else than one device."""
    words, expected = OTHERS[name]
    lines = differences([description(), description(**words)])
    assert any(re.search(expected, line) for line in lines), lines


def test_equal_ranks_have_no_difference():
    """Losses and models are equal though they are other objects, as is a function that holds its
    rank's number.
    """

    def loss_of(rank):
        def loss(output, target):
            return (output - target).square().mean() * (1 if rank < 9 else 2)

        return loss

    assert differences([description(model(), loss=loss_of(rank)) for rank in range(3)]) == []
    loss = nn.CrossEntropyLoss(weight=torch.ones(2))
    other = nn.CrossEntropyLoss(weight=torch.ones(2))
    assert describe(loss) == describe(other)


def test_a_loss_module_with_other_weights_is_another_loss():
    """Class weights are as much a part of the loss as its class."""
    one, other = (nn.CrossEntropyLoss(weight=torch.tensor([1.0, w])) for w in (1.0, 2.0))
    assert describe(one) != describe(other)
    assert describe(functools.partial(shifted, margin=1.0)) != describe(
        functools.partial(shifted, margin=2.0)
    )


def test_all_differences_are_listed_by_ranks():
    """Ranks that agree with each other are listed together."""
    ranks = [description(), description(seed=1), description(seed=1, recompute="always")]
    lines = differences(ranks)
    assert "seed: 0 on rank 0; 1 on ranks 1, 2" in lines
    assert "recompute: 'never' on ranks 0, 1; 'always' on rank 2" in lines
    message = message_of(lines)
    assert "2 differences" in message
    assert "every rank" in message.lower()


def test_layers_on_the_meta_device_need_values_only_where_they_are_trained():
    """A rank may save the memory of layers that others train, but must have the same model."""
    whole = description()
    weights = whole.weights
    spared = [
        replace(whole, weights=[*weights[:2], *((name, "meta") for name, _ in weights[2:])]),
        replace(whole, weights=[*((name, "meta") for name, _ in weights[:2]), *weights[2:]]),
    ]
    assert differences(spared) == []
    lines = differences(spared[::-1])
    assert len(lines) == 5
    assert "on the meta device on rank 0; values with checksum" in lines[0]


def test_layers_that_an_earlier_pipeline_trained_elsewhere_may_not_be_trained_here():
    """The rank that is to train them has their weights from before that training."""
    whole = description()
    stale = replace(whole, weights=[(name, "stale") for name, _ in whole.weights])
    lines = differences([stale, whole])
    assert (
        "weights of layer '0': on rank 0, which is to train it, from before the "
        "training by an earlier" in lines[0]
    )
    assert (
        differences([whole, replace(stale, weights=[*stale.weights[:2], *whole.weights[2:]])]) == []
    )


def test_long_values_are_shown_around_their_first_difference():
    """The difference would be lost in a program of a thousand ops."""
    one, other = "a" * 500 + "b" + "c" * 500, "a" * 500 + "d" + "c" * 500
    texts = shorten_texts([one, other])
    assert all(len(text) < 120 for text in texts)
    assert "ab" in texts[0]
    assert "ad" in texts[1]


def test_a_description_survives_json():
    """It is sent through the store."""
    whole = description()
    assert Description.of_json(json.loads(json.dumps(asdict(whole)))) == whole


def rank_of(facts=None, lists=None, weights=(), homes=()):
    """A description with few fields."""
    return Description(facts or {}, lists or {}, list(weights), list(homes))


def test_only_facts_that_ranks_have_are_compared():
    """A rank without a topic has no value of it; topics are in the order of their appearance."""
    ranks = [rank_of({"a": "1", "b": "2"}), rank_of({"b": "3", "c": "4"}), rank_of({"c": "5"})]
    assert differences(ranks) == ["b: 2 on rank 0; 3 on rank 1", "c: 4 on rank 1; 5 on rank 2"]


def test_a_difference_shows_long_values_in_part():
    """A representation of an optimizer may fill a screen on its own."""
    texts = ["a" * 150 + letter + "b" * 150 for letter in "xyx"]
    (line,) = differences([rank_of({"optimizer": text}) for text in texts])
    assert line == (
        f"optimizer: …{'a' * 25}x{'b' * 74}… on ranks 0, 2; …{'a' * 25}y{'b' * 74}… on rank 1"
    )


def test_parameters_are_compared_by_name_and_other_rows_by_place():
    """One more parameter must not make all after it differ."""
    rows = [("a", "1"), ("b", "2"), ("c", "3")]
    ranks = [rank_of(lists={"parameter": rows}), rank_of(lists={"parameter": rows[1:]})]
    assert differences(ranks) == ["parameter 'a': 1 on rank 0; missing on rank 1"]
    ranks = [
        rank_of(lists={"module": rows[:2]}),
        rank_of(lists={"module": [("a", "1"), ("1", "2")]}),
    ]
    assert differences(ranks) == ["module 1: 'b' 2 on rank 0; 2 on rank 1"]
    ranks = [rank_of(lists={"module": rows}), rank_of()]
    assert len(differences(ranks)) == 3
    assert differences(ranks)[2] == "module 2: 'c' 3 on rank 0; missing on rank 1"


@pytest.mark.parametrize(
    ("count", "last"), [(4, "row 3: x"), (5, "row: 1 more differ"), (9, "row: 5")]
)
def test_four_rows_of_a_topic_are_shown_and_others_counted(count, last):
    """The first differences say what is wrong."""
    rows = [[(str(n), text) for n in range(count)] for text in ("x", "y")]
    lines = differences([rank_of(lists={"row": one}) for one in rows])
    assert len(lines) == min(count, 5)
    assert lines[-1].startswith(last)


@pytest.mark.parametrize(
    ("facts", "lists", "compared"),
    [
        ({}, {}, True),
        ({"seed": "0"}, {}, True),
        ({"cut": "0"}, {}, False),
        ({"schedule": "0"}, {}, False),
        ({"ranks": "0"}, {}, False),
        ({}, {"layer": [("0", "x")]}, False),
        ({}, {"program of rank": [("0", "x")]}, False),
        ({}, {"parameter": [("0", "x")]}, False),
        ({}, {"module of layer": [("0", "x")]}, True),
    ],
)
def test_weights_are_compared_only_where_layers_and_parameters_are_the_same(facts, lists, compared):
    """Others would be compared with weights that they have nothing to do with."""
    ranks = [
        rank_of(facts, lists, [("a", "1")], [0]),
        rank_of(dict.fromkeys(facts, "1"), {topic: [] for topic in lists}, [("a", "2")], [0]),
    ]
    lines = differences(ranks)
    weights = (
        "weights of layer 'a': values with checksum 1 on rank 0; values with checksum 2 on rank 1"
    )
    assert (weights in lines) is compared
    assert len(lines) == len(facts) + len(lists) + compared


def test_weights_count_where_their_layer_is_trained():
    """Ranks that do not train it may have it on the meta device, or stale; no rank may be missing."""

    def lines_of(home, *texts):
        return differences([rank_of(weights=[("a", text)], homes=[home]) for text in texts])

    assert lines_of(0, "1", "meta", "stale") == []
    assert lines_of(1, "meta", "1", "1") == []
    assert lines_of(0, "meta", "meta") == []
    assert lines_of(5, "1", "2") == []
    (line,) = lines_of(0, "meta", "1", "stale")
    assert line == (
        "weights of layer 'a': on the meta device on rank 0; values with checksum 1 on rank 1; "
        "from before an earlier training on rank 2"
    )
    (line,) = lines_of(1, "1", "stale")
    assert "on rank 1, which is to train it, from before" in line


def test_the_advice_fits_the_differences():
    """To plan again does not help against other weights."""
    plan, seed = "plan on one rank, and load that plan on all of them", "seed its initialisation"
    for line, advice in (
        ("cut: 1 on rank 0; 2 on rank 1", [plan]),
        ("weights of layer 'a': 1 on rank 0; 2 on rank 1", [seed]),
        ("seed: 0 on rank 0; 1 on rank 1", []),
    ):
        message = message_of([line])
        assert "(1 difference):" in message
        assert f"\n  {line}\n" in message
        assert [text for text in (plan, seed) if text in message] == advice


@pytest.mark.parametrize("place", [0, 10, 30, 99, 150, 199])
def test_the_first_difference_is_in_what_is_shown_of_long_texts(place):
    """With what comes before it; dots stand for what is left out."""
    one = "".join(chr(0x4E00 + n) for n in range(200))
    other = one[:place] + "#" + one[place + 1 :]
    for text, short in zip((one, other), shorten_texts([one, other]), strict=True):
        core = short.strip("…")
        assert core in text
        assert len(core) <= 100
        start = text.index(core)
        assert start <= place < start + len(core)
        assert short.startswith("…") == (start > 0)
        assert short.endswith("…") == (start + len(core) < 200)
        assert place - start <= 25
    assert shorten_texts(["a" * 100, "b"]) == ["a" * 100, "b"]
    assert shorten_texts(["a" * 150, "a" * 120]) == ["a" * 100 + "…"] * 2
