"""Elastic averaging: copies of the weights that take turns and are pulled towards a reference."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.optim.stashed_modules import Reassigning
from torch import nn

from penstock.errors import RunError, SettingError


def reference(lab, line, module, optimizers):
    """Run AvgPipe's equations literally; return losses, the reference and the copies."""
    n_copies = line.pipelines
    center = lab.values_of(module)
    copies = [[w.clone() for w in center] for _ in range(n_copies)]
    read, losses, summed, learnt = {}, [], [None] * n_copies, []
    for kind, number in line.ops:
        inputs, targets = lab.vectors(number)
        n = (number - 1 if kind == "U" else number // line.micro_batches) % n_copies
        if kind == "F":
            read[number] = copies[n]
            losses.append(
                lab.gradient(module, copies[n], copies[n], inputs, targets, lab.squares)[0]
            )
        elif kind == "B":
            assert read[number] is copies[n]
            grads = lab.gradient(module, copies[n], copies[n], inputs, targets, lab.squares)[1]
            summed[n] = (
                grads
                if summed[n] is None
                else [a + b for a, b in zip(summed[n], grads, strict=True)]
            )
        else:
            stepped = optimizers[n].step(copies[n], summed[n])
            learnt.append([new - old for new, old in zip(stepped, copies[n], strict=True)])
            copies[n] = [
                (1 - 1 / n_copies) * w + 1 / n_copies * c
                for w, c in zip(stepped, center, strict=True)
            ]
            summed[n] = None
            if len(learnt) == n_copies:
                center, learnt = moved(center, learnt, n_copies), []
    return losses, moved(center, learnt, n_copies), copies


def moved(center, learnt, n_copies):
    """θ̃ + (1/N) Σ Δ."""
    return [c + sum(changes[i] for changes in learnt) / n_copies for i, c in enumerate(center)]


@pytest.mark.parametrize(
    ("place", "pipelines"),
    [((0, 2, 1), 2), ((0, 2, 1), 3), ((1, 3, 2), 2), ((2, 3, 1), 4), ((0, 3, 4), 2)],
)
@pytest.mark.parametrize("pair", ["sgd", "momentum", "adam", "adamw"])
@pytest.mark.parametrize("batches", [8, 9])
def test_a_stream_does_what_the_published_equations_say(lab, place, pipelines, pair, batches):
    """Whole rounds, and a drain within a round: the reference moves by the changes so far."""
    line = lab.line_of("avgpipe", *place, batches=batches, pipelines=pipelines)
    factory, formula = lab.PAIRS[pair]
    module = lab.mlp()
    losses, center, copies = reference(lab, line, module, [formula() for _ in range(pipelines)])
    weights = lab.make(lab.site_of(module, line, "avgpipe", factory))
    assert lab.close(lab.play(module, weights, line.ops, lab.vectors, lab.squares), losses)
    weights.drain()
    assert lab.close(lab.values_of(module), center)
    for n, values in enumerate(copies):
        assert lab.close(weights.state()[f"copy{n}"], values)


def test_gradients_of_batches_that_overlap_do_not_mix(lab):
    """With several micro-batches per batch, the next copy's backwards may begin before this copy's
    update.
    """
    module = nn.Linear(2, 2).double()
    line = lab.line_of("avgpipe", 0, 1, 2, batches=4, pipelines=2)
    weights = lab.make(lab.site_of(module, line, "avgpipe", lab.PAIRS["sgd"][0]))
    start = module.weight.detach().clone()
    for number in range(4):
        weights.before_forward(number)

    def backward(number, value):
        weights.before_backward(number)
        added = torch.full((2, 2), value, dtype=torch.float64)
        module.weight.grad = added if module.weight.grad is None else module.weight.grad + added
        weights.finished(number)

    backward(0, 1.0)
    backward(2, 10.0)
    weights.before_backward(3)
    backward(1, 2.0)
    weights.update(1)
    backward(3, 20.0)
    weights.update(2)
    weights.drain()
    assert torch.allclose(weights.state()["copy0"][0], start - 0.05 * 3 * 0.5)
    assert torch.allclose(weights.state()["copy1"][0], start - 0.05 * 30 * 0.5)
    assert torch.allclose(module.weight.data, start - 0.05 * 33 / 2)


def test_gradients_that_were_put_aside_are_used_once(lab):
    """The next batch of the copy begins with none."""
    module = nn.Linear(2, 2, bias=False).double()
    line = lab.line_of("avgpipe", 0, 1, 2, batches=4, pipelines=2)
    weights = lab.make(lab.site_of(module, line, "avgpipe", lab.PAIRS["sgd"][0]))
    for number in (0, 2, 1):
        run_batch(weights, module, number, 1.0)
    assert module.weight.grad.tolist() == [[2.0, 2.0]] * 2
    weights.update(1)
    run_batch(weights, module, 3, 1.0)
    assert module.weight.grad.tolist() == [[2.0, 2.0]] * 2
    weights.update(2)
    run_batch(weights, module, 4, 1.0)
    assert module.weight.grad.tolist() == [[1.0, 1.0]] * 2


def test_a_scheduler_that_knows_the_first_optimizer_sets_the_learning_rate_of_all(lab):
    """Users see one optimizer per stage."""
    module = nn.Linear(2, 2).double()
    line = lab.line_of("avgpipe", 0, 1, 1, batches=4, pipelines=2)
    site = lab.site_of(module, line, "avgpipe", lab.PAIRS["sgd"][0])
    weights = lab.make(site)
    start = module.weight.detach().clone()
    site.update.optimizer.param_groups[0]["lr"] = 0.5
    for number in range(2):
        weights.before_forward(number)
        weights.before_backward(number)
        module.weight.grad = torch.ones(2, 2, dtype=torch.float64)
        weights.finished(number)
        weights.update(number + 1)
    weights.drain()
    assert torch.allclose(module.weight.data, start - 0.5)
    site.update.optimizer.param_groups[0].update(weight_decay=0.25, maximize=True)
    for number in range(2):
        run_batch(weights, module, number, 0.0)
        weights.update(number + 1)
    groups = [optimizer.param_groups[0] for optimizer in weights.more_optimizers()]
    assert [(g["lr"], g["weight_decay"], g["maximize"]) for g in groups] == [(0.5, 0.25, True)]
    assert groups[0]["params"] == [module.weight, module.bias]


def test_memory_is_the_copies_their_reference_and_the_sum_of_the_round(lab):
    """N versions, or one before the first forward."""
    module = lab.mlp()
    size = sum(parameter.nbytes for parameter in module.parameters())
    line = lab.line_of("avgpipe", 0, 2, 1, batches=4, pipelines=3)
    weights = lab.make(lab.site_of(module, line, "avgpipe", lab.PAIRS["momentum"][0]))
    assert (weights.versions, weights.held_bytes(), weights.state()) == (1, size, {})
    lab.play(module, weights, line.ops, lab.vectors, lab.squares)
    assert (weights.versions, weights.peak_versions, weights.held_bytes()) == (3, 3, 5 * size)


def test_layers_that_save_weights_as_they_are_find_their_own_copy(lab):
    """A convolution in flight on one copy must not read another copy's weights, nor its own after
    an update.
    """
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 1, 3)).double()
    data = lambda n: (  # noqa: E731
        torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(n), dtype=torch.float64),
        torch.ones(1),
    )
    line = lab.line_of("avgpipe", 0, 2, 1, batches=6, pipelines=2)
    weights = lab.make(lab.site_of(module, line, "avgpipe", lab.PAIRS["momentum"][0]))
    read, gradients = {}, {}
    original = weights.before_forward

    def remember(number):
        original(number)
        read[number] = lab.values_of(module)

    weights.before_forward = remember
    lab.play(module, weights, line.ops, data, lab.squares, gradients.__setitem__)
    for number, grads in gradients.items():
        expected = lab.gradient(module, read[number], read[number], *data(number), lab.squares)[1]
        assert all(map(torch.equal, grads, expected))


