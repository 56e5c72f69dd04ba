"""What a run is settings to do is held against itself before anything is measured."""

from __future__ import annotations

import pytest

from penstock.errors import PenstockError
from penstock.training.checks import check_settings, known_schedule
from penstock.training.config import TrainConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"weights": "flush", "schedule": "pipedream"},
            "'flush' does not go with pipedream, which is asynchronous",
        ),
        (
            {"weights": "stash", "schedule": "1f1b"},
            "'stash' does not go with 1f1b, which is synchronous",
        ),
        (
            {"weights": "double-buffer", "stages": 4, "micro_batches": 2},
            "4 or more micro-batches per batch",
        ),
        (
            {"weights": "double-buffer", "schedule": "pipedream", "stages": 4, "micro_batches": 2},
            "Give 4 or more",
        ),
        ({"weights": "avgpipe", "schedule": "pipedream"}, "take the schedule 'avgpipe'"),
        ({"weights": "spectrain", "micro_batches": 4}, "distances for batches of one micro-batch"),
        ({"weights": "spectrain", "optimizer": "adam"}, "no formula for Adam"),
        ({"weights": "spectrain", "momentum": 0.0}, "momentum"),
        ({"weights": "xpipe"}, "no formula for SGD"),
        ({"schedule": "xpipe"}, "no formula for SGD"),
        ({"weights": "stach"}, "no weight rule called 'stach'"),
        ({"weights_options": {"decay": 0.5}}, "weight rule 'flush' has no option decay"),
        (
            {"weights": "pipemare", "weights_options": {"decoy": 0.5}},
            "has no option decoy: it takes decay",
        ),
        ({"schedule": "zigzag"}, "no schedule called 'zigzag'"),
        ({"stages": 9}, "cannot make 9 stages from 8 layers"),
        ({"partition": "3,4"}, "sums to 7, but the model has 8"),
        ({"micro_batches": 65}, "a batch of 64 cannot be cut into 65"),
        ({"memory_limit": "some"}, "'some' is not a quantity"),
        (
            {"schedule": "pipedream", "clip_grad_norm": 1.0},
            "clip_grad_norm needs a schedule whose stages update together",
        ),
        (
            {"weights": "stash", "accumulate": 2},
            "accumulate needs a schedule whose stages update together, and this run's is asynchronous",
        ),
        (
            {"asynchronous": True, "autocast": "float16"},
            "autocast float16, which scales the loss, needs a schedule",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(settings, message):
    """Minutes of measuring for a typo are minutes lost."""
    with pytest.raises(PenstockError, match=message):
        check_settings(TrainConfig(**settings), layers=8)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"schedule": "pipedream"},
        {"schedule": "chimera"},
        {"weights": "flush"},
        {"weights": "double-buffer", "micro_batches": 1},  # in one stage
        {"weights": "spectrain", "stages": 4},  # the planner will find the one number that goes
        {"weights": "xpipe", "optimizer": "adamw", "stages": 3, "micro_batches": 3},
        {"schedule": "hetpipe", "stages": 2},
        {"asynchronous": True, "weights": "none"},
        {"asynchronous": True, "autocast": "bfloat16"},
        {"clip_grad_norm": 1.0, "accumulate": 2, "autocast": "float16"},
        {"asynchronous": True},
    ],
)
def test_what_goes_together_passes(settings):
    """What is left open is the planner's to find."""
    check_settings(TrainConfig(**settings), layers=8)


def test_a_schedule_is_known_once_all_its_numbers_are():
    """Then its ranks are, too: HetPipe starts twice as many as there are stages."""
    settings = {"weights": "hetpipe", "stages": 2, "micro_batches": 1}
    assert known_schedule(TrainConfig(**settings)).ranks == 4
    for name in settings:
        assert known_schedule(TrainConfig(**{**settings, name: None})) is None
    assert known_schedule(TrainConfig(weights="flush", stages=2, micro_batches=1)) is None
