"""The sum of a small gradient, which shows whether it is finite."""

import math

import pytest
import torch
from torch import Tensor, nn

from penstock.stage.gradient_probe import GradientProbe

NAN, INF = math.nan, math.inf


def parameter_with(grad):
    """Return a parameter with a gradient."""
    parameter = nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad
    return parameter


@pytest.mark.parametrize("count", [1, 3, 4096, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_sum_follows_a_gradient_that_accumulates_in_place(count, dtype):
    """Small and large gradients, of types that NumPy has and one that it has not."""
    parameter = parameter_with(torch.ones(count, dtype=dtype))
    probe = GradientProbe(parameter)
    for rounds in (1, 2, 3):
        assert float(probe.total()) == pytest.approx(rounds * count, rel=1e-2)
        parameter.grad += 1
    for value in (INF, -INF, NAN):
        parameter.grad.fill_(1)[-1] = value
        assert not math.isfinite(probe.total())


def test_a_gradient_of_new_memory_is_read_there():
    """Optimizers drop gradients after a step, and hooks may replace them or their memory."""
    parameter = parameter_with(torch.ones(3))
    probe = GradientProbe(parameter)
    assert probe.total() == 3.0
    parameter.grad = torch.full((3,), 2.0)
    assert probe.total() == 6.0
    parameter.grad.data = torch.full((3,), 5.0)
    assert probe.total() == 15.0
    parameter.grad = None
    assert probe.total() is None
    probe.release()
    parameter.grad = torch.full((3,), 4.0, dtype=torch.float32)
    assert probe.total() == 12.0


@pytest.mark.parametrize(
    "grad",
    [
        torch.ones(4, 6).t(),
        torch.ones(8, 6)[::2],
        torch.ones(24, dtype=torch.complex64),
        torch.ones(24, requires_grad=True) * 1,
        torch.full((), 24.0),
    ],
)
def test_a_gradient_of_any_layout_is_summed(grad):
    """Transposed, with gaps, complex, with a graph of its own or of one number."""
    parameter = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    parameter.grad = grad
    assert GradientProbe(parameter).total() == 24


def test_a_sparse_gradient_is_not_probed():
    """Its sum would have to join its entries first."""
    assert GradientProbe(parameter_with(torch.ones(3).to_sparse())).total() is None


def test_a_gradient_that_is_not_in_host_memory_stays_there():
    """Its sum is a tensor, which is read later."""
    total = GradientProbe(parameter_with(torch.ones(3, device="meta"))).total()
    assert isinstance(total, Tensor)
    assert total.is_meta


class Wrapped(Tensor):
    """A tensor of another class, whose elements NumPy does not see."""

    def numpy(self):
        """Refuse."""
        raise RuntimeError("not in host memory")


def test_a_gradient_of_another_class_is_summed_by_its_own_operations():
    """Such as one that processes share."""
    assert GradientProbe(parameter_with(torch.ones(3).as_subclass(Wrapped))).total() == 3.0


def test_a_gradient_of_another_form_takes_the_place_of_an_earlier_one():
    """Its sum is read, and not that of the memory before."""
    parameter = parameter_with(torch.ones(2, 3))
    probe = GradientProbe(parameter)
    assert probe.total() == 6.0
    for grad in (torch.full((3, 2), 2.0).t(), torch.full((2, 3), 3.0), torch.full((3, 2), NAN).t()):
        parameter.grad = grad
        assert probe.total() == pytest.approx(float(grad.sum()), nan_ok=True)
