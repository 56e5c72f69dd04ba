"""Random numbers of the layers of a stage: their streams, and which layers are seeded: those whose
code may draw, as it is at the beginning of a batch.
"""

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

import penstock as ps
from penstock.errors import RunError
from penstock.modules import randomness
from penstock.stage.stage_random import Place


def test_a_stream_depends_on_seed_step_layer_and_micro_batch_alone():
    """Not on the cut, the order, other layers or the state of the generator, which stays as it
    was; in evaluation, also on the number of the evaluation at this step.
    """
    draws, parts = draws_of(nn.Identity(), Noise(), Noise(), first=4)
    alone, (part,) = draws_of(Noise(), first=6)
    x = torch.zeros(3)
    for step in range(4):
        for training in (True, False):
            for evaluation in range(1 if training else 3):
                batch = batch_of(step, training=training)
                tail = () if training else (1, evaluation)
                for number in (1, 0):
                    torch.manual_seed(step)
                    before = torch.get_rng_state()
                    result = forward(draws, parts, batch, number, x)
                    assert torch.equal(torch.get_rng_state(), before)
                    first, second = (
                        seeded(lambda: torch.rand(3), step, index, number, *tail)
                        for index in (5, 6)
                    )
                    assert torch.equal(result, x + first + second)
                    assert torch.equal(forward(alone, [part], batch, number, first), first + second)


def test_a_second_run_of_a_layer_draws_the_numbers_of_the_first():
    """In a backward, after others have drawn; the generators are as before then."""
    draws, parts = draws_of(nn.Linear(3, 3), nn.Dropout(0.5), Noise())
    x = torch.ones(3)
    for step in range(3):
        batch = batch_of(step)
        results = [forward(draws, parts, batch, number, x) for number in range(2)]
        torch.rand(step + 1)
        before = torch.get_rng_state()
        for number in (1, 0):
            again = forward(draws, parts, batch, number, x, again=True)
            assert torch.equal(again, results[number])
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("modules", "training", "evaluation"),
    [
        ([nn.Linear(3, 3), nn.ReLU()], False, False),
        ([nn.Linear(3, 3), nn.Dropout(0.5)], True, False),
        ([nn.Dropout(0.5), nn.Linear(3, 3)], True, False),
        ([nn.Dropout(0.0)], False, False),
    ],
)
def test_only_stages_whose_layers_may_draw_need_the_generators(modules, training, evaluation):
    """Of torch's own layers that is known; in evaluation they draw nothing."""
    draws, _ = draws_of(*modules)
    for step in range(3):
        for number in range(2):
            batch = batch_of(step, count=2)
            assert draws.begin(batch) is training, number
            assert draws.needed is training
        for prepared in (False, True):
            batch = batch_of(step, training=False)
            if prepared:
                draws.prepare(batch)
            assert draws.begin(batch) is evaluation
        assert not draws.watches_backward


def test_settings_are_read_at_the_beginning_of_a_batch():
    """A rate may rise between two batches, and a hook may be registered; within a batch nothing
    is read again.
    """
    dropout, linear = nn.Dropout(0.0), nn.Linear(3, 3)
    draws, _ = draws_of(dropout, linear)
    batch = batch_of(0)
    assert not draws.begin(batch)
    dropout.p = 0.5
    assert not draws.begin(batch)
    assert draws.begin(batch_of(1))
    dropout.p = 0.0
    assert not draws.begin(batch_of(2))
    handle = linear.register_forward_hook(lambda module, inputs, output: output + torch.rand(3))
    assert draws.begin(batch_of(3))
    handle.remove()
    assert not draws.begin(batch_of(4))


def observed(draws, step, *, training=True, count=3):
    """Return for each micro-batch of a batch whether its forward is observed."""
    batch = batch_of(step, training=training, count=count)
    return [draws.begin(batch) for _ in range(count)]


def test_layers_of_the_user_are_observed_in_batches_1_2_4_8():
    """All micro-batches of the first and one of each other; training and evaluation count apart,
    and both again when a setting of the layers changes. A number may change: the proof that the
    code draws nothing holds for all.
    """
    module = Quiet()
    draws, _ = draws_of(nn.Linear(3, 3), module)
    all_of, one, none = [True] * 3, [True, False, False], [False] * 3
    expected = [all_of, one, none, one, none, none, none, one, none]
    assert [observed(draws, step) for step in range(9)] == expected
    assert [observed(draws, 9, training=False) for _ in range(9)] == expected
    module.rate = 0.5
    handle = module.register_forward_hook(lambda *_: None)
    handle.remove()
    assert observed(draws, 12) == none
    draws._parts[0].module.p = 0.5
    assert [observed(draws, step) for step in range(3)] == expected[:3]


