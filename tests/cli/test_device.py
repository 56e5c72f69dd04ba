"""`--device` of `penstock train` and `penstock profile`, and what a run on cards reports. No card
is needed here.
"""

from __future__ import annotations

import json

import pytest
import torch

from penstock.cli.train import _memory_rows
from penstock.report.outcome import Outcome

GIB = 2**30
WORDS = ("--model", "mlp", "--image", "8", "--channels", "1", "--batch", "64")


@pytest.mark.parametrize("verb", ["train", "profile"])
def test_cuda_without_a_card_is_refused_with_exit_status_2(penstock, tmp_path, monkeypatch, verb):
    """Where torch sees no card, whatever this host has; nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = penstock(verb, *WORDS, "--device", "cuda")
    assert result.status == 2
    assert "device cuda: no CUDA device is visible" in result.err
    assert "Use device cpu, or auto" in result.err
    assert "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["train", "profile"])
def test_a_word_that_is_no_device_is_refused_with_exit_status_2(penstock, verb):
    """A misspelt one must not mean the default."""
    result = penstock(verb, *WORDS, "--device", "gpu")
    assert result.status == 2
    assert "'auto', 'cpu'" in result.err
    assert "'gpu'" in result.err


def test_a_profile_on_the_cpu_says_so(penstock):
    """A plan for cards must not use it by mistake."""
    result = penstock(
        "profile", *WORDS, "--repeats", "1", "--sizes", "4", "--device", "cpu", "--json"
    )
    assert result.status == 0, result.err
    assert json.loads(result.out)["device"] == "cpu"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--on", "V100"), "--device says where to measure, but --on does not measure"),
        (("--cluster", "local:2"), "--device: for a model's profile"),
    ],
)
def test_a_device_beside_what_it_does_not_apply_to_is_refused(penstock, words, message):
    """A flag that is passed over looks as if it had been obeyed."""
    result = penstock("profile", "--device", "cpu", *words)
    assert result.status == 2
    assert message in result.err


def outcome(**changes):
    """An outcome of two ranks."""
    fields = {
        "folder": "runs/x",
        "steps": 1,
        "loss": 0.0,
        "test_loss": 0.0,
        "test_accuracy": 0.0,
        "predicted_step_s": 1.0,
        "measured_step_s": 1.0,
        "predicted_bubble_ratio": 0.0,
        "measured_bubble_ratio": 0.0,
        "predicted_peak_memory": (GIB, GIB),
        "measured_peak_rss": (3 * GIB, 4 * GIB),
        "training_s": 1.0,
        "one_thread_step_s": None,
        "measured_peak_memory": (GIB, 2 * GIB),
    }
    return Outcome(**{**fields, **changes})


def test_memory_is_reported_by_rank_and_by_process():
    """As it was before there was a choice."""
    assert _memory_rows(outcome()) == [
        ("memory of rank 0", "1.0 GiB", "1.0 GiB of 3.0 GiB (whole process)"),
        ("memory of rank 1", "1.0 GiB", "2.0 GiB of 4.0 GiB (whole process)"),
    ]
    assert _memory_rows(outcome(measured_peak_memory=None))[0][2] == "3.0 GiB (whole process)"


def test_memory_of_ranks_that_share_a_card_is_reported_once_per_process():
    """The memory of a process has no parts by rank."""
    shared = outcome(
        measured_peak_rss=(3 * GIB,), device="H100", measured_peak_allocated=(5 * GIB,)
    )
    assert _memory_rows(shared) == [
        ("memory of rank 0", "1.0 GiB", "1.0 GiB"),
        ("memory of rank 1", "1.0 GiB", "2.0 GiB"),
        ("memory of the process", "", "3.0 GiB"),
        ("allocated on GPU 0", "", "5.0 GiB"),
    ]
