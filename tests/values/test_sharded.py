"""Tensors that several processes share: the part of this process, and the whole.

The group is torch's fake one: this process is rank 1 of 2, and nothing is sent.
"""

from __future__ import annotations

import sys

import pytest
import torch
from tests.values.fake_mesh import fake_mesh, sharded

from penstock.values.sharded import copy_whole, is_sharded, local_part, whole


@pytest.fixture(scope="module")
def mesh():
    """A mesh of two processes, of which this one is the second."""
    with fake_mesh() as mesh:
        yield mesh


def test_plain_tensors_are_whole_and_local():
    """Most models have no others; torch's module need not be loaded to tell."""
    tensor = torch.ones(2, 3, requires_grad=True)
    assert not is_sharded(tensor)
    assert not is_sharded(None)
    assert local_part(tensor) is tensor
    assert whole(tensor) is tensor
    target = torch.full((2, 3), 7.0)
    copy_whole(target, tensor.detach())
    assert target.tolist() == [[1.0] * 3] * 2


def test_the_local_part_is_the_memory_of_this_process(mesh):
    """An optimizer steps it in place; no graph leads to it."""
    local = torch.zeros(2, 3)
    tensor = sharded(mesh, local).requires_grad_()
    assert is_sharded(tensor)
    assert tensor.shape == (4, 3)
    part = local_part(tensor)
    assert not is_sharded(part)
    assert not part.requires_grad
    part.fill_(2.0)
    assert local.tolist() == [[2.0] * 3] * 2


def test_the_whole_has_the_shape_of_all_parts_and_no_graph(mesh):
    """A checkpoint has the whole."""
    full = whole(sharded(mesh, torch.ones(2, 3)).requires_grad_())
    assert (type(full), full.shape, full.requires_grad) == (torch.Tensor, (4, 3), False)
    replicated = whole(sharded(mesh, torch.ones(2, 3), replicated=True))
    assert replicated.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("dim", [0, 1])
def test_of_a_whole_tensor_the_part_of_this_process_is_copied(mesh, dim):
    """In the dtype of the target; nothing is sent, since every process has the whole."""
    source = torch.arange(16, dtype=torch.float64).reshape(4, 4)
    local = torch.ones(2, 4) if dim == 0 else torch.ones(4, 2)
    copy_whole(sharded(mesh, local, dim=dim), source)
    expected = source[2:] if dim == 0 else source[:, 2:]
    assert local.dtype == torch.float32
    assert torch.equal(local, expected.float())
    target = torch.zeros(2, 4)
    copy_whole(sharded(mesh, target, replicated=True), source[:2])
    assert torch.equal(target, source[:2].float())


def test_a_result_that_may_not_be_there_yet_gives_the_tensor_it_fills():
    """torch wraps results of collective operations until they are used."""

    class Pending(torch.Tensor):
        """A tensor with the attribute of such a wrapper."""

    pending = torch.zeros(2).as_subclass(Pending)
    pending.elem = torch.ones(2)
    assert local_part(pending) is pending.elem


def test_without_torchs_module_no_tensor_is_shared(monkeypatch):
    """It takes a second to import, and who has not imported it has made no such tensor."""
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor", raising=False)
    tensor = torch.ones(2).as_subclass(type("Tagged", (torch.Tensor,), {}))
    assert not is_sharded(tensor)
    assert local_part(tensor) is tensor
    assert whole(tensor) is tensor
