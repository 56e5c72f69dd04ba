"""The references themselves: against a pipeline written in NumPy, against whole-model equations,
and against each other.
"""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from tests.conformance.asynchronous import REFERENCES, simulate
from tests.conformance.asynchronous_rules import PipeMare, PipeOptim, SpecTrain, XPipe
from torch import nn
from torch.nn import functional

WIDTH, SAMPLES, RATE = 5, 8, 0.1


def sgd(parameters):
    """Nothing is kept."""
    return torch.optim.SGD(parameters, lr=RATE)


def momentum(parameters):
    """One tensor is kept."""
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.8)


def adam(parameters):
    """Two are."""
    return torch.optim.Adam(parameters, lr=0.02)


#: What each rule is tried with here, at 4 micro-batches per batch where it takes several.
SETTINGS = {
    "spectrain": (momentum, 1, {}),
    "xpipe": (adam, 4, {}),
    "avgpipe": (momentum, 4, {"pipelines": 2}),
    "hetpipe": (momentum, 4, {"virtual_workers": 2, "in_flight": 5, "distance": 1}),
}


def mlp(layers, seed=0):
    """Linear maps and tanh in turn, the last one bare, in double precision."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pairs = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)]
        return nn.Sequential(*itertools.chain(*pairs))[:-1].double()


def data(count, seed=1):
    """Inputs, and targets of the same shape for a mean square."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randn(2, SAMPLES, WIDTH, generator=generator, dtype=torch.float64))
        for _ in range(count)
    ]


class NumpyStage:
    """A linear map and a tanh with one array for its weights, backwards by hand, and the order of
    its ops in a 1F1B stream.
    """

    def __init__(self, linear, s, p, m, total, stash):
        self.w, self.b = (tensor.detach().numpy().copy() for tensor in (linear.weight, linear.bias))
        self.last, self.m, self.stash = s == p - 1, m, stash
        self.grads, self.activations = [0.0, 0.0], {}
        warm = min(p - s, total)
        self.todo = [("F", n) for n in range(warm)]
        for n in range(total):
            self.todo += [("B", n)] + ([("F", warm + n)] if warm + n < total else [])

    def forward(self, n, x):
        """The output; what the backward needs is kept."""
        out = x @ self.w.T + self.b
        out = out if self.last else np.tanh(out)
        self.activations[n] = (x, out, self.w.copy())
        return out

    def backward(self, n, grad):
        """The gradient of the input; after the last of a batch the weights are stepped."""
        x, out, stashed = self.activations.pop(n)
        grad = grad if self.last else grad * (1 - out**2)
        self.grads = [self.grads[0] + grad.T @ x, self.grads[1] + grad.sum(0)]
        back = grad @ (stashed if self.stash else self.w)
        if (n + 1) % self.m == 0:
            self.w, self.b = self.w - RATE * self.grads[0], self.b - RATE * self.grads[1]
            self.grads = [0.0, 0.0]
        return back


