"""The choice of a device, as a function of what is requested and how many cards are visible."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import SettingError
from penstock.measure.card_choice import choose_device_type, no_card
from penstock.measure.profiler import profile


@pytest.mark.parametrize(
    ("request_", "cards", "device_type"),
    [
        ("auto", 0, "cpu"),
        ("auto", 1, "cuda"),
        ("auto", 8, "cuda"),
        ("cpu", 8, "cpu"),
        ("cuda", 1, "cuda"),
    ],
)
def test_auto_takes_the_cards_that_are_visible_and_a_name_takes_what_it_names(
    request_, cards, device_type
):
    """A GPU that stands idle beside training on the CPU is a wrong result in the time it takes."""
    assert choose_device_type(request_, cards) == device_type


def test_cuda_without_a_card_is_refused_with_what_to_do():
    """The CPU in place of the GPU, in silence, would be measured and reported as the GPU."""
    with pytest.raises(SettingError, match=r"no CUDA device is visible .*Use device cpu, or auto"):
        choose_device_type("cuda", 0)


def test_the_refusal_says_why_no_card_is_visible(monkeypatch):
    """A build without CUDA and an empty CUDA_VISIBLE_DEVICES look the same from inside a program."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES is ''" in no_card()
    assert "this torch is built" in no_card() or "torch is built for CUDA" in no_card()


def test_a_word_that_is_no_device_is_refused():
    """The three words are named."""
    with pytest.raises(SettingError, match="device is 'auto', 'cpu' or 'cuda', not 'gpu'"):
        choose_device_type("gpu", 1)


@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda:9", "cuda:9"), ("gpu", "gpu")],
)
def test_a_device_that_is_not_there_is_refused_before_anything_is_measured(device, message):
    """torch's own error comes after the layers are copied, and does not say what to do."""
    with pytest.raises(SettingError, match=message):
        profile([torch.nn.Linear(4, 4)], torch.ones(2, 4), repeats=1, device=device)


def test_a_profile_records_the_device_that_it_was_measured_on():
    """Seconds of one device plan nothing for another."""
    measured = profile([torch.nn.Linear(4, 4)], torch.ones(2, 4), repeats=1, device="cpu")
    assert measured.device == "cpu"
    assert measured.machine["device"].startswith("cpu: ")
