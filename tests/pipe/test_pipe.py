"""`Pipe`: settings, copies, modes, the empty Pipe and deferred batch norm."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tests.pipe import scheduled, traced
from tests.pipe.layers import PassRecorder, make_model, make_pipe
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.pipe.pipe import Pipe


def test_settings_are_kept_as_plain_lists_and_values():
    """Code written for the peers reads them."""
    pipe = Pipe(nn.Sequential(nn.Linear(1, 1)), balance=(1,), devices=("cpu", "cpu"), chunks=42.0)
    assert (pipe.balance, pipe.devices, pipe.chunks, pipe.checkpoint) == (
        [1],
        [torch.device("cpu")],
        42,
        "except_last",
    )
    assert pipe(torch.ones(2, 1)).shape == (2, 1)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_has_weights_and_threads_of_its_own(make):
    """Averaged models are deep copies; a copy of a pipe that has run must run."""
    pipe, x = make_pipe(), torch.randn(6, 4)
    pipe(x).sum().backward()
    other = make(pipe)
    force_first = other.train(mode=False)(x)
    torch.testing.assert_close(force_first, pipe.train(mode=False)(x))
    assert all(a is not b for a, b in zip(pipe.parameters(), other.parameters(), strict=True))


def test_a_copy_refers_to_itself_where_the_pipe_does():
    """A callback in an attribute may refer to its model; both pipes of a list may be one."""
    pipe = make_pipe()
    pipe.__dict__["callback"] = [pipe]
    first, second = copy.deepcopy([pipe, pipe])
    assert first is second is first.callback[0]
    assert first is not pipe


def test_modes_reach_the_layers_and_evaluation_keeps_running_statistics():
    """`eval()` is the module's own."""
    pipe, x = make_pipe(), torch.randn(6, 4)
    pipe(x)
    before = pipe[3].running_mean.clone()
    torch.testing.assert_close(pipe.eval()(x), nn.Sequential(*pipe)(x))
    assert torch.equal(pipe[3].running_mean, before)
    assert pipe.train()[3].training


def test_it_takes_over_the_mode_of_the_model():
    """A model in evaluation mode stays in it."""
    pipe = Pipe(make_model().eval(), [2, 3], devices=2)
    assert not any(part.training for part in pipe.modules())


def test_layers_keep_the_modes_that_they_have():
    """A batch norm that was frozen stays frozen, until `train` is called, as in the plain model."""
    model = make_model()
    model[3].eval()
    pipe = Pipe(model, [2, 3], devices=2)
    assert pipe.training
    assert not model[3].training
    pipe.train()
    assert model[3].training


def test_an_empty_pipe_returns_its_input_and_refuses_what_is_no_tensor():
    """As the peers do."""
    assert Pipe(nn.Sequential(), [])(torch.tensor(42)) == 42
    with pytest.raises(TypeError, match="expected Tensor, but got int"):
        Pipe(nn.Sequential(), [])(42)


def test_deferred_batch_norm_gets_the_whole_batchs_running_statistics():
    """Also from a last batch of fewer micro-batches, and with micro-batches that run twice."""
    plain, pipe = make_model(), make_pipe(deferred_batch_norm=True, checkpoint="always", chunks=4)
    assert pipe[3].micro_batches == 4
    for samples in (14, 6):
        x = torch.randn(samples, 4)
        plain(x)
        pipe(x).sum().backward()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(pipe[3], name), getattr(plain[3], name))


def test_a_deferred_norm_that_trains_in_an_evaluated_model_sees_every_batch():
    """Also one of fewer micro-batches: the norm is updated at its end, as in the plain model."""
    plain, pipe = make_model().eval(), make_pipe(deferred_batch_norm=True, chunks=4).eval()
    for samples in (8, 6, 8):
        x = torch.randn(samples, 4)
        for model in (plain, pipe):
            model[3].train()
            model(x)
    torch.testing.assert_close(pipe[3].running_mean, plain[3].running_mean)
    assert pipe[3].num_batches_tracked == 3


