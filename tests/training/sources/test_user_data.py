"""Data sets of a user's factory."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from penstock.errors import SettingError
from penstock.training.data.batches import Dataset
from penstock.training.sources import user_data
from penstock.training.sources.user_data import load_user_data

X = torch.arange(40.0).view(20, 2)
CLASSES = torch.arange(20) % 3
TOKENS = torch.arange(40).view(20, 2) % 7


def load(result, monkeypatch):
    """Load what a factory returns."""
    monkeypatch.setattr(user_data, "load_attribute", lambda reference, setting: lambda: result)
    return load_user_data("data:load", {}, {})


def test_of_a_single_part_the_last_tenth_is_for_tests(monkeypatch):
    """Every run tests."""
    data = load((X, CLASSES), monkeypatch)
    assert (len(data.train_inputs), len(data.test_inputs)) == (18, 2)
    assert torch.equal(torch.cat([data.train_inputs, data.test_inputs]), X)
    assert torch.equal(torch.cat([data.train_targets, data.test_targets]), CLASSES)


@pytest.mark.parametrize("form", [tuple, list, lambda pair: TensorDataset(*pair)])
def test_parts_are_pairs_of_tensors_or_torch_data_sets(form, monkeypatch):
    """Both kinds are in use; their samples are the same."""
    data = load((form((X, CLASSES)), form((X[:5], CLASSES[:5]))), monkeypatch)
    assert torch.equal(data.train_inputs, X)
    assert torch.equal(data.train_targets, CLASSES)
    assert torch.equal(data.test_inputs, X[:5])


@pytest.mark.parametrize(
    ("inputs", "targets", "task", "classes"),
    [
        (X, CLASSES, "classify", 3),
        (TOKENS, TOKENS.roll(1, 1), "next_token", 7),
        (X, X.sum(1), "regress", 0),
    ],
)
def test_the_task_follows_from_types_and_shapes(inputs, targets, task, classes, monkeypatch):
    """It chooses the loss."""
    data = load((inputs, targets), monkeypatch)
    assert (data.task, data.classes) == (task, classes)


def test_a_data_set_of_penstock_is_taken_as_it_is(monkeypatch):
    """Its factory knows task and classes."""
    data = Dataset("mine", X, CLASSES, X, CLASSES, 3, "classify", "20 samples")
    assert load(data, monkeypatch) is data


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "returned a NoneType, and must return a pair of tensors"),
        ((X, CLASSES, X), r"returned a tuple of 3 \(Tensor, Tensor, Tensor\), and must"),
        ((X, CLASSES[:3]), r"inputs of shape \(20, 2\) and targets of shape \(3,\)"),
        ((X[:1], CLASSES[:1]), "returned 1 samples: 2 at least"),
        (TensorDataset(X), "its samples must be pairs"),
        (TensorDataset(X, CLASSES, CLASSES), "its samples must be pairs"),
    ],
)
def test_anything_else_is_refused_with_what_it_was(result, message, monkeypatch):
    """The factory is the user's: it is said what came and what should."""
    with pytest.raises(SettingError, match=message):
        load(result, monkeypatch)


def test_samples_of_several_sizes_are_refused(monkeypatch):
    """They would need padding, which is the user's choice."""
    rows = [(torch.ones(2), 1), (torch.ones(3), 1)]

    class Ragged(torch.utils.data.Dataset):
        """Two samples."""

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return rows[index]

    with pytest.raises(SettingError, match="its samples cannot be stacked"):
        load(Ragged(), monkeypatch)


class Rows(torch.utils.data.Dataset):
    """Twenty samples, by a function of the index."""

    def __init__(self, row):
        self.row = row

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return self.row(index)


def test_samples_that_are_drawn_anew_are_refused(monkeypatch):
    """They are stored, so that all epochs would have the same augmentation. NaN is no difference."""
    with pytest.raises(SettingError, match="Rows returns other samples each time they are read"):
        load(Rows(lambda index: (X[index] + torch.rand(2), CLASSES[index])), monkeypatch)
    load(Rows(lambda index: (X[index] * float("nan"), CLASSES[index])), monkeypatch)


def test_an_error_of_the_data_set_names_its_line(monkeypatch):
    """The code is the user's."""
    with pytest.raises(
        SettingError, match=r"raised ZeroDivisionError.*\n.*test_user_data\.py, line"
    ):
        load(Rows(lambda index: 1 / 0), monkeypatch)
