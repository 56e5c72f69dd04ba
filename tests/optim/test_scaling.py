"""Dynamic loss scaling: the same scales as torch's GradScaler, from the same gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.errors import SettingError
from penstock.optim.scaling import LossScaler

CPU = torch.device("cpu")


@given(
    st.lists(st.sampled_from(["fine", "inf", "nan"]), max_size=20),
    st.sampled_from([1.0, 1024.0, 2.0**127]),
    st.sampled_from([2.0, 1.5]),
    st.sampled_from([0.5, 0.3]),
    st.integers(1, 4),
)
@settings(deadline=None, max_examples=40)
def test_scales_and_steps_are_torchs_own(story, start, growth, backoff, interval):
    """Also at the limit: torch does not let the scale grow to infinity."""
    options = {
        "init_scale": start,
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
    }
    ours, theirs = LossScaler(options), torch.amp.GradScaler("cpu", **options)
    mine, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([other], lr=0.1)
    skipped = 0
    for event in story:
        theirs.scale(torch.ones(()))  # it makes its scale at the first use
        grad = torch.full((2,), {"fine": 0.25, "inf": float("inf"), "nan": float("nan")}[event])
        mine.grad, other.grad = grad * ours.scale, grad * theirs.get_scale()
        overflow = float(ours.unscale([mine], CPU))
        theirs.unscale_(optimizer)
        assert torch.equal(mine.grad, other.grad) or event == "nan"
        assert (overflow > 0) == (not mine.grad.isfinite().all())
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflow)
        skipped += overflow > 0
        assert ours.scale == theirs.get_scale()
    assert ours.skipped == skipped
    again = LossScaler(options)
    again.load_state_dict(ours.state_dict())
    assert again.state_dict() == ours.state_dict()


def test_what_a_user_may_say():
    """True, options, or a scaler of torch's whose options are copied."""
    assert LossScaler.of(None) is LossScaler.of(False) is None
    assert LossScaler.of(True).scale == 65536.0
    assert LossScaler.of({"init_scale": 8}).scale == 8.0
    assert LossScaler.of({}).scale == 65536.0
    assert LossScaler.of(torch.amp.GradScaler("cpu", init_scale=4.0)).scale == 4.0
    assert LossScaler.of(torch.amp.GradScaler("cpu", enabled=False)) is None
    used = torch.amp.GradScaler("cpu", init_scale=4.0)
    used.scale(torch.ones(()))
    used.update(16.0)
    assert LossScaler.of(used).scale == 16.0


def test_gradients_in_float16_are_refused():
    """Divided by the scale they would underflow, which the scale is meant to prevent."""
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float16))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(SettingError, match="keep the parameters in float32"):
        LossScaler({}).unscale([parameter], CPU)


def test_sparse_gradients_are_unscaled_once():
    """Rows that occur twice are added first."""
    embedding = nn.Embedding(5, 3, sparse=True)
    (embedding(torch.tensor([1, 1, 4])).sum() * 8).backward()
    assert LossScaler({"init_scale": 8.0}).unscale([embedding.weight], CPU) == 0
    assert embedding.weight.grad.to_dense()[:, 0].tolist() == [0, 2, 0, 0, 1]


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan"), -1.0, 1e-50, 1e39])
def test_a_saved_scale_that_is_none_is_refused(scale):
    """A file may contain anything."""
    with pytest.raises(SettingError, match="the scale of a saved scaler is above 0"):
        LossScaler({}).load_state_dict({"scale": scale, "steps": 0, "skipped": 0})
    with pytest.raises(
        SettingError, match=r"growth_interval is a number of steps, 1 or more, not 0\.5"
    ):
        LossScaler({"growth_interval": 0.5})


@pytest.mark.parametrize(
    "options",
    [
        {"init_scale": 0.0},
        {"init_scale": float("inf")},
        {"init_scale": float("nan")},
        {"init_scale": 1e39},
        {"init_scale": 1e-50},
        {"growth_factor": 1.0},
        {"growth_factor": float("inf")},
        {"backoff_factor": 0.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"growth_interval": 1.5},
        {"growth_interval": float("inf")},
        {"growth_interval": float("nan")},
        {"growth": 2.0},
    ],
)
def test_options_out_of_range_are_refused(options):
    """A scale that is infinite in float32 would have every step skipped, without an end."""
    with pytest.raises(SettingError, match="scaler"):
        LossScaler(options)


def test_options_at_the_end_of_their_range_pass():
    """An interval of one step, and a scale that float32 can just hold."""
    for options in ({"growth_interval": 1}, {"init_scale": 3e38}, {"backoff_factor": 0.999}):
        assert LossScaler(options).state_dict()["steps"] == 0


def test_options_may_be_integers():
    """The scale is a float32 whatever it is given as."""
    scaler = LossScaler({"init_scale": 1024, "growth_factor": 2, "growth_interval": 1})
    scaler.update(1.0)
    assert scaler.state_dict() == {"scale": 512.0, "steps": 0, "skipped": 1}
    scaler.update(0.0)
    assert scaler.scale == 1024.0


def test_steps_since_the_scale_changed_come_back_from_a_checkpoint():
    """The next increase comes when it would have come without the interruption."""
    scaler = LossScaler({"init_scale": 4.0, "growth_interval": 3})
    for _ in range(2):
        scaler.update(0.0)
    state = scaler.state_dict()
    assert state == {"scale": 4.0, "steps": 2, "skipped": 0}
    resumed = LossScaler({"init_scale": 1.0, "growth_interval": 3})
    resumed.update(1.0)
    resumed.load_state_dict(state)
    resumed.update(0.0)
    assert resumed.state_dict() == {"scale": 8.0, "steps": 0, "skipped": 0}


def test_the_default_options_are_torchs():
    """A user who turns scaling on gets what the documentation of torch says."""
    ours = LossScaler.of(torch.amp.GradScaler("cpu"))
    assert ours._options == LossScaler({})._options
    ours = LossScaler.of(
        torch.amp.GradScaler(
            "cpu", init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7
        )
    )
    assert ours._options == {
        "init_scale": 8.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
    }
    with pytest.raises(SettingError, match="not 5"):
        LossScaler.of(5)


def test_all_gradients_are_unscaled_whatever_their_types():
    """Those of float32 and of bfloat16 are divided apart; one overflow is enough."""
    weights = [
        nn.Parameter(torch.ones(2, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float64)
    ]
    for weight in weights[:2] + weights[3:]:
        weight.grad = torch.full_like(weight, 12.0)
    scaler = LossScaler({"init_scale": 4.0})
    assert scaler.unscale(weights, CPU) == 0
    assert [None if w.grad is None else w.grad.tolist() for w in weights] == [
        [3.0, 3.0], [3.0, 3.0], None, [3.0, 3.0],
    ]  # fmt: skip
    weights[1].grad[1] = float("inf")
    overflow = scaler.unscale(weights, CPU)
    assert overflow.shape == (1,)
    assert overflow > 0
    assert scaler.unscale([], CPU) == 0


def test_any_overflow_counts_and_all_gradients_are_divided_nevertheless():
    """The overflow of several ranks may be a mean; users read gradients of skipped steps, too."""
    scaler = LossScaler({"init_scale": 4.0})
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1, dtype=torch.float64))
    first.grad, second.grad = torch.tensor([4.0, float("inf")]), second.detach() * 8
    assert scaler.unscale([first, second], CPU) > 0
    assert (first.grad[0].item(), second.grad.item()) == (1.0, 2.0)
    for overflow, skipped in ((0.25, 1), (0.0, 1), (1.0, 2)):
        scaler.update(overflow)
        assert scaler.skipped == skipped
