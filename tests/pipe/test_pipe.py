"""`Pipe`: settings, copies, modes, the empty Pipe and deferred batch norm."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tests.pipe.layers import make_model, make_pipe
from torch import nn

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


@pytest.mark.parametrize("make", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_has_weights_and_threads_of_its_own(make):
    """Averaged models are deep copies; a copy of a pipe that has run must run."""
    pipe, x = make_pipe(), torch.randn(6, 4)
    pipe(x).sum().backward()
    other = make(pipe)
    force_first = other.train(mode=False)(x)
    torch.testing.assert_close(force_first, pipe.train(mode=False)(x))
    assert all(a is not b for a, b in zip(pipe.parameters(), other.parameters(), strict=True))


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
    assert not Pipe(make_model().eval(), [5], devices=1).training


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
    for samples in (14, 6):
        x = torch.randn(samples, 4)
        plain(x)
        pipe(x).sum().backward()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(pipe[3], name), getattr(plain[3], name))


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