class Rare(nn.Module):
    """A layer that draws in some calls."""

    def __init__(self):
        super().__init__()
        self.draws_now, self.rate = [True], 0.0

    def forward(self, x):
        """Add random numbers, if it draws."""
        return x + torch.rand(3) if self.draws_now[0] else x * 1


def test_layers_without_a_proof_are_observed_again_when_a_number_in_them_changes():
    """It may be the rate of a dropout, raised from 0."""
    module = Rare()
    draws, _ = draws_of(nn.Linear(3, 3), module)
    expected = [[True] * 3, [True, False, False], [False] * 3]
    assert [observed(draws, 9, training=False) for _ in range(3)] == expected
    module.rate = 0.25
    assert [observed(draws, 9, training=False) for _ in range(3)] == expected


def test_a_forward_is_planned_before_its_input_is_there_unless_it_is_observed():
    """What is observed in one forward decides about the next one."""
    draws, _ = draws_of(nn.Linear(3, 3), Quiet())
    for step, expected in enumerate([[True] * 3, [True, False, False], [False] * 3]):
        batch = batch_of(step, training=True, count=3)
        draws.prepare(batch)
        assert [draws.begin(batch) for _ in range(3)] == expected


def test_a_layer_that_has_drawn_once_is_seeded_ever_after():
    """Also when other settings of the layers change, and the count of observed batches begins
    again.
    """
    rare, dropout = Rare(), nn.Dropout(0.0).eval()
    draws, parts = draws_of(rare, dropout)
    x = torch.zeros(3)

    def evaluated(step):
        torch.manual_seed(step)
        return forward(draws, parts, batch_of(step, training=False, count=1), 0, x)

    evaluated(0)
    rare.draws_now[0] = False
    dropout.p = 0.5
    evaluated(1)
    evaluated(2)
    rare.draws_now[0] = True
    expected = seeded(lambda: torch.rand(3), 3, 0, 0, 1, 0)
    assert torch.equal(evaluated(3), expected)


class Drawing(torch.Tensor):
    """A tensor whose functions draw from torch's generator."""

    draw = staticmethod(lambda: torch.rand(3))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """Add a random number to what the function returns."""
        values = [arg.as_subclass(torch.Tensor) if type(arg) is cls else arg for arg in args]
        return function(*values, **(kwargs or {})) + cls.draw()


class DrawingOnHost(Drawing):
    """A tensor whose functions draw from Python's generator."""

    draw = staticmethod(python_number)


@pytest.mark.parametrize(("kind", "seeds"), [(Drawing, seeded), (DrawingOnHost, host_number)])
def test_a_layer_that_was_seen_to_draw_is_seeded_although_its_code_draws_nothing(kind, seeds):
    """The proof assumes plain tensors. It is so also after other layers have changed. Batch 3 after
    the first and after a change is not observed.
    """
    dropout = nn.Dropout(0.0).eval()
    draws, parts = draws_of(Quiet(), dropout)

    def trained(step, value):
        batch = batch_of(step, count=1)
        draws.begin(batch)
        with draws.running():
            return draws.call(parts[0], Place(batch, 0), parts[0].module, value)

    plain, drawing = torch.zeros(3), torch.zeros(3).as_subclass(kind)
    for first in (0, 4):
        trained(first, plain if first else drawing)
        trained(first + 1, plain)
        expected = torch.zeros(3) + seeds(kind.draw, first + 2, 0, 0)
        torch.manual_seed(first)
        random.seed(first)
        assert torch.equal(trained(first + 2, drawing), expected)
        dropout.p = 0.5


@pytest.mark.parametrize(("kind", "seeds"), [(Drawing, seeded), (DrawingOnHost, host_number)])
def test_draws_in_an_evaluation_leave_those_of_training_seeded(kind, seeds):
    """What is observed in one mode adds to what is known, and takes nothing away."""
    draws, (part,) = draws_of(Quiet())
    drawing = torch.zeros(3).as_subclass(kind)

    def run(step, value, *, training=True):
        batch = batch_of(step, training=training, count=1)
        draws.begin(batch)
        with draws.running():
            return draws.call(part, Place(batch, 0), part.module, value)

    run(0, drawing)
    run(0, drawing, training=False)
    run(1, torch.zeros(3))
    expected = torch.zeros(3) + seeds(kind.draw, 2, 0, 0)
    assert torch.equal(run(2, drawing), expected)


