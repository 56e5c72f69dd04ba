"""The description of torch's numeric settings for a GPU, which can be read without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from penstock.runtime.comparison import numeric_settings as module
from penstock.runtime.comparison.numeric_settings import numeric_settings

CUDA = torch.device("cuda:0")


@pytest.fixture
def settings():
    """Restore torch's settings afterwards."""
    products = torch.backends.cuda.matmul.fp32_precision
    convolutions = torch.backends.cudnn.conv.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = products
    torch.backends.cudnn.conv.fp32_precision = convolutions
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cpu_has_none(device):
    """CPU kernels sum in a fixed order and have no TF32; other devices have settings elsewhere."""
    assert numeric_settings(torch.device(device)) == ()


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(("precision", "word"), [("tf32", "on"), ("ieee", "off")])
def test_tf32_is_described_for_products_and_for_convolutions(precision, word):
    """By default torch disables it for products and enables it for convolutions."""
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    words = numeric_settings(CUDA)
    assert f"TF32 in matrix products {word}" in words
    assert "TF32 in convolutions off" in words
    torch.backends.cudnn.conv.fp32_precision = precision
    assert f"TF32 in convolutions {word}" in numeric_settings(CUDA)


@pytest.mark.parametrize(
    ("conv", "cudnn", "general", "word"),
    [
        ("ieee", "tf32", "tf32", "off"),
        ("none", "ieee", "tf32", "off"),
        ("none", "tf32", "ieee", "on"),
        ("none", "none", "tf32", "on"),
        ("none", "none", "none", "off"),
    ],
)
def test_the_most_special_setting_that_is_made_counts(conv, cudnn, general, word, monkeypatch):
    """Those of an operation stand over those of a library, and these over the general one."""
    backends = SimpleNamespace(
        cuda=SimpleNamespace(matmul=SimpleNamespace(fp32_precision="ieee")),
        cudnn=SimpleNamespace(conv=SimpleNamespace(fp32_precision=conv), fp32_precision=cudnn),
        fp32_precision=general,
    )
    fake = SimpleNamespace(backends=backends, are_deterministic_algorithms_enabled=bool)
    monkeypatch.setattr(module, "torch", fake)
    assert f"TF32 in convolutions {word}" in numeric_settings(CUDA)
    assert "TF32 in matrix products off" in numeric_settings(CUDA)


@pytest.mark.usefixtures("settings")
def test_it_says_how_to_get_equal_bits_where_algorithms_are_not_deterministic():
    """Some CUDA kernels sum in the order in which threads arrive."""
    words = numeric_settings(CUDA)
    assert "deterministic algorithms off" in words
    assert "torch.use_deterministic_algorithms(True)" in words[-1]
    torch.use_deterministic_algorithms(mode=True)
    words = numeric_settings(CUDA)
    assert words[-1] == "deterministic algorithms on"
