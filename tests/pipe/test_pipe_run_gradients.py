"""What of a forward of a `Pipe` has a gradient: outputs, inputs and side losses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.modules.side_loss import side_loss
from penstock.pipe.pipe import Pipe


class Mixed(nn.Module):
    """Returns a product with a weight, and a constant of the same kind."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        """Return both."""
        return x * self.gain, x.detach().sign()


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_outputs_that_are_constants_require_no_gradient(mode):
    """As those of the plain model."""
    product, constant = Pipe(nn.Sequential(Mixed()), [1], chunks=2, checkpoint=mode)(torch.ones(4))
    assert (product.requires_grad, constant.requires_grad) == (True, False)


def test_a_later_input_alone_may_require_a_gradient():
    """Of a model without weights, too."""
    x, unused = torch.ones(4, 2, requires_grad=True), torch.ones(4, 3)
    pipe = Pipe(nn.Sequential(Second()), [1], chunks=2)
    pipe((unused, x)).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(4, 2))


class Second(nn.Module):
    """Returns the second item."""

    def forward(self, items):
        """Return it."""
        return items[1]


def test_a_side_loss_that_is_left_out_is_refused_wherever_its_layer_is():
    """Also where the output has a gradient of its own; a constant needs not be in the loss."""

    class Router(nn.Module):
        def forward(self, x):
            side_loss(x.mean() if x.requires_grad else torch.ones(()))
            return x

    for layers in ([Router(), nn.Linear(2, 2)], [nn.Linear(2, 2), Router()]):
        pipe = Pipe(nn.Sequential(*layers), [1, 1], devices=2, chunks=2)
        x = torch.ones(4, 2, requires_grad=True)
        with pytest.raises(RuntimeError, match="does not include it: add it"):
            pipe(x).sum().backward()
    pipe = Pipe(nn.Sequential(Router(), nn.Linear(2, 2)), [1, 1], devices=2, chunks=2)
    pipe(torch.ones(4, 2)).sum().backward()
    assert not pipe.side_loss.requires_grad


def test_two_forwards_have_other_random_numbers():
    """The generator of the caller moves on from one to the next."""
    pipe = Pipe(nn.Sequential(nn.Dropout(0.5)), [1], chunks=2)
    torch.manual_seed(5)
    assert not torch.equal(pipe(torch.ones(4, 50)), pipe(torch.ones(4, 50)))