@pytest.mark.parametrize("kind", [Drawing, DrawingOnHost])
def test_a_layer_that_draws_in_evaluation_alone_needs_no_generators_in_training(kind):
    """Batch 3 is not observed, and nothing says that it may draw."""
    draws, (part,) = draws_of(Quiet())
    for training in (True, False, True):
        batch = batch_of(training=training, count=1)
        value = torch.zeros(3) if training else torch.zeros(3).as_subclass(kind)
        draws.begin(batch)
        with draws.running():
            draws.call(part, Place(batch, 0), part.module, value)
    assert not draws.begin(batch_of(2, count=1))


def test_layers_that_are_compiled_as_one_function_must_not_begin_to_draw():
    """They cannot be seeded one by one; the message names them."""
    whole = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0))
    draws, _ = draws_of(whole, joined={0: "a + b"}, compiled=True)
    assert not draws.begin(batch_of(0))
    whole[1].p = 0.5
    with pytest.raises(RunError, match=r"^layers a \+ b are compiled as one function, because"):
        draws.begin(batch_of(1))
    draws, _ = draws_of(whole, joined={1: "a + b"})
    assert draws.begin(batch_of(0))


def transform(value: torch.Tensor) -> torch.Tensor:
    """Draw nothing."""
    return torch.relu(value)


def noisy(value: torch.Tensor) -> torch.Tensor:
    """Draw."""
    return value + torch.randn_like(value)


class Calling(nn.Module):
    """A layer that calls the function above."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Call the function that the name has now."""
        return transform(self.linear(value))


def losses_of(balance: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return the losses of three batches; the function draws from the third on."""
    torch.manual_seed(0)
    pipe = ps.Pipeline(
        nn.Sequential(Calling(), Calling()),
        balance=balance,
        schedule="gpipe",
        micro_batches=2,
        loss=nn.functional.mse_loss,
        executor="threads",
        device="cpu",
    )
    x = torch.randn(4, 4)
    losses = [pipe.train_batch(x, x) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "transform", noisy)
        # Random numbers come from the pipeline's seed, not from the state of torch's generator.
        torch.manual_seed(len(balance))
        losses.append(pipe.train_batch(x, x))
    return losses


def test_a_layer_is_seeded_from_the_batch_on_in_which_its_code_may_draw(monkeypatch):
    """Batch 3 is not observed: only the proof of the layer's code shows that it draws now."""
    whole, cut = losses_of((2,), monkeypatch), losses_of((1, 1), monkeypatch)
    assert whole[1] != whole[2]
    assert whole == cut


class DrawingOnDevice(nn.Module):
    """A layer that draws from the device's generator, in evaluation too."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.draw = lambda value: torch.randn(value.shape, generator=generator)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Add noise."""
        return self.linear(value) + self.draw(value)


def test_draws_from_a_device_s_generator_are_seeded_in_evaluation(monkeypatch):
    """Batch 3 is not observed: that the layers draw was seen on the generator in batches 1 and 2."""
    generator = torch.Generator()
    generators = [torch.default_generator, generator]
    monkeypatch.setattr(randomness, "_generators", lambda device: generators)
    results = []
    for balance in ((2,), (1, 1)):
        torch.manual_seed(0)
        pipe = ps.Pipeline(
            nn.Sequential(DrawingOnDevice(generator), DrawingOnDevice(generator)),
            balance=balance,
            schedule="gpipe",
            micro_batches=2,
            loss=nn.functional.mse_loss,
            executor="threads",
            device="cpu",
        )
        x = torch.randn(4, 4)
        generator.manual_seed(len(balance))
        results.append([pipe.eval_batch(x, x) for _ in range(3)])
    assert results[0] == results[1]


@pytest.mark.parametrize("prepared", [False, True])
def test_a_batch_that_is_prepared_before_its_first_forward_is_begun_once(prepared):
    """All micro-batches of the first batch are observed, and one of batches 2 and 4."""
    draws, parts = draws_of(Quiet())
    observed = []
    for step in range(5):
        batch = batch_of(step)
        if prepared:
            draws.prepare(batch)
            draws.prepare(batch)
        for number in range(2):
            forward(draws, parts, batch, number, torch.ones(3))
            observed.append(draws.needed)
    assert observed == [True, True, True, False, False, False, True, False, False, False]
