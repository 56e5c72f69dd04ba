"""A backward of several roots, against torch's."""

from __future__ import annotations

import pytest
import torch

from penstock.grad import full_backward
from penstock.grad.full_backward import whole_grad


def graph():
    """Two outputs of unlike shapes over common leaves."""
    torch.manual_seed(0)
    first, second = torch.randn(3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    unused = torch.ones(1, requires_grad=True)
    shared = (first * second).exp()
    return [first, second, unused], [shared.sum(dim=1), shared[0] * first]


def test_gradients_of_all_roots_add_up_as_torchs_do():
    """Each root with its own gradient; a second backward adds to the first."""
    leaves, roots = graph()
    grads = [torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.0, 3.0])]
    expected_leaves, expected_roots = graph()
    for _ in range(2):
        whole_grad(roots, grads)
        torch.autograd.backward(expected_roots, grads)
        for leaf, expected in zip(leaves[:2], expected_leaves[:2], strict=True):
            assert torch.equal(leaf.grad, expected.grad)
        roots, expected_roots = graph_over(leaves), graph_over(expected_leaves)
    assert leaves[2].grad is None
    assert [grad.tolist() for grad in grads] == [[1.0, -2.0], [0.5, 0.0, 3.0]]


def graph_over(leaves):
    """The same outputs over other leaves."""
    shared = (leaves[0] * leaves[1]).exp()
    return [shared.sum(dim=1), shared[0] * leaves[0]]


def test_the_graph_is_freed_and_none_is_made_of_the_gradients():
    """A stage runs each backward once."""
    leaves, roots = graph()
    grads = [torch.ones(2), torch.ones(3)]
    whole_grad(roots, grads)
    assert not leaves[0].grad.requires_grad
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        whole_grad(roots, grads)


def test_a_root_without_a_path_to_a_leaf_is_no_error():
    """A stage may have an output that depends on no parameter."""
    leaf = torch.ones(2, requires_grad=True)
    (middle,) = torch.autograd.grad((leaf**2).sum(), leaf, create_graph=True)
    whole_grad([middle.sum()], [torch.tensor(1.0)])
    assert leaf.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("on_host", [True, False])
def test_the_engine_is_torchs_own_function_on_devices(monkeypatch, on_host):
    """Threads of devices read a context that only that function stores."""
    calls = []
    engine = type(
        "Engine", (), {"run_backward": staticmethod(lambda *a, **k: calls.append("host"))}
    )
    monkeypatch.setattr(full_backward, "_ENGINE", engine)
    monkeypatch.setattr(
        full_backward, "_engine_run_backward", lambda *given, **more: calls.append((given, more))
    )
    root = torch.ones(1, device="cpu" if on_host else "meta")
    whole_grad([root], [root])
    if on_host:
        assert calls == ["host"]
    else:
        more = {"allow_unreachable": True, "accumulate_grad": True}
        assert calls == [(((root,), (root,), False, False, ()), more)]
