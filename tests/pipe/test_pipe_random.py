"""Random numbers of the layers of a `Pipe`: streams by layer and micro-batch, layers that hold the
generators exclusively, and what is known about partitions from earlier forwards.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests.pipe.layers import forced
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.pipe.pipe import Pipe
from penstock.pipe.pipe_random import ForwardSeed, PartitionRandomness, SeededOps

CPU = torch.device("cpu")


class Masking(nn.Module):
    """Multiplies its input by a random mask.

    Attributes:
        draw: a function from the shape to the mask.
    """

    def __init__(self, draw) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x):
        """Multiply."""
        return x * self.draw(x.shape)


class Checkpointed(nn.Module):
    """Drops numbers inside `torch.utils.checkpoint`, which runs that again in the backward.

    Attributes:
        rates: holds the rate of the dropout, where no attribute of the module shows it.
    """

    def __init__(self, rate: float, *, reentrant: bool) -> None:
        super().__init__()
        self.rates, self.reentrant = [rate], reentrant

    def forward(self, x):
        """Drop."""
        return checkpoint(
            lambda inner: functional.dropout(inner, self.rates[0]) * 1.0,
            x,
            use_reentrant=self.reentrant,
        )


def seeded_draws(seed, layers, *, micro_batch=0, randomness=None):
    """What layers return for ones under `SeededOps`, as a partition runs them."""
    torch.manual_seed(seed)
    if randomness is None:
        randomness = PartitionRandomness(nn.Sequential(*layers))
        randomness.begin_run(list(randomness._module.modules()), training=True)
    with SeededOps(ForwardSeed(), CPU, micro_batch, None, randomness) as ops:
        return [ops.run(index, layer, torch.ones(50)) for index, layer in enumerate(layers)]


def torch_mask(shape):
    """A mask from torch's generator."""
    return torch.rand(shape)


def python_mask(shape):
    """A mask from Python's generator."""
    return torch.tensor([random.random() for _ in range(shape.numel())]).view(shape)


def numpy_mask(shape):
    """A mask from NumPy's generator."""
    return torch.from_numpy(np.random.random(tuple(shape))).float()  # noqa: NPY002 - as users call it


MASKS = pytest.mark.parametrize("mask", [torch_mask, python_mask, numpy_mask])


@MASKS
@pytest.mark.parametrize("mode", ["never", "always"])
def test_masks_of_any_generator_are_the_same_by_seed_with_and_without_threads(mask, mode):
    """In observed forwards (1, 2 and 4) and in the others: the gradient of the input is the mask
    that the forward has drawn, and the caller's generators of Python and NumPy stay.
    """
    results = []
    for threads in (True, False):
        pipe = Pipe(
            nn.Sequential(Masking(mask), Masking(mask)),
            [1, 1],
            devices=2,
            chunks=2,
            checkpoint=mode,
        )
        torch.manual_seed(3)
        host_states = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        outputs = []
        for _ in range(4):
            x = torch.ones(4, 5, requires_grad=True)
            output = pipe(x)
            for choice in pipe._engine.choices.values():
                choice.forced = threads
            output.sum().backward()
            torch.testing.assert_close(x.grad, output.detach())
            outputs.append(output.detach())
        assert (random.getstate(), np.random.get_state()[1].tolist()) == host_states  # noqa: NPY002
        results.append(torch.stack(outputs))
    assert torch.equal(*results)
    # No two forwards, and no two micro-batches, have the same mask.
    assert len({tuple(half.flatten().tolist()) for half in results[0].view(8, 2, 5)}) == 8


@MASKS
def test_a_micro_batch_without_draws_does_not_hide_those_of_another(mask):
    """In every forward the recompute has the mask, and the caller's generator of Python stays."""

    class MaskingOnes(nn.Module):
        def forward(self, x):
            return x * mask(x.shape) if bool(x.any()) else x

    pipe = Pipe(nn.Sequential(MaskingOnes()), [1], chunks=2, checkpoint="always")
    state = random.getstate()
    for _ in range(3):
        x = torch.cat([torch.ones(2, 9), torch.zeros(2, 9)]).requires_grad_()
        output = pipe(x)
        output.sum().backward()
        torch.testing.assert_close(x.grad[:2], output.detach()[:2])
        assert random.getstate() == state


