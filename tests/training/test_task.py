"""Model and data are brought together, or refused together."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import SettingError, UnknownName
from penstock.training.config import TrainConfig
from penstock.training.scores import accuracy
from penstock.training.sources.model_sources import default_data
from penstock.training.task import make_task


def test_a_vgg_gets_the_classes_and_the_form_of_the_data():
    """Users should not have to count classes."""
    task = make_task(TrainConfig(model="vgg11", data="digits"))
    assert task.model[-1][-1].out_features == task.data.classes == 10
    assert task.data.train_inputs.shape[1:] == (3, 32, 32)
    assert all(parameter.is_meta for parameter in task.model.parameters()), (
        "no rank may hold the whole model"
    )


def test_an_mlp_gets_flat_images():
    """It takes rows of numbers, whatever they were."""
    task = make_task(TrainConfig(model="mlp", data="digits", image=8, channels=1))
    assert task.data.train_inputs.shape[1:] == (64,)
    assert task.model[0].in_features == 64


def test_a_gpt_gets_the_vocabulary_and_the_length_of_the_text():
    """A token that the embedding does not have would crash in the middle of training."""
    task = make_task(
        TrainConfig(model="gpt", data="text", tokens=16, model_options={"layers": 1, "width": 32})
    )
    assert task.model[-1].out_features == task.data.classes
    assert task.data.train_inputs.shape[1] == 16


def test_a_gnmt_gets_pairs_of_sequences_and_their_vocabulary():
    """Source and target come in one tensor, as every input does."""
    task = make_task(
        TrainConfig(
            model="gnmt", data="reversed", tokens=9, model_options={"layers": 4, "hidden": 8}
        )
    )
    assert task.model[-1].linear.out_features == task.data.classes
    assert task.data.train_inputs.shape[1:] == (2, 9)
    assert task.data.train_targets.shape[1:] == (9,)


@pytest.mark.parametrize(
    ("model", "data"),
    [("vgg11", "digits"), ("mlp", "digits"), ("gpt", "text"), ("gnmt16", "reversed")],
)
def test_every_task_has_data_at_hand(model, data):
    """To profile a model one need not know its data."""
    assert default_data(model) == data


def test_data_at_hand_for_an_unknown_model_is_refused_with_what_there_is():
    """A typo should cost one look here too."""
    with pytest.raises(UnknownName, match="Did you mean 'gnmt'"):
        default_data("gmt")


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ("vgg11", "text", "takes images"),
        ("gpt", "digits", "takes tokens"),
        ("gpt", "reversed", "use --data text"),
        ("gnmt", "text", "takes pairs of sequences of tokens, but data text is tokens"),
    ],
)
def test_a_model_and_data_of_different_kinds_are_refused(model, data, words):
    """Shapes would complain much later, and about something else."""
    with pytest.raises(SettingError, match=words):
        make_task(TrainConfig(model=model, data=data))


def test_unknown_names_are_refused_with_what_there_is():
    """A typo should cost one look."""
    with pytest.raises(UnknownName, match="Did you mean 'vgg11'"):
        make_task(TrainConfig(model="vgg111"))
    with pytest.raises(SettingError, match="vgg11 has no option 'depth'"):
        make_task(TrainConfig(model="vgg11", model_options={"depth": 3}))


def test_accuracy_counts_right_answers_of_classes_and_tokens():
    """The last dimension holds the scores in both."""
    scores = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert accuracy(scores, torch.tensor([1, 0, 0])) == pytest.approx(2 / 3)
    assert accuracy(scores.reshape(1, 3, 2), torch.tensor([[1, 0, 0]])) == pytest.approx(2 / 3)


def test_batches_are_the_same_in_every_process_that_asks():
    """Ranks load their own data: they must not disagree on a batch."""
    config = TrainConfig(model="mlp", data="digits", image=8, channels=1, batch=100)
    first, second = (list(make_task(config).epoch(config, 3)) for _ in range(2))
    assert len(first) == 15
    assert all(
        torch.equal(a, c) and torch.equal(b, d)
        for (a, b), (c, d) in zip(first, second, strict=True)
    )