def test_a_copy_that_is_updated_between_a_forward_and_its_backward_is_refused(lab):
    """Elastic averaging has no stale gradients, so there are too few copies for the batches in
    flight.
    """
    module = lab.mlp()
    line = lab.line_of("avgpipe", 0, 4, 1, batches=8, pipelines=2)
    weights = lab.make(lab.site_of(module, line, "avgpipe", lab.PAIRS["sgd"][0]))
    message = r"stage 0: the forward of micro-batch 2 reads version 0 of its copy of the weights and its backward version 1: elastic"
    with pytest.raises(RunError, match=message):
        lab.play(module, weights, line.ops, lab.vectors, lab.squares)


def test_a_schedule_with_one_pipeline_is_refused(lab):
    """With one copy there is nothing to average."""
    with pytest.raises(
        SettingError,
        match=r"'avgpipe' averages several copies of the weights, and this schedule has 1: give it pipelines=2",
    ):
        lab.make(
            lab.site_of(
                lab.mlp(), lab.line_of("avgpipe", 0, 1, 1, 4), "avgpipe", lab.PAIRS["sgd"][0]
            )
        )


def run_batch(weights, module, number, value):
    """Forward and backward of a micro-batch whose gradient is `value` everywhere."""
    weights.before_forward(number)
    weights.before_backward(number)
    added = torch.full((2, 2), value, dtype=torch.float64)
    module.weight.grad = added if module.weight.grad is None else module.weight.grad + added
    weights.finished(number)


