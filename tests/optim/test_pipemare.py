"""PipeMare: its estimate of the weights that a forward has read, and its learning rates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.errors import SettingError

#: (stage, stages, micro-batches)
PLACES = [(0, 1, 1), (0, 3, 1), (1, 4, 1), (3, 4, 1), (0, 4, 2), (1, 4, 4)]


def reference(lab, line, module, optimizer, delay, decay=0.135, annealing=100.0):
    """Run PipeMare's equations; return losses and weights."""
    versions, read, losses, summed = [lab.values_of(module)], {}, [], None
    trend = [torch.zeros_like(w) for w in versions[0]]
    fading = decay ** (1 / delay) if delay else 0
    for kind, number in line.ops:
        inputs, targets = lab.vectors(number)
        if kind == "F":
            read[number] = versions[-1]
            losses.append(
                lab.gradient(module, versions[-1], versions[-1], inputs, targets, lab.squares)[0]
            )
        elif kind == "B":
            estimate = [w - delay * d for w, d in zip(versions[-1], trend, strict=True)]
            grads = lab.gradient(module, read.pop(number), estimate, inputs, targets, lab.squares)[
                1
            ]
            summed = (
                grads if summed is None else [a + b for a, b in zip(summed, grads, strict=True)]
            )
        else:
            k = len(versions) - 1
            exponent = 1 - min(k / annealing, 1) if annealing else 0
            versions.append(
                optimizer.step(versions[-1], summed, scale=1 / max(delay, 1) ** exponent)
            )
            trend = [
                fading * d + (1 - fading) * (new - old)
                for d, new, old in zip(trend, versions[-1], versions[-2], strict=True)
            ]
            summed = None
    return losses, versions[-1]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pair", ["sgd", "momentum", "adam", "adamw"])
def test_a_stream_does_what_the_published_equations_say(lab, place, pair):
    """T1 and T2, with the program's own delay."""
    line = lab.line_of("pipemare", *place, batches=10)
    delay = float(place[1] - 1 - place[0]) / place[2]
    factory, formula = lab.PAIRS[pair]
    module = lab.mlp()
    losses, newest = reference(lab, line, module, formula(), delay)
    weights = lab.make(lab.site_of(module, line, "pipemare", factory, staleness=delay))
    assert lab.close(lab.play(module, weights, line.ops, lab.vectors, lab.squares), losses)
    weights.drain()
    assert lab.close(lab.values_of(module), newest)


@pytest.mark.parametrize("options", [{"annealing": 0.0}, {"annealing": 4.0}, {"decay": 0.5}])
def test_options_are_the_papers(lab, options):
    """Decay D and annealing K."""
    line = lab.line_of("pipemare", 0, 4, 1, batches=10)
    module = lab.mlp()
    losses, newest = reference(lab, line, module, lab.Sgd(0.02, 0.8), 3.0, **options)
    weights = lab.make(
        lab.site_of(
            module, line, "pipemare", lab.PAIRS["momentum"][0], staleness=3.0, options=options
        )
    )
    assert lab.close(lab.play(module, weights, line.ops, lab.vectors, lab.squares), losses)
    weights.drain()
    assert lab.close(lab.values_of(module), newest)


def test_in_lock_step_the_delay_is_the_papers(lab):
    """τ = (2 (P - i) + 1) / N with i from 1, for a machine that runs a forward and a backward at
    once.
    """
    for stage in range(3):
        line = lab.line_of("pipemare", stage, 3, 2, batches=6)
        module = lab.mlp()
        losses, newest = reference(
            lab, line, module, lab.Sgd(0.05), (2 * (3 - (stage + 1)) + 1) / 2
        )
        weights = lab.make(
            lab.site_of(
                module,
                line,
                "pipemare",
                lab.PAIRS["sgd"][0],
                staleness=99.0,
                options={"lockstep": 1.0},
            )
        )
        assert lab.close(lab.play(module, weights, line.ops, lab.vectors, lab.squares), losses)
        weights.drain()
        assert lab.close(lab.values_of(module), newest)


