"""Random numbers of layers in a backward, see `penstock.stage.stage_random`."""

from __future__ import annotations

import random

import pytest
import torch
from tests.stage.drawing_layers import (
    Noise,
    Quiet,
    batch_of,
    draws_of,
    forward,
    host_number,
    python_number,
    seeded,
)
from torch import nn

from penstock.errors import RunError
from penstock.stage.stage_random import Place


class DrawingBackward(torch.autograd.Function):
    """The identity, whose gradient is multiplied by what a function draws."""

    @staticmethod
    def forward(ctx, x, function):
        """Return a copy."""
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        """Multiply the gradient."""
        return grad * ctx.function(), None


class InBackward(nn.Module):
    """A layer that draws in its backward, and in its forward by torch."""

    def __init__(self, function):
        super().__init__()
        self.functions = [function]

    def forward(self, x):
        """Run the function."""
        return DrawingBackward.apply(x + 0 * torch.rand(1), self.functions[0])


@pytest.mark.parametrize("places", [(0, 2), (2,), (0,)], ids=str)
@pytest.mark.parametrize("function", [lambda: torch.rand(3), python_number], ids=["torch", "host"])
def test_a_backward_draws_from_the_streams_of_its_layers(function, places):
    """Of each layer of its own, whatever the order of the micro-batches; generators of the caller
    stay as they were.
    """
    layers = [InBackward(function) if place in places else Quiet() for place in range(3)]
    draws, parts = draws_of(*layers)
    for step in range(5):
        batch = batch_of(step)
        leaves = [torch.ones(3, requires_grad=True) for _ in range(2)]
        outputs = [forward(draws, parts, batch, n, leaf) for n, leaf in enumerate(leaves)]
        assert draws.watches_backward
        torch.manual_seed(step)
        random.seed(step)
        states = torch.get_rng_state(), random.getstate()
        for number in (1, 0):
            with draws.backward(Place(batch, number)):
                outputs[number].sum().backward()
            expected = torch.ones(3)
            for index in places:
                components = (step, index, number, 2)
                host_number(int, *components)
                expected = expected * seeded(function, *components)
            random.setstate(states[1])
            torch.testing.assert_close(leaves[number].grad, expected)
        assert torch.equal(torch.get_rng_state(), states[0])


@pytest.mark.parametrize("function", [lambda: torch.rand(3), python_number], ids=["torch", "host"])
def test_a_layer_that_has_drawn_in_one_backward_is_seeded_in_all_later_ones(function):
    """It may draw in some of them alone, and layers before it in none; that of batch 3 is not
    observed.
    """
    draws_now = [True]
    layer = InBackward(lambda: function() if draws_now[0] else 1.0)
    draws, parts = draws_of(Quiet(), layer)
    for step, draws_now[0] in enumerate([True, False, True]):
        batch = batch_of(step, count=1)
        leaf = torch.ones(3, requires_grad=True)
        output = forward(draws, parts, batch, 0, leaf)
        with draws.backward(Place(batch, 0)):
            output.sum().backward()
    before = random.getstate()
    host_number(int, 2, 1, 0, 2)
    expected = torch.ones(3) * seeded(function, 2, 1, 0, 2)
    random.setstate(before)
    torch.testing.assert_close(leaf.grad, expected)


class Forked(nn.Module):
    """A layer whose two outputs draw in their backward."""

    def forward(self, x):
        """Return both."""
        x = x + 0 * torch.rand(1)
        one, other = (DrawingBackward.apply(x, lambda: torch.rand(1)) for _ in range(2))
        return one, other


class Passing(nn.Module):
    """A layer that draws and passes on its input itself."""

    def forward(self, x):
        """Return it."""
        torch.rand(1)
        return x


def test_what_a_layer_passes_on_belongs_to_the_layer_that_has_computed_it():
    """Its backward draws from the stream of that one."""
    draws, parts = draws_of(InBackward(lambda: torch.rand(3)), Passing())
    for step in range(2):
        batch = batch_of(step, count=1)
        leaf = torch.ones(3, requires_grad=True)
        output = forward(draws, parts, batch, 0, leaf)
        with draws.backward(Place(batch, 0)):
            output.sum().backward()
        torch.testing.assert_close(leaf.grad, seeded(lambda: torch.rand(3), step, 0, 0, 2))


def test_a_layer_is_seeded_once_in_a_backward_that_reaches_several_of_its_outputs():
    """Else each output would draw the same numbers."""
    draws, (part,) = draws_of(Forked())
    batch = batch_of(0, count=1)
    leaf = torch.ones(1, requires_grad=True)
    place = Place(batch, 0)
    draws.begin(batch)
    with draws.running():
        one, other = draws.call(part, place, part.module, leaf)
    with draws.backward(place):
        (one + other).sum().backward()
    numbers = seeded(lambda: torch.rand(1) + torch.rand(1), 0, 0, 0, 2)
    torch.testing.assert_close(leaf.grad, numbers)


