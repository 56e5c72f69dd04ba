"""What a process of a pipeline knows about its place in it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.runtime.inspection import Inspection


class Residual(nn.Module):
    """A model that must be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        """Return the scores."""
        return self.second(x + torch.relu(self.first(x)))


def test_a_pipeline_traces_a_model_on_its_example():
    """`ps.chain` need not be called; all ranks are threads, so that this process is every one."""
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    pipe = ps.Pipeline(
        Residual(),
        loss=nn.functional.cross_entropy,
        balance=[1, 1],
        schedule="gpipe",
        micro_batches=2,
        executor="threads",
        example=x,
    )
    assert pipe.compare_with_one_device(x, y).relative < 1e-5
    assert (pipe.rank, pipe.is_main, pipe.is_first, pipe.is_last) == (0, True, True, True)
    pipe.close()


@pytest.mark.parametrize(
    ("rank", "stages", "expected"),
    [
        (0, [0], (0, True, True, False)),
        (1, [1], (1, False, False, False)),
        (2, [2], (2, False, False, True)),
        (0, [0, 2], (0, True, True, True)),
    ],
)
def test_a_process_knows_its_rank_and_the_ends_of_the_model(rank, stages, expected):
    """Of three stages on processes of their own, and of a rank that has both ends."""
    pipe = Inspection()
    pipe._world = SimpleNamespace(local_ranks=[rank])
    pipe._assembly = SimpleNamespace(stages=[SimpleNamespace(index=stage) for stage in stages])
    pipe.setting = SimpleNamespace(lengths=(1, 1, 1))
    assert (pipe.rank, pipe.is_main, pipe.is_first, pipe.is_last) == expected


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_a_profile_traces_a_model_on_its_example(samples):
    """With any number of samples; measured and estimated layers are the same."""
    example = torch.randn(samples, 4)
    expected = ps.chain(Residual(), torch.randn(2, 4)).fingerprint
    assert ps.profile(Residual(), example, 8, sizes=[2], repeats=1).fingerprint == expected
    assert ps.analytic(Residual(), example, "V100", batch=8).fingerprint == expected