def test_an_estimate_goes_back_by_the_delay_when_weights_move_evenly(lab):
    """The purpose of the formula: once δ has converged, w - τ δ is what the forward read."""
    module = nn.Linear(2, 2).double()
    line = lab.line_of("pipemare", 0, 4, 1, batches=60)
    options = {"annealing": 0.0}
    weights = lab.make(
        lab.site_of(module, line, "pipemare", lab.PAIRS["sgd"][0], staleness=3.0, options=options)
    )
    weights_read = {}
    for kind, number in line.ops:
        if kind == "F":
            weights.before_forward(number)
            weights_read[number] = module.weight.detach().clone()
        elif kind == "B":
            weights.before_backward(number)
            weights_read[number] = (weights_read[number] - module.weight.detach()).abs().max()
            weights.finished(number)
        else:
            module.weight.grad = torch.ones(2, 2, dtype=torch.float64)
            weights.update(number)
    assert weights_read[3] > 1e-3
    assert weights_read[59] < 1e-12


def test_the_learning_rates_of_the_optimizer_are_as_they_were_after_each_update(lab):
    """Schedulers of learning rates multiply the current values."""
    module = lab.mlp()
    line = lab.line_of("pipemare", 0, 3, 1, batches=4)
    groups = lambda ps: torch.optim.SGD([{"params": ps[:2]}, {"params": ps[2:], "lr": 0.3}], lr=0.1)  # noqa: E731
    site = lab.site_of(module, line, "pipemare", groups, staleness=2.0)
    weights = lab.make(site)
    lab.play(module, weights, line.ops, lab.vectors, lab.squares)
    assert [group["lr"] for group in site.update.optimizer.param_groups] == [0.1, 0.3]

    def fail():
        raise ValueError("a step that failed")

    site.update.optimizer.step = fail
    with pytest.raises(ValueError, match="a step that failed"):
        weights.update(9)
    assert [group["lr"] for group in site.update.optimizer.param_groups] == [0.1, 0.3]


def test_each_group_is_rescheduled_from_its_learning_rate(lab):
    """Update 0 of a stage two updates late has half of it."""
    module = nn.ParameterList([torch.zeros(1), torch.zeros(1)])
    line = lab.line_of("pipemare", 0, 3, 1, batches=4)

    def groups(ps):
        return torch.optim.SGD([{"params": ps[:1]}, {"params": ps[1:], "lr": 0.5}], lr=0.25)

    weights = lab.make(lab.site_of(module, line, "pipemare", groups, staleness=2.0))
    for parameter in module:
        parameter.grad = torch.ones(1)
    weights.update(1)
    assert [parameter.item() for parameter in module] == [-0.125, -0.25]


def test_without_a_delay_there_is_nothing_to_correct_and_nothing_to_hold(lab):
    """Forward and backward of a plain stream's last stage read the same version."""
    module = lab.mlp()
    line = lab.line_of("pipemare", 3, 4, 1, batches=6)
    weights = lab.make(lab.site_of(module, line, "pipemare", lab.PAIRS["sgd"][0], staleness=0.0))
    lab.play(module, weights, line.ops, lab.vectors, lab.squares)
    assert weights.held_bytes() == sum(parameter.nbytes for parameter in module.parameters())
    weights.drain()
    assert (weights.versions, dict(weights.state()), weights.facts()) == (1, {}, {"updates": 6})