def test_a_drain_forgets_gradients_that_were_put_aside(lab):
    """Those of a stream that failed: the next one begins with what the user has set."""
    module = nn.Linear(2, 2, bias=False).double()
    line = lab.line_of("avgpipe", 0, 1, 2, batches=4, pipelines=2)
    site = lab.site_of(module, line, "avgpipe", lab.PAIRS["sgd"][0])
    weights = lab.make(site)
    start = module.weight.detach().clone()
    run_batch(weights, module, 0, 100.0)
    run_batch(weights, module, 2, 200.0)
    weights.drain()
    site.update.zero()
    module.weight.grad = torch.full((2, 2), 4.0, dtype=torch.float64)
    for number in (0, 1):
        run_batch(weights, module, number, 1.0)
    weights.update(1)
    weights.drain()
    assert torch.allclose(module.weight.data, start - 0.05 * (4 + 2) / 2)


def test_a_checkpoint_without_copies_begins_all_of_them_at_the_reference(lab):
    """Also between two rounds, when the copies have moved and the sum of changes is 0."""
    module = nn.Linear(2, 2, bias=False).double()
    line = lab.line_of("avgpipe", 0, 1, 1, batches=4, pipelines=2)
    weights = lab.make(lab.site_of(module, line, "avgpipe", lab.PAIRS["momentum"][0]))
    for number, value in enumerate((1.0, 5.0)):
        run_batch(weights, module, number, value)
        weights.update(number + 1)
    weights.drain()
    reference = module.weight.detach().clone()
    assert not torch.equal(weights.state()["copy1"][0], reference)
    weights.load_state({})
    for name in ("copy0", "copy1"):
        assert torch.equal(weights.state()[name][0], reference)
    assert [key for key in weights.state() if key.startswith("optimizer")] == []


def test_a_step_that_fails_leaves_the_changes_of_the_round_as_they_were(lab):
    """The weights before it would otherwise count as a change, with the wrong sign."""
    module = nn.Linear(2, 2, bias=False).double()
    line = lab.line_of("avgpipe", 0, 1, 1, batches=4, pipelines=2)
    site = lab.site_of(module, line, "avgpipe", lab.PAIRS["sgd"][0])
    weights = lab.make(site)
    start = module.weight.detach().clone()
    run_batch(weights, module, 0, 1.0)
    weights.update(1)
    run_batch(weights, module, 1, 1.0)
    other = weights.more_optimizers()[0]
    other.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError))
    with pytest.raises(KeyError):
        weights.update(2)
    weights.drain()
    assert torch.allclose(module.weight.data, start - 0.05 / 2)


def test_after_an_update_of_one_copy_the_next_op_of_another_finds_its_own(lab):
    """The update comes between the forward of the other copy and its backward."""
    module = nn.Linear(2, 2, bias=False).double()
    line = lab.line_of("avgpipe", 0, 1, 1, batches=4, pipelines=2)
    weights = lab.make(lab.site_of(module, line, "avgpipe", lab.PAIRS["sgd"][0]))
    start = module.weight.detach().clone()
    run_batch(weights, module, 0, 1.0)
    weights.before_forward(1)
    weights.update(1)
    weights.before_backward(1)
    assert torch.equal(module.weight, start)
    weights.before_forward(2)
    assert torch.allclose(module.weight.data, start - 0.05 / 2)


