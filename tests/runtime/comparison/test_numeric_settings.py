"""The description of torch's numeric settings for a GPU, which can be read without one."""

from __future__ import annotations

import pytest
import torch

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


@pytest.mark.usefixtures("settings")
def test_it_says_how_to_get_equal_bits_where_algorithms_are_not_deterministic():
    """Some CUDA kernels sum in the order in which threads arrive."""
    words = numeric_settings(CUDA)
    assert "deterministic algorithms off" in words
    assert "torch.use_deterministic_algorithms(True)" in words[-1]
    torch.use_deterministic_algorithms(mode=True)
    words = numeric_settings(CUDA)
    assert words[-1] == "deterministic algorithms on"