@pytest.mark.parametrize(
    ("options", "facts", "message"),
    [
        (
            {"decay": 0.0},
            {},
            r"'pipemare': decay is above 0 and below 1, not 0; the paper's is 0.135",
        ),
        ({"decay": 1.0}, {}, r"decay is above 0 and below 1, not 1"),
        ({"lockstep": 1.0}, {"stages": 0}, r"lockstep=1 needs the number of stages"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(lab, options, facts, message):
    """With a decay of 1 the trend would stay zero, and 0 has no logarithm."""
    from dataclasses import replace

    line = lab.line_of("pipemare", 0, 3, 1, batches=6)
    site = replace(
        lab.site_of(lab.mlp(), line, "pipemare", lab.PAIRS["sgd"][0], options=options), **facts
    )
    with pytest.raises(SettingError, match=message):
        lab.make(site)


def test_an_optimizer_without_a_learning_rate_is_refused(lab):
    """There is no learning rate to reschedule."""

    class Still(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self, closure=None):
            return closure

    with pytest.raises(
        SettingError,
        match=r"'pipemare' has no formula for Still: .*; it reschedules the learning rate, which this optimizer does",
    ):
        lab.make(lab.site_of(lab.mlp(), lab.line_of("pipemare", 0, 3, 1, 4), "pipemare", Still))


def evenly(weights, module, steps):
    """Run batches with a gradient of 1; return what forwards and backwards have read."""
    read = []
    for number in steps:
        weights.before_forward(number)
        forward = module.weight.item()
        weights.before_backward(number)
        read.append((forward, module.weight.item()))
        weights.finished(number)
        module.weight.grad = torch.ones_like(module.weight)
        weights.update(number + 1)
    return read


def one_weight(lab, **options):
    """Return a module with one weight, its site two updates from the end, and its weights."""
    torch.manual_seed(0)
    module = nn.Linear(1, 1, bias=False).double()
    line = lab.line_of("pipemare", 0, 3, 1, batches=8)
    factory = lambda ps: torch.optim.SGD(ps, lr=1.0)  # noqa: E731
    site = lab.site_of(module, line, "pipemare", factory, staleness=2.0, options=options)
    return module, lab.make(site)


def test_warm_up_batches_are_neither_corrected_nor_rescheduled(lab):
    """Their batches flush the pipeline; the trend is that of all updates."""
    module, weights = one_weight(lab, warm_up=2.0, annealing=4.0, decay=0.25)
    start = module.weight.item()
    read = evenly(weights, module, range(4))
    # γ = 0.25^(1/2), and update k is smaller by 2^(1 - k/4) from k = 2 on.
    changes, trend, newest = [-1.0, -1.0, -(2**-0.5), -(2**-0.25)], 0.0, start
    for number, change in enumerate(changes):
        expected = newest - 2 * trend if number >= 2 else newest
        assert read[number] == pytest.approx((newest, expected))
        newest, trend = newest + change, 0.5 * trend + 0.5 * change
    weights.drain()
    assert module.weight.item() == pytest.approx(newest)


def test_weights_that_are_loaded_after_a_drain_are_the_newest_version(lab):
    """Also where the last op was a backward, which reads an estimate."""
    module, weights = one_weight(lab)
    evenly(weights, module, range(3))
    weights.before_forward(3)
    weights.before_backward(3)
    weights.drain()
    with torch.no_grad():
        module.weight.fill_(7.0)
    weights.before_forward(0)
    assert module.weight.item() == 7
    weights.before_backward(0)
    assert module.weight.item() > 7, "against the trend"
    weights.before_forward(1)
    assert module.weight.item() == 7


def test_trend_and_number_of_updates_come_back_from_a_checkpoint(lab):
    """The continued run is bit for bit the one that was not interrupted."""
    module, weights = one_weight(lab, annealing=8.0)
    evenly(weights, module, range(3))
    weights.drain()
    other, loaded = one_weight(lab, annealing=8.0)
    other.load_state_dict(module.state_dict())
    saved = {name: [tensor.clone() for tensor in row] for name, row in weights.state().items()}
    assert list(saved) == ["trend"]
    assert saved["trend"][0].item() < 0, "the change per update, with its sign"
    assert weights.facts() == {"updates": 3}
    loaded.load_state({"trend": [tensor.float() for tensor in saved["trend"]]})
    assert loaded.state()["trend"][0].dtype == torch.float64, "that of the weights"
    loaded.load_state(saved)
    loaded.load_facts(weights.facts())
    assert evenly(loaded, other, range(3)) == evenly(weights, module, range(3))
    for empty in ({}, {"trend": [None]}):
        loaded.drain()
        loaded.load_state(empty)
        loaded.load_facts({})
        ((forward, backward),) = evenly(loaded, other, range(1))
        assert forward == backward
        assert loaded.facts() == {"updates": 1}


def test_the_trend_and_the_copy_of_the_newest_version_are_memory_of_the_rule(lab):
    """Two tensors of the size of the weights beside them, as plans count them."""
    module = lab.mlp()
    line = lab.line_of("pipemare", 0, 3, 1, batches=6)
    weights = lab.make(lab.site_of(module, line, "pipemare", lab.PAIRS["sgd"][0], staleness=2.0))
    lab.play(module, weights, line.ops, lab.vectors, lab.squares)
    assert weights.held_bytes() == 3 * sum(parameter.nbytes for parameter in module.parameters())


def test_one_parameter_group_without_a_learning_rate_is_enough_for_a_refusal(lab):
    """It could not be rescheduled as the others are."""

    def factory(parameters):
        optimizer = torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=0.1)
        del optimizer.param_groups[1]["lr"]
        return optimizer

    line = lab.line_of("pipemare", 0, 3, 1, batches=6)
    with pytest.raises(SettingError, match=r"has no formula for SGD: .*; it reschedules"):
        lab.make(lab.site_of(lab.mlp(), line, "pipemare", factory))