@pytest.mark.parametrize("pair", ["momentum", "adam"])
def test_copies_and_their_optimizers_come_back_from_a_checkpoint(lab, pair):
    """The continued run is bit for bit the one that was not interrupted, in copies of its own."""
    line = lab.line_of("avgpipe", 0, 1, 1, batches=6, pipelines=3)
    modules = [lab.mlp(seed) for seed in (0, 1)]
    sites = [lab.site_of(module, line, "avgpipe", lab.PAIRS[pair][0]) for module in modules]
    weights, loaded = map(lab.make, sites)
    lab.play(modules[0], weights, line.ops, lab.vectors, lab.squares)
    weights.drain()
    saved = {name: list(map(torch.clone, values)) for name, values in weights.state().items()}
    modules[1].load_state_dict(modules[0].state_dict())
    first, restored = (site.update.optimizer for site in sites)
    restored.load_state_dict(copy.deepcopy(first.state_dict()))
    loaded.load_state(saved)
    assert loaded.state().keys() == saved.keys()
    for name, values in loaded.state().items():
        assert all(map(torch.equal, values, saved[name])), name
    losses = []
    for module, running in zip(modules, (weights, loaded), strict=True):
        losses.append(lab.play(module, running, line.ops, lab.vectors, lab.squares))
        running.drain()
    assert losses[0] == losses[1]
    assert all(map(torch.equal, *map(lab.values_of, modules)))


def test_a_parameter_without_saved_values_keeps_those_of_the_copies(lab):
    """A checkpoint has None for one that was not trained then."""
    module = nn.Linear(2, 2).double()
    line = lab.line_of("avgpipe", 0, 1, 1, batches=4, pipelines=2)
    weights = lab.make(lab.site_of(module, line, "avgpipe", lab.PAIRS["sgd"][0]))
    value = torch.full((2, 2), 3.0, dtype=torch.float64)
    weights.load_state({"copy0": [value, None], "copy1": [None, None]})
    copies = weights.state()
    assert torch.equal(copies["copy0"][0], value)
    assert torch.equal(copies["copy0"][1], module.bias)
    assert torch.equal(copies["copy1"][0], module.weight)


def test_an_optimizer_may_give_the_parameters_new_memory(lab):
    """Its result is copied to the memory of the copy, from which the pull and the next step go on."""
    line = lab.line_of("avgpipe", 0, 2, 1, batches=5, pipelines=2)
    module = lab.mlp()
    losses, center, _ = reference(lab, line, module, [lab.Sgd(0.05) for _ in range(2)])
    weights = lab.make(lab.site_of(module, line, "avgpipe", lambda ps: Reassigning(ps, lr=0.05)))
    assert lab.close(lab.play(module, weights, line.ops, lab.vectors, lab.squares), losses)
    weights.drain()
    assert lab.close(lab.values_of(module), center)


@pytest.mark.parametrize("batches", [1, 2, 3, 4])
def test_the_stream_after_a_drain_begins_with_the_first_copy_whichever_was_the_last(lab, batches):
    """Between them the parameters are the reference, to which the copies have only been pulled."""
    module = nn.Linear(2, 2, bias=False).double()
    line = lab.line_of("avgpipe", 0, 1, 1, batches=4, pipelines=3)
    weights = lab.make(lab.site_of(module, line, "avgpipe", lab.PAIRS["sgd"][0]))
    for number in range(batches):
        run_batch(weights, module, number, 1.0 + number)
        weights.update(number + 1)
    weights.drain()
    reference = module.weight.detach().clone()
    copies = [weights.state()[f"copy{n}"][0].clone() for n in range(3)]
    for number in (0, 1, 2, 0):
        weights.before_forward(number)
        assert torch.equal(module.weight, copies[number])
    weights.drain()
    assert torch.equal(module.weight, reference)
    assert not torch.equal(copies[0], reference)
