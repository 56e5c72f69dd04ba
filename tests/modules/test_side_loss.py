"""Side losses: what is collected, by whom, and which values are refused."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from penstock.errors import SettingError
from penstock.modules.side_loss import collect_side_losses, collecting_side_losses, side_loss


def test_side_losses_are_collected_in_order_as_numbers_with_their_graph():
    """A tensor of one element may have any number of dimensions; sums need one without."""
    weight = torch.ones(1, 1, requires_grad=True)
    with collecting_side_losses() as losses:
        side_loss(2 * weight)
        side_loss(torch.tensor(3.0))
    assert [(loss.shape, loss.item()) for loss in losses] == [((), 2.0), ((), 3.0)]
    sum(losses).backward()
    assert weight.grad.item() == 2.0


def test_outside_of_a_collection_side_losses_are_ignored():
    """The model also runs without a pipeline; an earlier collection is over."""
    side_loss(torch.tensor(1.0))
    with collecting_side_losses() as losses:
        pass
    side_loss(torch.tensor(1.0))
    assert losses == []


def test_collections_nest():
    """The inner one takes its own, the outer one goes on afterwards, also after an error."""
    with collecting_side_losses() as outer:
        side_loss(torch.tensor(1.0))
        with contextlib.suppress(KeyError), collecting_side_losses() as inner:
            side_loss(torch.tensor(2.0))
            raise KeyError
        side_loss(torch.tensor(3.0))
    assert [loss.item() for loss in outer] == [1.0, 3.0]
    assert [loss.item() for loss in inner] == [2.0]
    assert collect_side_losses(None) is None


def test_a_list_can_be_set_and_restored():
    """For code that cannot afford a context."""
    losses, others = [], []
    assert collect_side_losses(losses) is None
    assert collect_side_losses(others) is losses
    side_loss(torch.tensor(1.0))
    assert collect_side_losses(None) is others
    side_loss(torch.tensor(2.0))
    assert (losses, others) == ([], [torch.tensor(1.0)])


def test_threads_collect_separately():
    """Each runs a micro-batch of its own."""
    seen = []

    def work():
        side_loss(torch.tensor(1.0))
        seen.append(collect_side_losses(None))

    with collecting_side_losses() as losses:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert (losses, seen) == ([], [None])


@pytest.mark.parametrize(
    ("value", "shape"),
    [(torch.ones(2), r"\(2,\)"), (torch.ones(0), r"\(0,\)"), (1.0, "float"), (None, "NoneType")],
)
@pytest.mark.parametrize("collects", [False, True])
def test_other_values_are_refused(value, shape, collects):
    """With and without a pipeline, so that a mistake shows where the model is written."""
    losses = [] if collects else None
    collect_side_losses(losses)
    try:
        with pytest.raises(SettingError, match=f"a side loss is one number.*this one is {shape}$"):
            side_loss(value)
    finally:
        collect_side_losses(None)
    assert not losses
