"""What the last stage sees before its first loss: pairs of parts, sizes and evaluations."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional

from penstock.batches.batch import make_batch
from penstock.losses.call import LossCall
from penstock.losses.probe import Draws
from penstock.losses.view import View
from penstock.modules.randomness import generator_states, has_drawn
from penstock.schedule.slicing import Slicing

CPU = torch.device("cpu")


def batch_of(samples, micro_batches, shares=None):
    """A batch of sequences of 6 tokens, cut into slices or not."""
    x = torch.randn(samples, 6, 2, generator=torch.Generator().manual_seed(0))
    slicing = None if shares is None else Slicing("tokens", (shares,) * micro_batches)
    return make_batch(x, x * 2, micro_batches, step=0, training=True, slicing=slicing)


def views_of(batch, number, turn, loss=functional.mse_loss):
    """The views of a batch."""
    return View.all(LossCall(loss, CPU), batch, number, batch.inputs[number], turn)


@pytest.mark.parametrize("seed", range(10))
def test_every_other_micro_batch_is_the_partner_in_turn(seed):
    """Without slices there is one view."""
    choose = random.Random(seed)
    count = choose.randint(2, 5)
    number = choose.randrange(count)
    batch = batch_of(7, count)
    partners = []
    for turn in range(count - 1):
        (view,) = views_of(batch, number, turn)
        partners.append(view.partner)
        assert view.pair == (min(number, view.partner), max(number, view.partner))
        assert not view.along_tokens
        assert view.sizes == tuple(len(batch.inputs[n]) for n in view.pair)
    assert sorted(partners) == [n for n in range(count) if n != number]


def test_slices_have_a_neighbour_of_the_same_sequences_and_the_same_slice_of_others():
    """The last one has the one before it; sizes are those in tokens or samples."""
    batch = batch_of(5, 2, (0.5, 1 / 3, 1 / 6))
    assert [x.shape[:2] for x in batch.inputs] == [(3, 3), (3, 2), (3, 1), (2, 3), (2, 2), (2, 1)]
    for number, neighbour, other in ((0, 1, 3), (1, 2, 4), (2, 1, 5), (3, 4, 0), (5, 4, 2)):
        along, across = views_of(batch, number, 4)
        assert (along.partner, across.partner) == (neighbour, other)
        assert (along.along_tokens, across.along_tokens) == (True, False)
        assert along.sizes == tuple(batch.inputs[n].shape[1] for n in along.pair)
        assert across.sizes == tuple(batch.inputs[n].shape[0] for n in across.pair)
    assert views_of(batch, 0, 0)[0].extents(None) == (5, 6)
    assert views_of(batch, 0, 0)[0].extents(4) == (2, 2)
    assert views_of(batch_of(5, 2), 0, 0)[0].extents(1) == (2, 0)


def per_sample(x, y):
    """A sum divided by the samples."""
    return (x - y).square().sum() / len(x)


def test_evaluations_are_of_the_parts_the_pair_and_the_batch():
    """Samples add up for a pair of micro-batches, and tokens for a pair of slices."""

    def divisors(view):
        first, second, joined = (
            evaluation.terms[0].divisor for evaluation in view.pair_evaluations()
        )
        return [first, second, view.evaluation(None).terms[0].divisor, joined]

    (view,) = views_of(batch_of(5, 2), 1, 0)
    assert divisors(view) == [36.0, 24.0, 60.0, 60.0]
    along, across = views_of(batch_of(7, 3, (0.5, 0.5)), 2, 0)
    assert divisors(along) == [12.0, 12.0, 84.0, 24.0]
    assert divisors(across) == [18.0, 12.0, 84.0, 30.0]
    (view,) = views_of(batch_of(5, 2), 1, 0, per_sample)
    assert divisors(view) == [3.0, 2.0, 5.0, 5.0]


def test_parts_with_targets_in_common_are_a_micro_batch_and_both_of_the_pair():
    """So that the targets of the first occur twice where both parts are joined."""
    batch = batch_of(5, 2)
    (view,) = views_of(batch, 0, 0, lambda x, y: y.sum() + 0 * x.sum())
    repeated = view.with_repeated_targets()
    assert (repeated.pair, repeated.sizes, view.sizes) == ((0, 1), (3, 5), (3, 2))
    (reading,) = repeated.readings(brief=True)
    one, other = (float(target.sum()) for target in batch.targets)
    values = (reading.first, reading.second, reading.joined)
    assert values == pytest.approx((one, one + other, 2 * one + other), rel=1e-5)
    (view,) = views_of(batch, 0, 0, per_sample)
    evaluations = view.with_repeated_targets().pair_evaluations()
    assert [evaluation.terms[0].divisor for evaluation in evaluations] == [3.0, 5.0, 8.0]


@pytest.mark.parametrize("number", [0, 1])
def test_readings_are_of_both_parts_in_their_order_and_move_no_generator(number):
    """The first part has the smaller number, whichever has run."""
    batch = batch_of(5, 2)
    before = torch.get_rng_state()

    def loss(output, target):
        return (output - 3 * target).square().mean()

    (view,) = views_of(batch, number, 0, loss)
    results = view.readings(brief=True)
    value = batch.inputs[number]
    rows = [value[[n % len(value) for n in range(count)]] for count in (3, 2)]
    assert results[0].first == pytest.approx(float(loss(rows[0], batch.targets[0])))
    rolled = rows[1].roll(1, 0)
    assert results[0].second == pytest.approx(float(loss(rolled, batch.targets[1])))
    assert len(view.readings()) == 5
    assert torch.equal(torch.get_rng_state(), before)
    (view,) = views_of(batch, number, 0, lambda x, y: (x * torch.rand(())).sum())
    with pytest.raises(Draws):
        view.readings()


def test_a_loss_is_called_on_the_output_of_another_size():
    """Repeated or cut, along both dimensions; the target is a copy."""

    def loss(output, target):
        assert not output.requires_grad
        return output.sum(), target.mul_(0)

    batch = batch_of(5, 2, (0.5, 1 / 3, 1 / 6))
    before = [target.clone() for target in batch.targets]
    view = views_of(batch, 1, 0, loss)[0]
    value = batch.inputs[1]
    for number, (samples, tokens) in enumerate([(3, 3), (3, 2), (3, 1), (2, 3), (2, 2), (2, 1)]):
        rows = torch.tensor([n % 3 for n in range(samples)])
        columns = torch.tensor([n % 2 for n in range(tokens)])
        expected = value[rows][:, columns].sum()
        total, zeros = view.in_numbers(number)
        torch.testing.assert_close(total, expected)
        assert zeros.shape == batch.targets[number].shape
    assert all(map(torch.equal, before, batch.targets))


def test_states_of_generators_change_with_every_draw():
    """Of the host and of the device."""
    before = generator_states(CPU)
    assert not has_drawn(CPU, before)
    torch.rand(1)
    assert has_drawn(CPU, before)


def test_an_evaluation_moves_no_generator_though_the_loss_draws():
    """The form of a loss is examined in some batches, whose random numbers stay the caller's."""
    (view,) = views_of(batch_of(5, 2), 0, 0, lambda x, y: ((x - y) * torch.rand(())).mean())
    before = torch.get_rng_state()
    view.evaluation(0)
    view.pair_evaluations()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("output", "target", "expected"),
    [
        (torch.ones(3, 1), torch.ones(3), True),
        (torch.ones(3), torch.ones(3), False),
        (torch.ones(3, 4), torch.ones(3, 4), False),
        (torch.ones(3, 4), torch.tensor([0, 1, 2]), False),
        (torch.ones(3, 1), torch.tensor([0, 0, 0]), True),
        ([torch.ones(3, 1)], torch.ones(3), False),
    ],
)
def test_outputs_of_another_shape_than_their_targets_may_be_broadcast(output, target, expected):
    """Class indices have fewer dimensions than the scores, which have more than one class."""
    batch = make_batch(torch.ones(6), torch.cat([target, target]), 2, step=0, training=True)
    view = View(LossCall(functional.mse_loss, CPU), batch, 0, output, 1)
    assert view.may_broadcast is expected