def test_a_layer_that_draws_in_its_backward_is_refused_in_split_backwards():
    """It would draw in both parts. The message names the layers of the stage."""
    draws, parts = draws_of(InBackward(python_number), nn.Identity(), first=3)
    batch = batch_of(0)
    leaf = torch.ones(3, requires_grad=True)
    output = forward(draws, parts, batch, 0, leaf)
    with (
        pytest.raises(RunError, match="a layer among layer3, layer4 draws random numbers in its"),
        draws.backward(Place(batch, 0), weights_only=True),
    ):
        output.sum().backward()
    before = random.getstate()
    with draws.backward(Place(batch, 1), weights_only=True):
        pass
    assert random.getstate() == before


def test_backwards_are_watched_as_long_as_they_may_draw():
    """All of the first batch, where there is code of the user; ever after if one has drawn."""
    draws, parts = draws_of(Quiet())
    batch = batch_of(0, count=2)
    forward(draws, parts, batch, 0, torch.ones(3))
    for number in range(2):
        assert draws.watches_backward
        with draws.backward(Place(batch, number)):
            pass
    assert not draws.watches_backward
    batch = batch_of(1, count=2)
    forward(draws, parts, batch, 0, torch.ones(3))
    assert draws.watches_backward, "one of batch 2"
    with draws.backward(Place(batch, 0)):
        torch.rand(1)
    for step in range(2, 5):
        batch = batch_of(step, count=2)
        for number in range(2):
            forward(draws, parts, batch, number, torch.ones(3))
            assert draws.watches_backward
            with draws.backward(Place(batch, number)):
                pass
    draws, _ = draws_of(nn.Linear(3, 3), nn.ReLU())
    draws.begin(batch_of(0))
    assert not draws.watches_backward


def test_compiled_backwards_are_watched_if_a_forward_has_drawn():
    """Dispatch modes must not be entered around compiled code, so no backward is observed."""
    draws, parts = draws_of(Quiet(), compiled=True)
    forward(draws, parts, batch_of(0), 0, torch.ones(3))
    assert not draws.watches_backward
    draws, parts = draws_of(Noise(), compiled=True)
    forward(draws, parts, batch_of(0, training=False), 0, torch.ones(3))
    assert not draws.watches_backward
    forward(draws, parts, batch_of(0), 0, torch.ones(3))
    assert draws.watches_backward


def test_all_backwards_of_the_batch_are_watched_in_which_a_layer_first_draws():
    """Code that draws in its forward may draw in some of its backwards alone."""
    draws, parts = draws_of(Sometimes())
    for step in range(2):
        forward(draws, parts, batch_of(step, count=1), 0, torch.ones(3))
        with draws.backward(Place(batch_of(step, count=1), 0)):
            pass
    parts[0].module.draws_now.append(1)
    batch = batch_of(3, count=3)
    for number in range(3):
        forward(draws, parts, batch, number, torch.ones(3))
    for number in range(3):
        assert draws.watches_backward, number
        with draws.backward(Place(batch, number)):
            pass
    assert not draws.watches_backward
    batch = batch_of(4, count=3)
    for number in range(3):
        forward(draws, parts, batch, number, torch.ones(3))
    with draws.backward(Place(batch, 0)):
        pass
    assert not draws.watches_backward, "one of batch 4, as of layers that are known to draw"


class Sometimes(nn.Module):
    """A layer that draws after something was appended to its list."""

    def __init__(self):
        super().__init__()
        self.draws_now = []

    def forward(self, x):
        """Add random numbers, if it draws."""
        return x + torch.rand(3) if self.draws_now else x * 1


def test_backwards_are_watched_that_restore_the_generators_after_their_draws():
    """As torch.utils.checkpoint does: other threads must not see the states in between."""
    draws, parts = draws_of(Quiet())
    for step in range(4):
        batch = batch_of(step, count=1)
        forward(draws, parts, batch, 0, torch.ones(3))
        assert draws.watches_backward
        with draws.backward(Place(batch, 0)), torch.random.fork_rng():
            torch.rand(1)


@pytest.mark.parametrize("fails", [False, True])
def test_a_graph_seeds_no_generators_outside_of_the_backward_of_its_stage(fails):
    """Its user may traverse it again; the generators are the user's then, also after an error."""
    draws, parts = draws_of(Noise(), Noise())
    batch = batch_of(0)
    leaves = [torch.ones(3, requires_grad=True) for _ in range(2)]
    outputs = [forward(draws, parts, batch, n, leaf) for n, leaf in enumerate(leaves)]
    try:
        with draws.backward(Place(batch, 0)):
            outputs[0].sum().backward()
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    torch.manual_seed(5)
    random.seed(5)
    states = torch.get_rng_state(), random.getstate()
    outputs[1].sum().backward()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
