"""Cuts go by shapes, so that every machine cuts alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.errors import SettingError
from penstock.study.convergence.stage_cut import cut_into_stages, layer_costs
from penstock.study.convergence.tasks import TASKS
from penstock.tracing.traced_chain import chain
from penstock.training.task import make_task


def test_a_layer_weighs_its_multiply_adds_and_the_numbers_in_and_out():
    """By hand: a convolution of 3 x 3 x 1 x 4 at 64 pixels, and a linear map of 256 to 10."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 10)).to(
        "meta"
    )
    costs = layer_costs(chain(model), torch.zeros(5, 1, 8, 8))
    assert costs == [36 * 64 + 20 * (64 + 256), 20 * 512, 2560 + 20 * 266]


def test_looking_up_a_vector_is_not_a_multiplication():
    """An embedding's table is large, and costs next to nothing."""
    model = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 8)).to("meta")
    assert layer_costs(chain(model), torch.zeros(2, 5, dtype=torch.int64)) == [
        20 * 45,
        64 * 5 + 20 * 80,
    ]


@pytest.mark.parametrize(("task", "stages", "lengths"), [
    ("digits", 2, [11, 26]), ("digits", 4, [4, 7, 7, 19]), ("digits", 8, [2, 2, 3, 4, 1, 6, 4, 15]),
    ("gpt", 2, [5, 6]), ("gpt", 4, [3, 2, 2, 4]), ("gpt", 8, [2, 1, 1, 1, 1, 1, 1, 3]),
])  # fmt: skip
def test_the_studys_own_cuts_stay_what_they_are(task, stages, lengths):
    """Records of an earlier study are compared with later ones."""
    task_of_name = make_task(TASKS[task].settings)
    assert (
        cut_into_stages(chain(task_of_name.model), task_of_name.data.train_inputs, stages)
        == lengths
    )


def test_more_stages_than_layers_are_refused():
    """With both numbers."""
    with pytest.raises(SettingError, match="1 layers, which cannot make 2 stages"):
        cut_into_stages(chain(nn.Sequential(nn.Linear(1, 1))), torch.zeros(1, 1), 2)