@pytest.mark.parametrize("shares", [None, (0.5, 1 / 3, 1 / 6)])
def test_the_loss_of_the_batch_has_a_graph_if_it_depends_on_the_outputs(shares):
    """A micro-batch alone does not tell. A loss that raises on repeated outputs is not judged."""
    shapes = []

    def of_all(output, target):
        shapes.append((output.shape, target.shape))
        target.zero_()
        return (output - target).square().mean()

    def fails(output, target):
        raise ValueError

    batch = batch_of(5, 2, shares)
    before = [target.clone() for target in batch.targets]
    state = torch.get_rng_state()
    for loss, expected in (
        (of_all, True),
        (lambda x, y: ((x * torch.rand(())).sum(), 3), True),
        (lambda x, y: (x.detach() - y).square().mean(), False),
        (lambda x, y: ((x.detach() - y).sum(), 3), False),
        (fails, True),
    ):
        with torch.no_grad():
            assert views_of(batch, 1, 0, loss)[0].has_graph() is expected
    assert shapes == [((5, 6, 2), (5, 6, 2))]
    assert all(map(torch.equal, before, batch.targets))
    assert torch.equal(torch.get_rng_state(), state)


def test_an_evaluation_that_fails_on_targets_in_host_memory_takes_those_on_the_device():
    """In later batches at once: a loss may have a tensor of its own on the device."""
    places = []

    def loss(output, target):
        is_host = target is batch.targets[0]
        places.append("host" if is_host else "device")
        if is_host:
            raise RuntimeError("on another device")
        return (output - target).square().mean()

    batch = batch_of(4, 2)
    (view,) = views_of(batch, 0, 0, loss)
    view.call._on_host = False
    assert view.target(0) is batch.targets[0]
    for _ in range(2):
        assert view.evaluation(0).terms[0].divisor == 24.0
    assert places == ["host", "device", "device"]
    assert not view.call.reads_host_targets
    assert view.target(0) is not batch.targets[0]