@MASKS
def test_a_layer_draws_the_same_in_a_run_that_is_observed_and_in_one_that_is_not(mask):
    """Whether a layer holds the generators exclusively changes none of its numbers."""
    layers = [Masking(mask), nn.Dropout(0.5), Masking(mask)]
    randomness = PartitionRandomness(nn.Sequential(*layers))
    runs = []
    for _ in range(3):
        randomness.begin_run(list(randomness._module.modules()), training=True)
        runs.append((randomness.observing, seeded_draws(5, layers, randomness=randomness)))
    assert [observing for observing, _ in runs] == [True, True, False]
    for _, draws in runs[1:]:
        assert all(map(torch.equal, draws, runs[0][1]))


def test_streams_differ_by_layer_micro_batch_and_seed():
    """Equal streams would correlate the masks of layers."""
    layers = [nn.Dropout(0.5), Masking(torch_mask), nn.Dropout(0.5)]
    first, _, third = seeded_draws(5, layers)
    assert not torch.equal(first, third)
    assert not torch.equal(first, seeded_draws(5, layers, micro_batch=1)[0])
    assert not torch.equal(first, seeded_draws(6, layers)[0])
    assert torch.equal(first, seeded_draws(5, layers)[0])


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), Masking(torch_mask)])
def test_a_layer_continues_its_stream_from_op_to_op(layer):
    """Two draws of one layer in one micro-batch differ; those of the next layer do not depend on
    how many there were.
    """

    class Twice(nn.Module):
        def forward(self, x):
            return torch.stack([layer(x), layer(x)])

    layers = [Twice(), nn.Dropout(0.5)]
    randomness = PartitionRandomness(nn.Sequential(*layers))
    for _ in range(3):  # the third run is not observed
        randomness.begin_run(list(randomness._module.modules()), training=True)
        (first, second), other = seeded_draws(5, layers, randomness=randomness)
        assert not torch.equal(first, second)
    again, other_again = seeded_draws(5, [layer, nn.Dropout(0.5)])
    assert torch.equal(first, again)
    assert torch.equal(other, other_again)


