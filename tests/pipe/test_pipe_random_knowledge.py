"""What a `Pipe` knows about the random numbers of its layers, where layers and batches change."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.pipe.pipe import Pipe
from penstock.pipe.pipe_random import ForwardSeed, PartitionRandomness, SeededOps


def begin_run(randomness: PartitionRandomness, *, drew: bool = False) -> bool:
    """Return whether the next forward is intercepted, and record whether it drew."""
    parts = list(randomness._module.modules())
    intercepted = randomness.begin_run(parts, training=True)
    if intercepted:
        randomness.record_run(True, drew)
    return intercepted


class Scaling(nn.Module):
    """Multiplies by numbers that a function makes."""

    def __init__(self, make=torch.ones) -> None:
        super().__init__()
        self.make = make

    def forward(self, x):
        """Multiply."""
        return x * self.make(x.shape)


class Twice(nn.Module):
    """Drops inside `torch.utils.checkpoint`, and once more behind it."""

    def forward(self, x):
        """Drop twice."""
        x = checkpoint(functional.dropout, x, 0.5, use_reentrant=False)
        return functional.dropout(x, 0.1)


def test_a_layer_that_draws_inside_and_outside_of_checkpoint_has_one_mask_in_both_forwards():
    """The draw behind does not hide the one inside. In forward 3, which is not observed, too."""
    pipe = Pipe(nn.Sequential(Twice()), [1], chunks=2, checkpoint="never")
    for _ in range(3):
        x = torch.ones(4, 30, requires_grad=True)
        output = pipe(x)
        output.sum().backward()
        torch.testing.assert_close(x.grad, output.detach())


class Attending(nn.Module):
    """Attention without dropout inside `torch.utils.checkpoint`."""

    def forward(self, x):
        """Attend to the batch itself."""
        return checkpoint(self.attend, x, use_reentrant=False)

    def attend(self, x):
        """Attend."""
        return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.0)


class OwnGenerator(nn.Module):
    """Draws from a generator of the user inside `torch.utils.checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = [torch.Generator().manual_seed(1)]

    def forward(self, x):
        """Multiply by numbers that are drawn."""
        return checkpoint(self.multiply, x, use_reentrant=False)

    def multiply(self, x):
        """Multiply."""
        return x * torch.rand(x.shape, generator=self.generators[0])


@pytest.mark.parametrize("layer", [Attending(), OwnGenerator()])
def test_what_draws_nothing_from_torchs_generators_needs_no_exclusive_use(layer):
    """Attention without dropout, and ops with a generator of the user, are tagged as random."""
    pipe = Pipe(nn.Sequential(layer), [1], checkpoint="never")
    for _ in range(3):
        pipe(torch.ones(2, 3, 4, requires_grad=True))
    randomness = pipe._engine.stages[0].randomness
    assert not randomness.observing
    assert not randomness.needs_exclusive_use(randomness.of_layer(layer))


class Attention:
    """Stands for a fused attention of a GPU, which is tagged as random whatever its dropout."""

    tags = frozenset({torch.Tag.nondeterministic_seeded})
    _schema = SimpleNamespace(arguments=[SimpleNamespace(name="dropout_p")])

    def __call__(self, rate):
        """Return the rate."""
        return rate


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_fused_attention_without_dropout_runs_without_a_stream(rate):
    """To seed the generators for nothing takes longer than the op."""
    seed = ForwardSeed()
    randomness = PartitionRandomness(nn.Sequential())
    ops = SeededOps(seed, torch.device("cpu"), 0, None, randomness)
    assert ops.__torch_dispatch__(Attention(), (), (rate,)) == rate
    assert (seed._seed is None) is (rate == 0.0)


def test_a_layer_that_mentions_the_generator_of_python_has_exclusive_use_from_its_first_draw():
    """Which may be in a forward that is not observed: the caller's numbers stay what they are."""
    draws = [False]

    class Sometimes(nn.Module):
        def forward(self, x):
            return x * random.random() if draws[0] else x

    pipe = Pipe(nn.Sequential(Sometimes(), nn.Dropout(0.5)), [2])
    x = torch.ones(2, 2)
    for _ in range(2):
        pipe(x)
    draws[0] = True
    state = random.getstate()
    pipe(x)
    assert random.getstate() == state


def test_a_hook_before_the_layers_may_draw():
    """As one behind them."""
    layers = nn.Sequential(nn.Linear(2, 2))
    layers.register_forward_pre_hook(lambda *_: None)
    assert begin_run(PartitionRandomness(layers))


def test_layers_that_may_draw_and_are_replaced_leave_nothing_to_intercept():
    """What is known holds for the modules that there are."""
    layers = nn.Sequential(nn.Dropout(0.5))
    randomness = PartitionRandomness(layers)
    assert begin_run(randomness, drew=True)
    layers[0] = nn.ReLU()
    assert not begin_run(randomness)
    assert not randomness.may_draw


def test_a_part_of_a_layer_that_is_replaced_changes_what_is_known_of_the_layer():
    """A container of torch's layers gets one of the user's."""
    layers = nn.Sequential(nn.Sequential(nn.Dropout(0.5)))
    randomness = PartitionRandomness(layers)
    begin_run(randomness, drew=True)
    assert not randomness.of_layer(layers[0]).user_code
    layers[0][0] = Scaling()
    begin_run(randomness, drew=True)
    assert randomness.of_layer(layers[0]).user_code


def test_rates_of_layers_that_were_added_are_compared_too():
    """By any attribute of a module of the user."""
    layers = nn.Sequential(Scaling())
    randomness = PartitionRandomness(layers)
    begin_run(randomness)
    layers[0] = Scaling()
    layers[0].share = 0.0
    assert [begin_run(randomness) for _ in range(4)] == [True, True, False, True]
    layers[0].share = 0.5
    assert randomness.begin_run(list(layers.modules()), training=True)


def test_the_dropout_of_attention_may_be_raised():
    """Torch's modules have rates of the names `p` and `dropout`."""
    layers = nn.Sequential(nn.MultiheadAttention(4, 2))
    randomness = PartitionRandomness(layers)
    assert [begin_run(randomness) for _ in range(4)] == [True, True, False, True]
    layers[0].dropout = 0.5
    assert randomness.begin_run(list(layers.modules()), training=True)
