"""Digits: the real images, always split the same way, at any size."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from penstock.errors import MissingExtra, SettingError
from penstock.training.data.digits import digits

# Found and not imported: it takes 2 s, in every worker that collects the tests.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn is an extra"
)


@pytest.fixture(scope="module")
def plain():
    """The data set with no options."""
    return digits()


def test_there_are_1437_digits_to_train_and_360_to_test(plain):
    """The published count, 1,797, split 80 to 20."""
    assert plain.train_inputs.shape == (1437, 1, 8, 8)
    assert plain.test_inputs.shape == (360, 1, 8, 8)
    assert plain.train_targets.shape == (1437,)
    assert plain.test_targets.shape == (360,)
    assert (plain.train_inputs.dtype, plain.train_targets.dtype) == (torch.float32, torch.int64)
    assert (plain.name, plain.classes, plain.task) == ("digits", 10, "classify")


@pytest.mark.parametrize("image", [8, 5, 32])
def test_the_training_part_has_mean_0_and_variance_1_at_every_size(image):
    """Interpolation shrinks the variance, so scaling comes after it."""
    inputs = digits(image=image).train_inputs
    assert inputs.mean().item() == pytest.approx(0, abs=1e-5)
    assert inputs.var(correction=0).item() == pytest.approx(1, abs=1e-4)


def test_every_digit_has_a_fifth_of_its_images_in_the_test_part(plain):
    """A split that lacks a class would measure something else."""
    tested = torch.bincount(plain.test_targets, minlength=10)
    whole = tested + torch.bincount(plain.train_targets, minlength=10)
    assert ((tested - whole / 5).abs() < 1).all()


def test_both_parts_together_are_the_images_of_scikit_learn_in_their_order(plain):
    """No image is lost, doubled, or given the label of another."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    sums = torch.from_numpy(bunch.images).sum((1, 2))
    restored = [
        (x.double().sum((1, 2, 3)), y)
        for x, y in (
            (plain.train_inputs, plain.train_targets),
            (plain.test_inputs, plain.test_targets),
        )
    ]
    # Sums of pixels are moved and scaled like the pixels, so they tell the images apart by their
    # ranks.
    both, labels = torch.cat([x for x, _ in restored]), torch.cat([y for _, y in restored])
    slope = (both.max() - both.min()) / (sums.max() - sums.min())
    pixel_sums = ((both - both.min()) / slope + sums.min()).round().long()
    expected = sorted(zip(sums.long().tolist(), bunch.target.tolist(), strict=True))
    assert sorted(zip(pixel_sums.tolist(), labels.tolist(), strict=True)) == expected


def test_the_training_part_is_not_sorted_by_digit(plain):
    """Without shuffling, a model would see one digit for a hundred batches."""
    assert len(plain.train_targets[:50].unique()) == 10


def test_two_calls_give_the_same_split_whatever_the_global_seed(plain):
    """A comparison of two systems needs one test part."""
    torch.manual_seed(123)
    before = torch.get_rng_state()
    again = digits()
    assert torch.equal(again.train_inputs, plain.train_inputs)
    assert torch.equal(again.test_targets, plain.test_targets)
    assert torch.equal(torch.get_rng_state(), before)


def test_images_are_resized_and_their_channel_is_repeated():
    """Models for colour images of 32x32 can be tried without a download."""
    large = digits(image=32, channels=3)
    assert large.train_inputs.shape == (1437, 3, 32, 32)
    assert large.test_inputs.shape == (360, 3, 32, 32)
    assert torch.equal(large.test_inputs[:, 0], large.test_inputs[:, 2])
    assert large.train_inputs.is_contiguous()
    assert "8x8 pixels made 32x32 with 3 channels: 1,437 to train, 360 to test" in large.description


def test_the_description_is_one_line(plain):
    """It stands in tables and in the first line of a run."""
    assert "\n" not in plain.description


@pytest.mark.parametrize(
    ("option", "value"), [("image", 0), ("channels", 0), ("image", 8.0), ("channels", -1)]
)
def test_a_size_that_is_no_positive_whole_number_is_refused(option, value):
    """Torch's error would be about an interpolation that the user did not call."""
    with pytest.raises(SettingError, match=f"{option} is a whole number of 1 or more, not {value}"):
        digits(**{option: value})


def test_images_that_exceed_the_free_memory_are_refused():
    """Torch would end in a traceback, or the host would kill the process."""
    with pytest.raises(
        SettingError, match=r"100000x100000 pixels with 3 channels take .* TiB, and "
    ):
        digits(image=100_000, channels=3)


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch):
    """The extra's name is not the package's name."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(
        MissingExtra, match=r"the data set digits needs scikit-learn; .*'penstock\[data\]'"
    ) as caught:
        digits()
    assert (caught.value.package, caught.value.extra) == ("scikit-learn", "data")


def test_a_scikit_learn_that_keeps_its_data_elsewhere_gives_the_same_digits(monkeypatch, tmp_path):
    """The file is read directly, as importing scikit-learn takes a second; its place may change."""
    expected = digits()

    elsewhere = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: elsewhere)
    same = digits()
    assert torch.equal(same.train_inputs, expected.train_inputs)
    assert torch.equal(same.test_targets, expected.test_targets)
