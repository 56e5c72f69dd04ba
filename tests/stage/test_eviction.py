"""Activations that are moved to another rank and back."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance.models import CASES, made
from tests.conformance.reference import PlainTraining, differences, gradients
from torch import nn

import penstock as ps
from penstock.stage.eviction import Saved

#: Stage 0 hands micro-batch 1 to the rank of stage 1 while that has room.
PROGRAMS = """rank 0 | 0F0 0F1 0E1 0F2 0B0 0L1 0B1 0B2 0U1
rank 1 | 1F0 0E1 1B0 1F1 0L1 1B1 1F2 1B2 1U1"""


@pytest.mark.parametrize("name", ["vgg", "resnet", "gpt", "mlp"])
@pytest.mark.parametrize("recompute", ["never", "except_last", "always"])
def test_gradients_are_those_of_plain_training_to_the_bit(name, recompute):
    """Evicted activations are restored unchanged; recomputed stages have none to evict."""
    case = CASES[name]
    model, x, y = made(case)
    loss, parts = PlainTraining(copy.deepcopy(model), case.loss).backward_in_parts(x, y, 3)
    lengths = {"vgg": [7, 8], "resnet": [4, 5], "gpt": [2, 3], "mlp": [3, 4]}[name]
    pipe = ps.Pipeline(
        model,
        loss=case.loss,
        balance=lengths,
        schedule=ps.Schedule.parse(PROGRAMS),
        recompute=recompute,
        executor="threads",
    )
    assert torch.equal(pipe.train_batch(x, y), loss)
    total = parts[0]
    for part in parts[1:]:
        total = {key: total[key] + part[key] for key in total}
    assert differences(gradients(model), total) == []


def saved_by(function, *inputs):
    """Return the result of `function` and the tensors that its graph saved."""
    saved = Saved(frozenset())
    with saved.saving():
        return function(*inputs), saved


def test_evicted_tensors_are_freed_and_reading_them_is_an_error():
    """A backward before they are loaded would be an error in the schedule, and must not compute
    anything.
    """
    x = torch.randn(50, 50, requires_grad=True)
    out, saved = saved_by(lambda value: torch.sigmoid(value.exp()).sum(), x)
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in saved._tensors]
    content = saved.take_out()
    gc.collect()
    assert storages
    assert all(tensor is None for tensor in saved._tensors)
    assert content.numel() >= 2 * 50 * 50 * 4
    with pytest.raises(
        RuntimeError, match="asks for activations that have been evicted and not loaded"
    ):
        out.backward(retain_graph=True)
    saved.put_back(content)
    out.backward()
    other = x.detach().clone().requires_grad_()
    torch.sigmoid(other.exp()).sum().backward()
    assert torch.equal(x.grad, other.grad)


@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]),
    st.lists(st.integers(1, 4), min_size=0, max_size=4),
    st.randoms(use_true_random=False),
    st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_tensors_of_any_layout_come_back_equal(dtype, shape, random, gaps):
    """Strides of dense tensors are restored: kernels may sum in another order for other strides."""
    order = random.sample(range(len(shape)), len(shape))
    tensor = (torch.rand(shape) * 9).to(dtype).permute(order)
    if gaps and tensor.dim():
        tensor = torch.cat([tensor, tensor])[::2]
    saved = Saved(frozenset())
    number = saved._put(tensor)
    expected = tensor.clone()
    saved.put_back(saved.take_out())
    restored = saved._get(number)
    assert torch.equal(restored, expected)
    assert restored.dtype == dtype
    if not gaps:
        assert restored.stride() == tensor.stride()


def test_weights_do_not_travel():
    """They stay on the rank, and would be most of the message."""
    layer = nn.Linear(100, 100)
    saved = Saved(
        frozenset(parameter.untyped_storage().data_ptr() for parameter in layer.parameters())
    )
    with saved.saving():
        layer(torch.randn(2, 100, requires_grad=True)).sum()
    assert saved.take_out().numel() < 100 * 100


def test_a_change_in_place_is_reported_as_by_autograd():
    """Saved-tensor hooks switch off autograd's own check."""
    x = torch.randn(5, requires_grad=True)
    inner, saved = saved_by(lambda value: (value * 1.0).exp(), x)
    with torch.no_grad():
        inner.add_(1)
    with pytest.raises(RuntimeError, match="changed in place after the forward had saved it"):
        inner.sum().backward()
    with pytest.raises(RuntimeError, match="changed in place after the forward had saved it"):
        saved.take_out()


