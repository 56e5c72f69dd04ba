"""The catalogue of data sets: one word in a config, and options that mean the same whichever data
set it is.
"""

from __future__ import annotations

import inspect

import pytest
import torch

from penstock.errors import SettingError, UnknownName
from penstock.training.data.batches import Dataset
from penstock.training.data.catalogue import DATASETS, SHARED_OPTIONS, dataset


def test_the_catalogue_has_the_four_data_sets():
    """The list grows by a visible change."""
    assert list(DATASETS.entries()) == ["cifar100", "digits", "reversed", "text"]


@pytest.mark.parametrize("name", list(DATASETS.entries()))
def test_the_declared_options_are_those_of_the_function(name):
    """An option that is declared and not taken would end in a TypeError; one not declared could
    never be given.
    """
    entry = DATASETS.find(name)
    parameters = inspect.signature(entry.make).parameters
    assert entry.facts["takes"] == tuple(word for word in parameters if word != "path")
    assert ("path" in parameters) == ("PATH" in entry.facts["usage"])
    assert entry.facts["source"]


def test_digits_takes_its_options_and_is_not_told_of_tokens():
    """A trainer gives the same three options to every data set."""
    pytest.importorskip("sklearn.datasets", reason="scikit-learn is an extra")
    data = dataset("digits", image=10, channels=2, tokens=64)
    assert isinstance(data, Dataset)
    assert data.train_inputs.shape == (1437, 2, 10, 10)


def test_cifar100_takes_the_path_behind_its_colon(cifar_folder):
    """One word holds the data set and where it lies."""
    data = dataset(f"cifar100:{cifar_folder}", image=32, channels=3, tokens=9)
    assert data.train_inputs.shape == (5, 3, 32, 32)


def test_an_option_of_one_data_set_reaches_it(cifar_folder):
    """`check` is cifar100's own, and it refuses a folder."""
    with pytest.raises(SettingError, match="check compares the md5"):
        dataset(f"cifar100:{cifar_folder}", check=True)


def test_text_is_the_default_text_or_the_file_behind_the_colon(tmp_path):
    """The path is optional here. Only the first colon counts: paths may have more."""
    path = tmp_path / "a:b.txt"
    path.write_text("abcd" * 20)
    assert dataset(f"text:{path}", tokens=3, image=8).classes == 5
    assert dataset("text", tokens=32).train_inputs.shape[1] == 32


def test_a_path_may_begin_with_a_tilde(tmp_path, monkeypatch):
    """A shell does not expand it behind a colon."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "story.txt").write_text("abcd" * 20)
    assert torch.equal(
        dataset("text:~/story.txt", tokens=3).train_inputs[0], torch.tensor([1, 2, 3])
    )


@pytest.mark.parametrize("name", ["cifar100", "cifar100:"])
def test_cifar100_without_a_path_says_how_to_write_it(name):
    """Nothing is downloaded, so the user has to say where the files are."""
    with pytest.raises(
        SettingError,
        match=r"cifar100 needs a path; write cifar100:PATH \(a folder with train\.bin",
    ):
        dataset(name)


def test_text_with_a_colon_and_nothing_behind_it_is_refused():
    """An empty variable in a script must not quietly become another text."""
    with pytest.raises(SettingError, match=r"text needs a path; write text\[:PATH\]"):
        dataset("text:")


def test_digits_with_a_path_is_refused():
    """To ignore it would train on other data than the user named."""
    with pytest.raises(
        SettingError, match="digits takes no path, but '/data' follows its colon; write digits"
    ):
        dataset("digits:/data")


def test_digits_with_a_bare_colon_is_refused():
    """The path that was meant to follow got lost."""
    with pytest.raises(
        SettingError, match="digits takes no path, but '' follows its colon; write digits"
    ):
        dataset("digits:")


def test_an_unknown_name_lists_what_there_is():
    """With the closest, since it is most often a slip of the finger."""
    with pytest.raises(
        UnknownName,
        match=r"no data set called 'cifar10'\. Did you mean 'cifar100'.*digits, reversed, text",
    ):
        dataset("cifar10:/data")


@pytest.mark.parametrize(
    ("name", "option", "says"),
    [
        (
            "digits",
            {"imgae": 32},
            "digits does not take imgae; it takes image, channels and is written digits",
        ),
        (
            "text",
            {"check": True},
            r"text does not take check; it takes tokens and is written text\[:PATH\]",
        ),
        (
            "cifar100",
            {"path": "/data"},
            "cifar100 does not take path; it takes check and is written cifar100:PATH",
        ),
    ],
)
def test_an_option_that_the_data_set_does_not_take_is_refused(name, option, says):
    """A slip in an option's name would otherwise be a default in silence."""
    assert not set(option) & set(SHARED_OPTIONS)
    with pytest.raises(SettingError, match=says):
        dataset(name, **option)