@pytest.mark.parametrize(
    ("checkpoint", "samples", "training", "recomputed"),
    [
        ("always", 6, True, [True, True, True]),
        ("except_last", 6, True, [True, True, False]),
        ("except_last", 2, True, [True, False]),
        ("except_last", 1, True, [False]),
        ("never", 6, True, [False, False, False]),
        ("always", 6, False, [False, False, False]),
    ],
)
def test_the_mode_of_checkpoint_says_which_micro_batches_run_twice(
    checkpoint, samples, training, recomputed
):
    """The last one of a batch with few samples is the last that it has. In evaluation none does."""
    notes: list[tuple[bool, bool]] = []
    pipe = Pipe(nn.Sequential(PassRecorder(notes)), [1], chunks=3, checkpoint=checkpoint)
    pipe.train(training)(torch.ones(samples, 1, requires_grad=True)).sum().backward()
    assert [first for first, second in notes if not second] == recomputed
    assert sum(second for _, second in notes) == sum(recomputed)


def test_a_change_of_one_setting_holds_from_the_next_batch_with_a_loss():
    """The ranks of the schedule are built anew for another mode, another layer or other chunks."""
    notes: list[tuple[bool, bool]] = []
    layers = nn.Sequential(PassRecorder(notes), nn.Linear(6, 6).double())
    pipe = scheduled.make_pipe(False, layers, balance=[1, 1], chunks=2, checkpoint="never")
    x, y = scheduled.batch(4)

    def first_passes() -> list[bool]:
        notes.clear()
        pipe._scheduled_run(pipe.loss).choice.forced = False
        loss = pipe(x, y)
        torch.testing.assert_close(loss.detach(), functional.mse_loss(layers(x), y).detach())
        loss.backward()
        return [first for first, second in notes if not second][: pipe.chunks]

    assert first_passes() == [False, False]
    pipe.checkpoint = "always"
    assert first_passes() == [True, True]
    layers[1] = pipe.partitions[1][0] = nn.Linear(6, 6).double()
    assert first_passes() == [True, True]
    assert pipe.partitions[1][0].weight.grad is not None
    pipe.chunks = 4
    assert first_passes() == [True] * 4
    pipe.schedule = "gpipe"
    assert first_passes() == [True] * 4
    assert pipe._scheduled_run(pipe.loss).schedule.name == "gpipe"


@pytest.mark.parametrize("schedule", ["1f1b", None])
def test_a_traced_model_whose_layer_begins_to_draw_has_new_stages(schedule):
    """Under a schedule and without one. The layer draws from its own stream, as in a Pipe that is made of the changed model. Stages
    that were built of the earlier graphs would not seed it.
    """

    def make(rate):
        model = traced.make_model(rate)
        settings = {"schedule": schedule, "loss": loss_of} if schedule else {}
        return model, traced.make_pipe(model, (1, 3), checkpoint="always", **settings)

    def loss_of(output, target):
        return functional.cross_entropy(output["scores"], target)

    def compute_loss(pipe):
        if schedule:
            return pipe(traced.X, traced.Y)
        return loss_of(pipe(traced.X), traced.Y)

    model, pipe = make(0.0)
    compute_loss(pipe)
    model.dropout.p = 0.5
    results = []
    for other in (pipe, make(0.5)[1]):
        torch.manual_seed(1)
        loss = compute_loss(other)
        loss.backward()
        results.append((loss.detach(), [weight.grad for weight in other.parameters()]))
    torch.testing.assert_close(results[0], results[1])


class TrainingPenalty(nn.Module):
    """A layer with a side loss in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2, 2)

    def forward(self, x):
        """Apply the map."""
        output = self.map(x)
        if self.training:
            ps.side_loss(output.square().mean())
        return output


def test_side_loss_is_that_of_the_last_call():
    """0 after a call without side losses, and after one that returned a loss with them inside."""
    layers = nn.Sequential(TrainingPenalty(), nn.Linear(2, 2))
    pipe = Pipe(layers, [1, 1], devices=2, chunks=2, loss=functional.mse_loss)
    x, y = torch.ones(4, 2), torch.zeros(4, 2)
    for call in (lambda: pipe(x, y), lambda: pipe.eval()(x), lambda: pipe(x, y)):
        pipe.train()(x)
        assert pipe.side_loss > 0
        call()
        assert pipe.side_loss == 0


def test_the_parts_of_this_room_that_theirs_have_by_name_are_where_the_page_says():
    """docs/pipe.md tells programs of the peers what to import."""
    from penstock.modules import deferred_batch_norm, recomputing, skippable

    assert all(
        hasattr(skippable, name)
        for name in ("skippable", "stash", "pop", "Namespace", "verify_skippables")
    )
    assert callable(recomputing.is_checkpointing)
    assert callable(recomputing.is_recomputing)
    assert callable(deferred_batch_norm.convert)
