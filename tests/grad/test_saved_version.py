"""Saved tensors whose versions are checked by hooks of this package."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from penstock.errors import RunError
from penstock.grad.saved_version import (
    ChangedInPlace,
    SavedVersion,
    observing_saved_tensors,
    unpack_checked,
)


@pytest.mark.parametrize("holds", [True, False])
def test_each_change_in_place_is_noticed_also_through_a_view(holds):
    """The version counter is the tensor's, with or without its memory."""
    tensor = torch.zeros(2, 3)
    tensor.add_(1)
    saved = SavedVersion(tensor, holds=holds)
    assert saved.unchanged
    saved.check()
    tensor[0].mul_(2)
    assert not saved.unchanged
    with pytest.raises(ChangedInPlace) as raised:
        saved.check("stage 2: ")
    assert str(raised.value).startswith(
        "stage 2: one of the variables needed for gradient computation has been modified by an "
        "inplace operation: [torch.FloatTensor [2, 3]] is at version 2; expected version 1 instead."
    )
    assert (raised.value.version, raised.value.expected) == (2, 1)
    assert isinstance(raised.value, RunError)


def test_memory_is_held_only_where_it_is_asked_for():
    """A check alone must not keep an activation alive, nor the graph that has made it."""
    leaf = torch.ones(4, requires_grad=True)
    tensor = leaf * 2
    token = type("Token", (), {})()
    graph = weakref.ref(token)
    tensor.grad_fn.register_hook(lambda *_, token=token: None)
    del token
    held, dropped = SavedVersion(tensor, holds=True), SavedVersion(tensor, holds=False)
    assert held.tensor.data_ptr() == tensor.data_ptr()
    assert dropped.tensor.untyped_storage().nbytes() == 0
    assert not held.tensor.requires_grad
    assert tensor.tolist() == [2.0] * 4
    assert dropped.unchanged
    del tensor
    gc.collect()
    assert graph() is None
    assert held.tensor.tolist() == [2.0] * 4


class Fixed(torch.Tensor):
    """A tensor that makes no others, as masked and nested ones do not."""

    error = TypeError

    def new_empty(self, *args, **kwargs):
        """Refuse."""
        raise self.error("not supported")


class FixedLayout(Fixed):
    """Another one, with the error of a layout."""

    error = RuntimeError


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(2).to_sparse(), *(torch.eye(2).as_subclass(kind) for kind in (Fixed, FixedLayout))],
    ids=["sparse", "masked", "nested"],
)
def test_layouts_that_cannot_give_up_their_memory_keep_it(tensor):
    """They are checked all the same."""
    saved = SavedVersion(tensor, holds=False)
    assert saved.unchanged
    tensor.mul_(2)
    assert not saved.unchanged


def test_a_tensor_is_unpacked_only_if_it_has_not_changed():
    """It is what autograd has saved."""
    tensor = torch.ones(2)
    saved = SavedVersion(tensor, holds=True)
    assert unpack_checked(saved).data_ptr() == tensor.data_ptr()
    tensor.zero_()
    with pytest.raises(ChangedInPlace, match=r"^one of the variables"):
        unpack_checked(saved)


def test_all_saved_tensors_are_seen_in_order_and_only_in_the_context():
    """Gradients are those without the observation."""
    first, second = torch.tensor([2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)
    seen = []
    with observing_saved_tensors(seen.append):
        result = first * second * first
    (result * first).backward()
    assert [tensor.item() for tensor in seen] == [2.0, 3.0, 6.0, 2.0] or len(seen) == 4
    assert (first.grad.item(), second.grad.item()) == (36.0, 8.0)
    with observing_saved_tensors(seen.append):
        result = first.exp()
        with torch.no_grad():
            result.mul_(2)
    with pytest.raises(ChangedInPlace, match="is at version 1; expected version 0"):
        result.backward()