def test_an_op_with_a_generator_of_the_caller_draws_from_it():
    """Such an op is the caller's to seed: it has no stream, and counts as no draw."""
    generator = torch.Generator().manual_seed(2)
    layer = Masking(lambda shape: torch.rand(shape, generator=generator))
    expected = torch.rand(50, generator=torch.Generator().manual_seed(2))
    state = torch.get_rng_state()
    pipe = Pipe(nn.Sequential(layer), [1], devices=1)
    assert torch.equal(pipe(torch.ones(50)), expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("draws", [1, 3])
def test_a_forward_that_draws_advances_the_callers_generator_by_one_number(draws):
    """However many layers and micro-batches draw, and whether the forward is observed or not."""
    pipe = Pipe(nn.Sequential(*(Masking(torch_mask) for _ in range(draws))), [draws], devices=1)
    torch.manual_seed(4)
    for _ in range(3):
        torch.empty((), dtype=torch.int64).random_()
    expected = torch.get_rng_state()
    torch.manual_seed(4)
    for _ in range(3):
        pipe(torch.ones(4))
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mode", ["never", "always"])
def test_layers_that_checkpoint_inside_drop_the_same_in_their_second_forward(reentrant, mode):
    """The gradient of the input is that of the mask that the forward has drawn, in observed
    forwards and in others.
    """
    layers = [Checkpointed(0.5, reentrant=reentrant), nn.Dropout(0.2)]
    pipe = Pipe(nn.Sequential(*layers), [1, 1], devices=2, chunks=2, checkpoint=mode)
    for _ in range(3):
        x = torch.ones(4, 20, requires_grad=True)
        output = pipe(x)
        output.sum().backward()
        torch.testing.assert_close(x.grad, output.detach())


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_draw_inside_checkpoint_in_a_forward_that_is_not_observed_is_refused_once(reentrant):
    """Its second forward would draw other numbers. The next forward reserves the generators."""
    layer = Checkpointed(0.0, reentrant=reentrant)
    # The second layer draws, so that random ops of the partition are intercepted in each forward.
    pipe = Pipe(nn.Sequential(layer, nn.Dropout(0.5)), [2], devices=1, checkpoint="never")
    x = torch.ones(4, 20, requires_grad=True)
    for _ in range(4):
        pipe(x).sum().backward()
    layer.rates[0] = 0.5
    with pytest.raises(RuntimeError, match=r"layer 0 of a Pipe drew .* inside torch.utils.check"):
        pipe(x)
    for _ in range(2):
        x.grad = None
        output = pipe(x)
        output.sum().backward()
        torch.testing.assert_close(x.grad, output.detach())


def test_a_raised_dropout_rate_is_seen_in_the_next_forward():
    """Of a partition that has drawn nothing so far: its recompute has the mask of the forward."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), Masking(torch.ones))
    layers.requires_grad_(False)
    nn.init.eye_(layers[0].weight), nn.init.zeros_(layers[0].bias)
    pipe = Pipe(layers, [3], devices=1, chunks=2, checkpoint="always")
    for forward in range(7):
        layers[1].p = 0.5 if forward in (2, 6) else 0.0
        x = torch.ones(4, 4, requires_grad=True)
        output = pipe(x)
        output.sum().backward()
        torch.testing.assert_close(x.grad, output.detach())
        assert bool((output == 0).any()) == (forward in (2, 6))


def run_once(randomness, training=True, *, drew=False):
    """Whether a run is intercepted; record that it was and whether it drew."""
    intercepted = randomness.begin_run(list(randomness._module.modules()), training)
    if intercepted:
        randomness.record_run(training, drew)
    return intercepted


def test_a_partition_that_drew_nothing_is_intercepted_in_forwards_1_2_4_and_8_only():
    """Interception costs time in each op."""
    randomness = PartitionRandomness(nn.Sequential(nn.Dropout(0.5)))
    assert [run_once(randomness) for _ in range(9)] == [
        number in (1, 2, 4, 8) for number in range(1, 10)
    ]


def test_one_that_drew_is_intercepted_until_an_intercepted_forward_draws_nothing():
    """What the last intercepted forward did counts, for training and evaluation apart."""
    randomness = PartitionRandomness(nn.Sequential(nn.Dropout(0.5)))
    for _ in range(4):
        assert run_once(randomness, drew=True)
    assert run_once(randomness, training=True, drew=True)
    assert run_once(randomness, training=False, drew=False)
    assert not run_once(randomness, training=False)
    assert run_once(randomness, training=True, drew=False)  # the eighth
    assert not run_once(randomness, training=True)
    randomness.always_intercept = True
    assert run_once(randomness, training=True)


def test_a_partition_that_cannot_draw_is_never_intercepted():
    """Until a module that may draw, or a hook, is added."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    randomness = PartitionRandomness(layers)
    assert not any(run_once(randomness) for _ in range(4))
    assert not randomness.may_draw
    assert not randomness.observes_layers
    layers.append(Masking(torch_mask))
    assert run_once(randomness)
    assert randomness.observes_layers
    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked.register_forward_hook(lambda *_: None)
    assert run_once(PartitionRandomness(hooked))


def test_other_modules_are_counted_and_judged_anew():
    """What was known of the modules before does not hold for others."""
    layers = nn.Sequential(Masking(torch.ones))
    randomness = PartitionRandomness(layers)
    assert [run_once(randomness) for _ in range(3)] == [True, True, False]
    layers[0] = Masking(torch_mask)
    assert [run_once(randomness, drew=True) for _ in range(3)] == [True, True, True]


def test_what_earlier_forwards_did_not_draw_tells_nothing_after_a_draw_or_a_change_of_modules():
    """A layer may draw in some batches only, and other modules in another mode."""
    layers = nn.Sequential(Masking(torch.ones))
    randomness = PartitionRandomness(layers)
    assert run_once(randomness, drew=False)
    assert run_once(randomness, drew=True)  # the second, which is observed
    assert run_once(randomness, drew=False)
    assert run_once(randomness, training=False, drew=False)
    layers[0] = Masking(torch_mask)
    assert [run_once(randomness, drew=True) for _ in range(2)] == [True, True]
    assert run_once(randomness, training=False)


def test_a_changed_float_of_a_module_of_the_user_may_be_a_rate():
    """A forward that drew nothing tells nothing about another rate, under whatever name."""
    layer = Masking(torch.ones)
    layer.share = 0.0
    randomness = PartitionRandomness(nn.Sequential(layer))
    runs = [run_once(randomness) for _ in range(5)]
    assert runs == [True, True, False, True, False]
    layer.share = 0.5  # the sixth forward is not observed
    assert randomness.begin_run(list(randomness._module.modules()), training=True)


@pytest.mark.parametrize("draws", [(1, 2), (1,), (2,), ()])
def test_a_backward_holds_the_generators_where_an_observed_one_has_drawn(draws):
    """It then leaves them as they were, as two threads of a Pipe need that draw in backwards. One
    that draws nothing does not take that back.
    """
    randomness = PartitionRandomness(nn.Sequential(Masking(torch.ones)))
    restored = []
    for number in range(1, 4):
        run_once(randomness)
        state = torch.get_rng_state()
        with randomness.backward(CPU):
            if number in (*draws, 3):
                torch.rand(1)
        restored.append(torch.equal(torch.get_rng_state(), state))
    assert restored == [True, True, bool(draws)]


def test_the_backward_of_layers_that_checkpoint_inside_holds_the_generators():
    """There `torch.utils.checkpoint` sets the random state of its first forward again."""
    layer = Masking(torch.ones)
    randomness = PartitionRandomness(nn.Sequential(layer))
    for _ in range(3):
        run_once(randomness)
    randomness.of_layer(layer).random_in_rerun = True
    state = torch.get_rng_state()
    with randomness.backward(CPU):
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), state)


