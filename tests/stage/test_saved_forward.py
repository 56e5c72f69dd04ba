"""What a stage saves for a backward: the order of roots, and gradients in their own layout."""

from __future__ import annotations

import torch

from penstock.stage.saved_forward import InputGrads, roots_of, with_grad
from penstock.transport.payload import Payload


def leaf(*shape):
    """Return a tensor that requires a gradient."""
    return torch.ones(shape, requires_grad=True)


def test_roots_are_outputs_then_losses_then_the_state_for_the_next_slice():
    """Arriving gradients and those of the state belong to the roots by place."""
    outputs = [leaf(1), torch.ones(2), leaf(3)]
    losses = [leaf(4), leaf(5)]
    carried = [torch.ones(6), leaf(7)]
    sizes = [len(root) for root in roots_of(outputs, losses, carried)]
    assert sizes == [1, 3, 4, 5, 7]
    assert roots_of([torch.ones(1)], [], []) == []


def test_only_tensors_that_require_a_gradient_are_left_in_their_order():
    """Also the same one twice."""
    first, second = leaf(1), leaf(2)
    assert [id(t) for t in with_grad([second, torch.ones(1), first, second])] == [
        id(second),
        id(first),
        id(second),
    ]


def test_gradients_come_by_leaf_and_once():
    """A leaf that the graph does not reach has none, also after a batch in which it had one."""
    first, second = leaf(2), leaf(3)
    grads = InputGrads.of([first, second])
    ((2 * first).sum() + (5 * second).sum()).backward()
    (one, other), same_layout = grads.take([first, second])
    assert (one.tolist(), other.tolist(), same_layout) == ([2.0] * 2, [5.0] * 3, True)
    (7 * second).sum().backward()
    (one, other), same_layout = grads.take([first, second])
    assert (one, other.tolist(), same_layout) == (None, [7.0] * 3, True)
    assert grads.take([first, second]) == ([None, None], True)


def test_a_gradient_keeps_the_layout_in_which_the_graph_made_it():
    """`leaf.grad` has that of the leaf: a sum over it would round in another order."""
    value, plain = leaf(2, 3), leaf(2, 3)
    weight = torch.arange(6.0).view(3, 2).t()
    grads = InputGrads.of([value, plain])
    (value * weight + plain * 2).sum().backward()
    (grad, other), same_layout = grads.take([value, plain])
    assert grad.stride() == weight.stride() != value.stride()
    assert torch.equal(grad, weight)
    assert value.grad.stride() == value.stride()
    assert other.stride() == plain.stride()
    assert not same_layout, "one of two differs"


def test_sparse_gradients_have_another_layout():
    """A table of rows is dense, its gradient is not."""
    table = leaf(4, 2)
    grads = InputGrads.of([table])
    torch.nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True).sum().backward()
    (grad,), same_layout = grads.take([table])
    assert grad.is_sparse
    assert not same_layout


def test_inputs_without_gradients_are_not_recorded():
    """Such as numbers of words on the first stage; of several inputs those that require one."""
    assert InputGrads.of_inputs(Payload.of(torch.ones(2))) is None
    value = leaf(2)
    grads = InputGrads.of_inputs(Payload.of([torch.ones(3), value]))
    (3 * value).sum().backward()
    (grad,), _ = grads.take([value])
    assert grad.tolist() == [3.0, 3.0]