def numpy_pipeline(model, batches, m, *, stash):
    """A real pipeline on one weight array per stage, played op by op in whatever order the messages
    allow.
    """
    linears = [layer for layer in model if isinstance(layer, nn.Linear)]
    p, total, size = len(linears), len(batches) * m, SAMPLES // m
    stages = [NumpyStage(linear, s, p, m, total, stash) for s, linear in enumerate(linears)]
    xs, ys = (
        [part for batch in batches for part in np.split(batch[i].numpy(), m)] for i in range(2)
    )
    ready = {("F", 0, n): xs[n] for n in range(total)}
    losses = [0.0] * len(batches)
    while any(stage.todo for stage in stages):
        for s, stage in enumerate(stages):
            if not stage.todo or (stage.todo[0][0], s, stage.todo[0][1]) not in ready:
                continue
            kind, n = stage.todo.pop(0)
            value = ready.pop((kind, s, n))
            if kind == "B":
                ready["B", s - 1, n] = stage.backward(n, value)
            elif s < p - 1:
                ready["F", s + 1, n] = stage.forward(n, value)
            else:
                error = stage.forward(n, value) - ys[n]
                losses[n // m] += (error**2).mean() / m
                ready["B", s, n] = 2 * error / error.size / m
    assert size * m == SAMPLES
    return losses, [array for stage in stages for array in (stage.w, stage.b)]


@pytest.mark.parametrize(("p", "m"), [(2, 1), (3, 1), (4, 1), (3, 2), (4, 2), (4, 4), (5, 2)])
@pytest.mark.parametrize("rule", ["none", "stash"])
def test_references_equal_a_pipeline_with_one_array_per_stage_and_backwards_by_hand(rule, p, m):
    """The references run batch after batch and derive what was read; here ops really overtake each
    other. It also shows that autograd, given other weights between forward and backward, takes the
    forward's activations and the backward's weights.
    """
    model, batches = mlp(p), data(12)
    lengths = [2] * (p - 1) + [1]
    losses, state = simulate(rule, model, lengths, sgd, functional.mse_loss, batches, m)
    expected, arrays = numpy_pipeline(model, batches, m, stash=rule == "stash")
    np.testing.assert_allclose(torch.stack(losses).numpy(), expected, rtol=1e-12)
    for tensor, array in zip(state.values(), arrays, strict=True):
        np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("rule", ["stash", "none"])
def test_with_stashing_or_without_makes_a_difference_from_the_first_stale_batch_on(rule):
    """Otherwise the comparison above would show nothing."""
    other = {"stash": "none", "none": "stash"}[rule]
    first, second = (
        simulate(r, mlp(3), [2, 2, 1], sgd, functional.mse_loss, data(6), 1)[1]
        for r in (rule, other)
    )
    assert max((first[key] - second[key]).abs().max() for key in first) > 1e-4


@pytest.mark.parametrize(("rule", "p", "m", "delay"), [
    ("vertical-sync", 2, 1, 1), ("vertical-sync", 3, 1, 2), ("vertical-sync", 4, 1, 3), ("double-buffer", 2, 2, 1),
    ("double-buffer", 4, 4, 1), ("double-buffer", 3, 4, 1),
])  # fmt: skip
@pytest.mark.parametrize("optimizer", [sgd, momentum, adam])
def test_rules_with_one_version_per_batch_are_descent_on_delayed_weights(
    rule, p, m, delay, optimizer
):
    """W(t+1) = W(t) - lr grad(W(t - delay)): the papers' own words, on the whole model, without
    stages.
    """
    model, batches = mlp(4), data(15)
    lengths = {2: [3, 4], 3: [1, 4, 2], 4: [2, 1, 2, 2]}[p]
    losses, state = simulate(rule, model, lengths, optimizer, functional.mse_loss, batches, m)
    newest = copy.deepcopy(model)
    stepper = optimizer(list(newest.parameters()))
    history = [copy.deepcopy(newest)]
    for t, (x, y) in enumerate(batches):
        read = history[max(t - delay, 0)]
        read.zero_grad()
        loss = functional.mse_loss(read(x), y)
        loss.backward()
        torch.testing.assert_close(losses[t], loss.detach(), rtol=1e-12, atol=0)
        for parameter, other in zip(newest.parameters(), read.parameters(), strict=True):
            parameter.grad = other.grad.clone()
        stepper.step()
        history.append(copy.deepcopy(newest))
    torch.testing.assert_close(state, dict(newest.state_dict()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("rule", "m"),
    [
        ("spectrain", 1),
        *itertools.product(
            ["stash", "vertical-sync", "none", "pipeoptim", "pipemare", "hetpipe"], [1, 4]
        ),
    ],
)
def test_on_one_stage_every_rule_without_a_delay_of_its_own_is_plain_training(rule, m):
    """Nothing is in flight, so nothing is stale, ahead or apart."""
    options = {"virtual_workers": 1, "in_flight": 1, "distance": 1} if rule == "hetpipe" else {}
    simulated = simulate(rule, mlp(3), [5], momentum, functional.mse_loss, data(10), m, **options)
    plain = simulate("flush", mlp(3), [5], momentum, functional.mse_loss, data(10), m)
    torch.testing.assert_close(simulated, plain, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "rule", [rule for rule in REFERENCES if rule not in ("avgpipe", "hetpipe")]
)
def test_with_a_drain_after_every_batch_no_rule_that_predicts_nothing_differs_from_plain_training(
    rule,
):
    """Staleness is counted from the drain on. Predictions look ahead for updates that do not come,
    and so do corrections back.
    """
    optimizer, m, options = SETTINGS.get(rule, (momentum, 4, {}))
    args = (mlp(4), [2, 1, 2, 2], optimizer, functional.mse_loss, data(8), m)
    simulated, plain = simulate(rule, *args, drains=range(8), **options), simulate("flush", *args)
    same = torch.allclose(torch.stack(simulated[0]), torch.stack(plain[0]), rtol=1e-9)
    assert same == (rule not in ("spectrain", "xpipe", "pipeoptim", "pipemare"))


def test_any_two_rules_differ_by_far_more_than_the_tolerance_of_the_comparison():
    """A runtime that mixed two rules up would not pass by chance."""
    states = {}
    for rule in REFERENCES:
        optimizer, m, options = SETTINGS.get(rule, (momentum, 4, {}))
        states[rule] = torch.stack(
            simulate(
                rule, mlp(4), [2, 1, 2, 2], optimizer, functional.mse_loss, data(20), m, **options
            )[0]
        )
    for (one, a), (other, b) in itertools.combinations(states.items(), 2):
        assert (a - b).abs().max() > 1e-5, (one, other)


class Shift(nn.Module):
    """Adds its weights: the gradient of a linear loss with respect to them is always the same."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x):
        """Run the layer."""
        return x + self.by


def slope(out, y):
    """A loss that is linear in the output."""
    return (out * y).mean()


def steady(count):
    """The same batch again and again."""
    return data(1) * count


@pytest.mark.parametrize("optimizer", [sgd, momentum, adam])
@pytest.mark.parametrize("m", [1, 2])
def test_where_steps_repeat_themselves_pipeoptim_forwards_on_the_very_weights_that_its_backward_finds(
    optimizer, m
):
    """What the prediction is for: W(t - gap) - gap lr dW is W(t) if dW is the same in every step."""
    line = PipeOptim([nn.Sequential(Shift()) for _ in range(4)], optimizer, slope, m)
    for x, y in steady(60):
        line.batch(x, y)
    for s, j in itertools.product(range(4), range(m)):
        forward, backward = line.reads(s, 60, j)
        torch.testing.assert_close(forward, backward, rtol=1e-4, atol=1e-4)


def test_where_steps_repeat_themselves_pipemare_backwards_on_the_very_weights_that_its_forward_found():
    """What the correction is for: delta becomes one step, and W(t) - tau delta is W(t - tau)."""
    line = PipeMare([nn.Sequential(Shift()) for _ in range(4)], sgd, slope, 1, annealing=0)
    for x, y in steady(60):
        line.batch(x, y)
    assert line.tau == [3, 2, 1, 0]
    for s in range(4):
        forward, backward = line.reads(s, 60, 0)
        torch.testing.assert_close(forward, backward, rtol=1e-6, atol=1e-9)


def test_where_steps_repeat_themselves_spectrain_reads_on_each_stage_what_it_has_when_the_batch_comes_back():
    """Stage k ends its part of a batch's round trip k // 2 updates of its own after its backward
    began.
    """
    line = SpecTrain([nn.Sequential(Shift()) for _ in range(4)], momentum, slope, 1)
    for x, y in steady(100):
        line.batch(x, y)
    for s in range(4):
        forward, backward = line.reads(s, 90, 0)
        torch.testing.assert_close(backward, line.weights[s][90 + s // 2], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            forward, line.weights[s][90 - (3 - s) + (s // 2 + 3 - s)], rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize(("count", "distance"), [(12, 0), (12, 1), (17, 0), (17, 2), (19, 5)])
def test_hetpipe_counts_every_update_of_every_virtual_worker_once(count, distance):
    """However far apart they run, and wherever the last wave ends, nothing is lost or counted
    twice.
    """
    model = nn.Sequential(Shift(), Shift(), Shift())
    options = {"virtual_workers": 3, "in_flight": 2, "distance": distance}
    _, state = simulate("hetpipe", model, [1, 1, 1], sgd, slope, steady(count), 1, **options)
    x, y = steady(1)[0]
    assert x.shape == y.shape
    whole = -RATE * count * y.mean(0) / WIDTH
    for tensor in state.values():
        torch.testing.assert_close(tensor, whole, rtol=1e-10, atol=1e-12)


def test_hetpipe_with_one_virtual_worker_is_pipedream():
    """There are no other copies."""
    args = (mlp(4), [2, 1, 2, 2], momentum, functional.mse_loss, data(10), 1)
    options = {"virtual_workers": 1, "in_flight": 4, "distance": 0}
    torch.testing.assert_close(simulate("hetpipe", *args, **options), simulate("stash", *args))


@pytest.mark.parametrize(("count", "pipelines"), [(12, 2), (12, 3), (13, 2)])
def test_avgpipes_reference_moves_by_the_mean_of_what_its_copies_do(count, pipelines):
    """With equal gradients each round of N batches moves it by one step; the pull leaves the steps
    as they are.
    """
    _, state = simulate(
        "avgpipe",
        nn.Sequential(Shift(), Shift()),
        [1, 1],
        sgd,
        slope,
        steady(count),
        1,
        pipelines=pipelines,
    )
    whole = -RATE * count / pipelines * steady(1)[0][1].mean(0) / WIDTH
    for tensor in state.values():
        torch.testing.assert_close(tensor, whole, rtol=1e-10, atol=1e-12)


def test_distances_and_gaps_are_those_of_the_papers_tables():
    """docs/literature/spectrain.md and docs/literature/xpipe.md: N = 4 has s_fwd 3, 2, 2, 1 and s_bwd 0, 0, 1, 1; XPipe's at D = 4 and T
    = 1, 2, 4, at D = T = 8.
    """

    class Looking:
        """Notes how far ahead is asked for."""

        def predicted(self, s, v, ahead, direction):
            """In place of weights."""
            return ahead

    class Spec(Looking, SpecTrain):
        """With its own distances."""

    class Cross(Looking, XPipe):
        """With its own distances."""

    def ahead(of, p, m):
        line = of([nn.Sequential(nn.Linear(1, 1)) for _ in range(p)], sgd, slope, m)
        return [line.reads(s, 9, 0) for s in range(p)]

    assert ahead(Spec, 4, 1) == [(3, 0), (2, 0), (2, 1), (1, 1)]
    assert [[forward for forward, _ in ahead(Cross, *sizes)] for sizes in ((4, 1), (4, 2), (4, 4), (8, 8))] == [
        [3, 2, 2, 2], [2, 2, 2, 1], [2, 1, 1, 1], [2, 2, 2, 2, 2, 1, 1, 1]]  # fmt: skip
    assert math.isclose(sum(PipeMare([nn.Linear(1, 1) for _ in range(5)], sgd, slope, 2).tau), 5)
