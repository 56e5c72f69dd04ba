"""Random numbers of every origin: those of an independent loop, under every cut, schedule and
recompute.
"""

from __future__ import annotations

import copy
import random
import threading

import numpy as np
import pytest
import torch
from tests.conformance.reference import gradients
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.errors import StageFailed
from penstock.modules.randomness import drawing, seed_generators, stream_seed

CPU = torch.device("cpu")


class Drawing(nn.Module):
    """A layer whose forward draws in the way that it is named after."""

    def __init__(self, way):
        super().__init__()
        self.linear, self.way = nn.Linear(6, 6), way
        if way == "hook":
            self.linear.register_forward_hook(lambda _, __, output: output * (1 + torch.rand(1)))
        if way == "pre-hook":
            self.linear.register_forward_pre_hook(lambda _, args: (args[0] + torch.rand(6),))
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.5) if way == "attention" else None

    def forward(self, x):
        """Draw."""
        if self.way == "random":
            return x + self.linear(x) if random.random() < 0.5 else x
        if self.way == "numpy":
            return x * float(np.random.rand()) + self.linear(x)  # noqa: NPY002 - the generator that models use
        if self.way == "checkpoint":
            return checkpoint(self._dropped, x, use_reentrant=False)
        if self.way == "reentrant checkpoint":
            return checkpoint(self._dropped, x, use_reentrant=True)
        if self.way == "attention":
            return x + self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]
        if self.way == "sdpa":
            heads = self.linear(x)[:, None]
            return (
                x
                + functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)[:, 0]
            )
        if self.way == "distributions":
            return (
                functional.gumbel_softmax(self.linear(x))
                + torch.distributions.Normal(x, 1.0).rsample()
            )
        if self.way == "rrelu":
            return functional.rrelu(self.linear(x), training=True)
        return self.linear(x)

    def _dropped(self, x):
        return functional.dropout(torch.tanh(self.linear(x)), 0.5)


WAYS = [
    "random",
    "numpy",
    "hook",
    "pre-hook",
    "checkpoint",
    "reentrant checkpoint",
    "attention",
    "sdpa",
    "distributions",
    "rrelu",
]
#: Lengths of stages, schedule and recompute; the backward of zb-h1 is in two parts.
CASES = [
    ([2, 3], "gpipe", "always"),
    ([3, 2], "1f1b", "except_last"),
    ([2, 3], "zb-h1", "never"),
    ([2, 1, 2], "1f1b", [1, 2, 3]),
    ([1, 1, 1, 2], "interleaved", "never"),
    ([3, 2], "chimera", "never"),
]


