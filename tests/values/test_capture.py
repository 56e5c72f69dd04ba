"""Whether ops are being captured as a graph."""

from __future__ import annotations

import pytest
import torch

from penstock.values.capture import is_capturing


@pytest.mark.parametrize("capturing", [True, False])
def test_only_streams_of_gpus_capture(monkeypatch, capturing):
    """The current stream decides; other devices are never asked, as torch may have no CUDA."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert is_capturing(torch.device("cuda", 0)) is capturing
    assert not is_capturing(torch.device("cpu"))
    assert not is_capturing(torch.device("meta"))