def test_a_tensor_that_changes_between_two_uses_is_saved_twice():
    """Only the use before the change is refused; the other has the new values."""
    x = torch.ones(4, requires_grad=True)

    def twice(value):
        product = value * 2
        stale = product.sin()
        with torch.no_grad():
            product.add_(1)
        return stale, product.cos()

    (stale, current), saved = saved_by(twice, x)
    assert len(saved._tensors) == 2
    current.sum().backward()
    torch.testing.assert_close(x.grad, -torch.full((4,), 3.0).sin() * 2)
    with pytest.raises(RuntimeError, match="changed in place after the forward had saved it"):
        stale.sum().backward()


def test_a_tensor_that_several_nodes_save_is_moved_once():
    """Views with other shapes, strides or dtypes are others; each begins at a multiple of 64 bytes."""
    x = torch.ones(20, requires_grad=True)

    def many(value):
        base = value * 1
        first = base.sin() + base.cos()
        return first.sum() + base[:3].sin().sum() + base.view(4, 5).t().sin().sum()

    result, saved = saved_by(many, x)
    content = saved.take_out()
    assert content.dtype == torch.uint8
    assert content.numel() == 128 + 64 + 128
    with pytest.raises(RuntimeError, match="evicted and not loaded"):
        result.backward(retain_graph=True)
    saved.put_back(content)
    result.backward()
    assert x.grad.isfinite().all()
    assert saved_by(lambda: None)[1].take_out().shape == (0,)


def test_views_of_weights_and_sparse_tensors_stay_in_the_graph():
    """A part of a weight would be moved as often as it is used; sparse tensors have no one memory."""
    weight = nn.Parameter(torch.ones(4, 3))
    saved = Saved(frozenset([weight.untyped_storage().data_ptr()]))
    for tensor in (weight[2:], weight.t(), torch.eye(3).to_sparse()):
        packed = saved._put(tensor)
        assert saved._get(packed).shape == tensor.shape
    assert saved._tensors == []
    with torch.no_grad():
        packed = saved._put(weight[1:])
        weight.add_(1)
    with pytest.raises(RuntimeError, match="changed in place after the forward had saved it"):
        saved._get(packed)


def test_one_memory_under_two_dtypes_is_moved_as_two_tensors():
    """Each comes back with its dtype."""
    tensor = torch.tensor([1.0, -2.0])
    saved = Saved(frozenset())
    numbers = [saved._put(view) for view in (tensor, tensor.view(torch.int32), tensor)]
    assert numbers[0] == numbers[2]
    saved.put_back(saved.take_out())
    assert saved._get(numbers[0]).tolist() == [1.0, -2.0]
    assert saved._get(numbers[1]).dtype == torch.int32


def test_a_square_matrix_and_its_transpose_are_moved_as_two_tensors():
    """They have one address and one shape."""
    matrix = torch.arange(9.0).view(3, 3)
    saved = Saved(frozenset())
    numbers = [saved._put(view) for view in (matrix, matrix.t())]
    saved.put_back(saved.take_out())
    assert torch.equal(saved._get(numbers[0]), matrix)
    assert torch.equal(saved._get(numbers[1]), matrix.t())


def test_loaded_tensors_may_be_changed_and_that_is_noticed():
    """The versions that count from then on are those of the loaded tensors."""
    tensor = torch.ones(3)
    tensor.add_(1)
    saved = Saved(frozenset())
    number = saved._put(tensor)
    saved.put_back(saved.take_out())
    loaded = saved._get(number)
    assert loaded.tolist() == [2.0] * 3
    loaded.add_(1)
    with pytest.raises(
        RuntimeError, match=r"is at version (\d+); expected version (\d+)"
    ) as caught:
        saved._get(number)
    assert caught.value.version == caught.value.expected + 1


def test_a_graph_that_saves_a_sparse_matrix_can_be_evicted():
    """The matrix stays on the rank, and the other tensors are moved."""
    matrix, x = torch.eye(3).to_sparse(), torch.ones(3, 2, requires_grad=True)
    result, saved = saved_by(lambda value: torch.sparse.mm(matrix, value).exp().sum(), x)
    saved.put_back(saved.take_out())
    result.backward()
    torch.testing.assert_close(x.grad, torch.ones(3, 2).exp())