def model_of(make):
    """A linear layer, and four layers that `make` returns, with a plain one between."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), make(), make(), nn.Linear(6, 6), make())


def batch_of(number=0):
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


def plain_gradients(model, batches=1):
    """Gradients of a plain loop over the micro-batches, every layer with its own stream, and the
    generators as they were.
    """
    generator_states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    for step in range(batches):
        x, y = batch_of(step)
        for number, (part, target) in enumerate(zip(x.chunk(4), y.chunk(4), strict=True)):
            for index, layer in enumerate(model):
                seed = stream_seed(0, step, index, number)
                random.seed(seed)
                np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002
                torch.manual_seed(seed)
                part = layer(part)  # noqa: PLW2901
            (functional.mse_loss(part, target) / 4).backward()
    random.setstate(generator_states[0])
    np.random.set_state(generator_states[1])  # noqa: NPY002
    torch.set_rng_state(generator_states[2])
    return gradients(model)


def pipeline(model, balance, schedule, recompute="never", **options):
    """The model as ranks that are threads."""
    return ps.Pipeline(
        model,
        loss=functional.mse_loss,
        balance=balance,
        schedule=schedule,
        recompute=recompute,
        micro_batches=4,
        executor="threads",
        **options,
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_that_draws_trains_as_in_a_plain_loop_under_every_schedule_and_recompute(way):
    """Numbers depend on seed, step, layer and micro-batch: not on the cut, on other threads, or on
    which run it is.
    """
    expected = plain_gradients(model_of(lambda: Drawing(way)), 2)
    random.seed(3)
    before = random.getstate(), torch.get_rng_state()
    for balance, schedule, recompute in CASES:
        if way == "reentrant checkpoint" and schedule == "zb-h1":
            continue  # torch refuses it: that checkpoint cannot be walked in parts
        model = model_of(lambda: Drawing(way))
        after = torch.get_rng_state()
        pipe = pipeline(model, balance, schedule, recompute)
        for number in range(2):
            pipe.train_batch(*batch_of(number), update=False)
        actual = gradients(model)
        assert actual.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(actual[name], grad, msg=f"{schedule} {recompute} {name}")
        assert torch.equal(torch.get_rng_state(), after)
    assert random.getstate() == before[0]


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("way", WAYS)
def test_in_a_pipe_a_layer_draws_the_same_with_threads_or_none_under_every_balance(way, mode):
    """A recompute by the layer itself, in the backward, has to meet the state that its forward met."""
    results = []
    for balance, threads in (([5], False), ([2, 3], True), ([1, 2, 2], False), ([1, 2, 2], True)):
        model = model_of(lambda: Drawing(way))
        pipe = ps.Pipe(model, balance, devices=["cpu"] * len(balance), chunks=4, checkpoint=mode)
        for number in range(2):
            torch.manual_seed(7 + number)
            functional.mse_loss(pipe(batch_of(number)[0]), batch_of(number)[1]).backward()
            for choice in pipe._engine.choices.values():
                choice.forced = threads
        results.append(
            [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]
        )
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


@pytest.mark.parametrize("way", ["checkpoint", "reentrant checkpoint"])
def test_in_a_pipe_checkpointed_dropout_drops_the_same_in_forward_and_backward(way):
    """The gradient is non-zero where the output is. It was another mask's."""

    class Dropped(nn.Module):
        def forward(self, x):
            return checkpoint(functional.dropout, x, 0.5, use_reentrant=way != "checkpoint")

    for mode in ("never", "always"):
        pipe = ps.Pipe(
            nn.Sequential(Dropped(), nn.Identity()), [1, 1], devices=2, chunks=2, checkpoint=mode
        )
        for _ in range(3):
            x = torch.ones(4, 50, requires_grad=True)
            output = pipe(x)
            output.sum().backward()
            torch.testing.assert_close(x.grad, output.detach())


class Interrupted(nn.Module):
    """Checkpointed dropout, whose second run lets another thread seed the generators, if that is
    possible.
    """

    def __init__(self):
        super().__init__()
        self.linear, self.runs = nn.Linear(6, 6), {}
        self.interruptions, self.others = [], []

    def forward(self, x):
        """Checkpointed."""
        return checkpoint(self._dropped, x, use_reentrant=False)

    def _dropped(self, x):
        h = torch.tanh(self.linear(x))
        key = round(float(x.detach().sum()), 4)
        self.runs[key] = self.runs.get(key, 0) + 1
        if self.runs[key] == 2:
            seeded, drawn = threading.Event(), threading.Event()
            other = threading.Thread(target=self._seed, args=(seeded, drawn))
            other.start()
            self.others.append(other)
            self.interruptions.append(seeded.wait(0.05))
            try:
                return functional.dropout(h, 0.5)
            finally:  # the checkpoint ends its second run by an exception
                drawn.set()
        return functional.dropout(h, 0.5)

    @staticmethod
    def _seed(seeded, drawn):
        with drawing(CPU):
            seed_generators(CPU, 99)
            seeded.set()
            drawn.wait(5)