class Dropping(nn.Module):
    """Drops numbers by torch's function, of which no module knows."""

    def __init__(self, share: float = 0.3) -> None:
        super().__init__()
        self.share = share

    def forward(self, x):
        """Drop some."""
        return functional.dropout(x, self.share, self.training)


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("make", [lambda: nn.Dropout(0.3), Dropping])
def test_dropout_is_the_same_by_seed_with_threads_or_none_and_at_the_recompute(make, mode):
    """`x.grad` is non-zero exactly where the output is: forward and recompute have dropped the
    same.
    """
    results = []
    for threads in (None, True, False):
        x = torch.ones(6, 50, requires_grad=True)
        pipe = forced(
            Pipe(
                nn.Sequential(make(), make(), make()), [1, 2], devices=2, chunks=3, checkpoint=mode
            ),
            x,
            threads,
        )
        torch.manual_seed(7)
        output = pipe(x)
        torch.manual_seed(8)
        output.sum().backward()
        torch.testing.assert_close(x.grad, output.detach())
        results.append(output.detach())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert 0 < int(results[0].count_nonzero()) < results[0].numel()


def test_dropout_does_not_depend_on_the_balance_and_differs_from_forward_to_forward():
    """It depends on the layer and the micro-batch, never on the cut; and two forwards are two
    draws.
    """
    outputs = []
    for balance in ([3], [1, 2], [2, 1]):
        pipe = Pipe(
            nn.Sequential(Dropping(), nn.Dropout(0.2), Dropping()), balance, devices=2, chunks=3
        )
        torch.manual_seed(7)
        outputs.append((pipe(torch.ones(6, 20)), pipe(torch.ones(6, 20))))
    assert all(
        torch.equal(one, outputs[0][0]) and torch.equal(other, outputs[0][1])
        for one, other in outputs
    )
    assert not torch.equal(*outputs[0])
    assert not torch.equal(outputs[0][0][:2], outputs[0][0][2:4])


def test_a_model_that_draws_nothing_leaves_the_callers_generator_alone():
    """As the plain model does."""
    pipe, before = (
        Pipe(nn.Sequential(Dropping(0.0), nn.Linear(2, 2)), [1, 1], devices=2, chunks=2),
        torch.get_rng_state(),
    )
    pipe(torch.rand(1).expand(4, 2)).sum().backward()
    torch.set_rng_state(before)
    pipe(torch.ones(4, 2)).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