def test_a_checkpoint_inside_a_layer_has_the_generators_for_itself_in_the_backward():
    """Ranks that are threads share torch's generator; another rank's seeding in between changed the
    mask.
    """
    model = nn.Sequential(nn.Linear(6, 6), Interrupted(), nn.Linear(6, 6))
    plain = copy.deepcopy(model)
    plain[1]._dropped = lambda x: functional.dropout(torch.tanh(plain[1].linear(x)), 0.5)
    pipe = ps.Pipeline(
        model,
        loss=functional.mse_loss,
        balance=[2, 1],
        schedule="gpipe",
        micro_batches=4,
        executor="threads",
    )
    pipe.train_batch(*batch_of())
    for other in model[1].others:
        other.join()
    assert model[1].interruptions == [False] * 4
    expected = plain_gradients(plain)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected[name])


def later_by_rate(model):
    model[1].p = 0.5


def later_by_hook(model):
    model[1].register_forward_hook(lambda _, __, output: output * (1 + torch.rand(6)))


def later_by_forward(model):
    model[1].forward = lambda x: functional.dropout(x, 0.5)


@pytest.mark.parametrize("change", [later_by_rate, later_by_hook, later_by_forward])
@pytest.mark.parametrize(
    ("schedule", "recompute"), [("gpipe", "never"), ("1f1b", "always"), ("zb-h1", [1, 2])]
)
def test_what_begins_to_draw_after_the_pipeline_was_made_has_its_stream(
    change, schedule, recompute
):
    """Whether a layer draws was asked once; a dropout that was raised from 0 later drew unseeded."""

    def build_model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0), nn.Identity(), nn.Linear(6, 6))

    model, plain = build_model(), build_model()
    pipe = pipeline(model, [2, 2], schedule, recompute)
    pipe.train_batch(*batch_of(0), update=False)
    change(model)
    pipe.train_batch(*batch_of(1), update=False)
    plain_gradients(plain)
    change(plain)
    x, y = batch_of(1)
    for number, (part, target) in enumerate(zip(x.chunk(4), y.chunk(4), strict=True)):
        for index, layer in enumerate(plain):
            torch.manual_seed(stream_seed(0, 1, index, number))
            part = layer(part)  # noqa: PLW2901
        (functional.mse_loss(part, target) / 4).backward()
    for name, grad in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], grad)


class BackwardNoise(torch.autograd.Function):
    """Noise on the gradient."""

    @staticmethod
    def forward(ctx, x):
        """Nothing."""
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        """Draw."""
        return grad * (1 + torch.rand_like(grad))


class NoisyBackward(nn.Module):
    """A layer that draws in its backward only."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        """Linear."""
        return BackwardNoise.apply(self.linear(x))


def test_numbers_that_are_drawn_in_a_backward_do_not_depend_on_the_cut():
    """They came from the generator as the last stage had left it."""
    results = []
    for balance, schedule, recompute in (([5], "gpipe", "never"), *CASES[:2], CASES[4]):
        model = model_of(NoisyBackward)
        pipe = pipeline(model, balance, schedule, recompute)
        for number in range(3):
            pipe.train_batch(*batch_of(number), update=False)
        results.append(gradients(model))
    for other in results[1:]:
        for name, grad in results[0].items():
            torch.testing.assert_close(other[name], grad)


def test_numbers_that_are_drawn_in_a_backward_of_two_parts_are_refused():
    """Nodes run in both parts and would draw other numbers in each."""
    pipe = pipeline(model_of(NoisyBackward), [2, 3], "zb-h1")
    with pytest.raises(StageFailed, match="draws random numbers in its backward"):
        pipe.train_batch(*batch_of())


def test_evaluation_draws_the_same_under_every_cut_and_anew_at_every_call():
    """Dropout in evaluation samples models; the samples must differ, and must not depend on who ran
    first.
    """

    class Sampled(nn.Module):
        def forward(self, x):
            return functional.dropout(x, 0.5)

    x, y = batch_of()
    outputs = []
    for balance in ([4], [1, 3], [2, 1, 1]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), Sampled(), Sampled(), nn.Linear(6, 6))
        pipe = pipeline(model, balance, "gpipe")
        outputs.append([float(pipe.eval_batch(x, y)) for _ in range(6)])
        assert len(set(outputs[-1])) == 6
    assert outputs[0] == outputs[1] == outputs[2]
