"""Parameters of other stages in the graphs of a stage, against the gradients that autograd gives."""

from __future__ import annotations

import gc
import random
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.errors import SettingError
from penstock.stage.foreign_parameters import _MAX_FORMS, ModelParameters, Reach, _parameters


def chain(count):
    """Return the layers of a model, with a parameter each, as a traced chain has them."""
    modules = [nn.Linear(2, 1, bias=False) for _ in range(count)]
    layers = [SimpleNamespace(name=f"part{index}") for index in range(count)]
    return SimpleNamespace(layers=layers, modules=modules)


def training(step=0, **options):
    """Return a batch that is trained."""
    return SimpleNamespace(**{"training": True, "step": step, **options})


def expression(rng, leaves):
    """Return a random number that depends on some of these tensors, in a graph of random shape."""
    values = [leaf.sum() for leaf in leaves] or [torch.ones(())]
    for _ in range(rng.randint(1, 4)):
        first, second = rng.choice(values), rng.choice(values)
        values.append(rng.choice([torch.add, torch.mul])(first, second).exp())
    return rng.choice(values) + values[-1]


def reached(root, leaves):
    """Return the leaves to which autograd gives a gradient."""
    if not root.requires_grad:
        return []
    grads = torch.autograd.grad(root, leaves, retain_graph=True, allow_unused=True)
    return [leaf for leaf, grad in zip(leaves, grads, strict=True) if grad is not None]


def is_in(tensor, tensors):
    """Whether a tensor is one of these."""
    return any(tensor is other for other in tensors)


def message_of(call, *args):
    """Return the message with which a check refuses; empty if it does not."""
    try:
        call(*args)
    except SettingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("seed", range(60))
def test_an_output_may_depend_on_parameters_of_its_stage_alone(seed):
    """On any of its tensors; a weight that is not the model's is left to others."""
    rng = random.Random(seed)
    traced = chain(5)
    weights = [module.weight for module in traced.modules]
    other = nn.Parameter(torch.ones(1))
    parameters = rng.sample(weights, rng.randint(1, 4))
    picked = [rng.sample([*weights, other], rng.randint(0, 2)) for _ in range(2)]
    value = {"first": expression(rng, picked[0]), "rest": [expression(rng, picked[1]), 3]}
    names = [
        f"part{index}.weight"
        for index, weight in enumerate(weights)
        if not is_in(weight, parameters)
        and (is_in(weight, picked[0]) or is_in(weight, picked[1]))
        and any(reached(root, [weight]) for root in (value["first"], value["rest"][0]))
    ]
    reach = Reach(7, iter(parameters), ModelParameters.of(traced))
    message = message_of(reach.check_output, "a form", value)
    assert bool(message) == bool(names)
    if names:
        stage, name = re.match(r"a layer of stage (\d+) uses (\S+), a param", message).groups()
        assert stage == "7"
        assert name in names


@pytest.mark.parametrize("seed", range(60))
def test_a_loss_may_depend_on_parameters_of_its_stage_and_on_those_below_the_output(seed):
    """Also on those of other stages, if the output leads to them: they are the layers' affair."""
    rng = random.Random(seed)
    traced = chain(4)
    weights = [module.weight for module in traced.modules]
    outside = nn.Parameter(torch.ones(2, 3))
    parameters = rng.sample(weights, rng.randint(1, 3))
    below = expression(rng, rng.sample(weights, rng.randint(0, 3)))
    above = expression(rng, rng.sample([*weights, outside], rng.randint(0, 2)))
    loss = below.square() + above
    allowed = [*parameters, *reached(below, weights)]
    refused = [leaf for leaf in reached(above, [*weights, outside]) if not is_in(leaf, allowed)]
    reach = Reach(3, parameters, ModelParameters.of(traced))
    message = message_of(reach.check_loss, training(), loss, [below])
    assert bool(message) == bool(refused)
    if not refused:
        return
    if "not the model's" in message:
        assert "a trainable weight of shape (2, 3) that" in message
        assert is_in(outside, refused)
    else:
        name = re.match(r"the loss uses part(\d)\.weight, .* the last stage, 3, w", message)[1]
        assert is_in(weights[int(name)], refused)


def foreign():
    """Return the check of a stage without parameters, and a number with a foreign parameter."""
    traced = chain(1)
    reach = Reach(0, [], ModelParameters.of(traced))
    # The module keeps the parameter alive, which is known by a weak reference.
    reach.module = traced.modules[0]
    return reach, traced.modules[0].weight.sum()


def test_a_loss_that_changes_the_output_in_place_is_none_that_uses_weights():
    """Its graph leads past the node that the output had."""
    traced = chain(2)
    first, second = (module.weight for module in traced.modules)
    reach = Reach(1, [second], ModelParameters.of(traced))
    output = first.sum() * second.sum()
    changed = output * 1
    loss = changed.add_(1).sum()
    reach.check_loss(training(), loss, changed)
    assert "part0.weight" in message_of(reach.check_loss, training(1), loss + first.sum(), 5)


def test_outputs_are_checked_once_for_each_form_up_to_a_number_of_forms():
    """Walking a graph takes time; without gradients there is none, and the form is still open."""
    reach, value = foreign()
    with torch.no_grad():
        reach.check_output("form 0", value)
    assert message_of(reach.check_output, "form 0", value)
    assert not message_of(reach.check_output, "form 0", value)
    for number in range(1, _MAX_FORMS):
        assert message_of(reach.check_output, f"form {number}", value)
    assert not message_of(reach.check_output, "one more", value)


def test_losses_are_checked_once_for_each_training_batch_that_has_a_graph():
    """A first micro-batch whose loss has none, as with all samples ignored, decides nothing."""
    reach, value = foreign()
    assert not message_of(reach.check_loss, training(training=False), value, None)
    assert not message_of(reach.check_loss, training(), torch.ones(()), None)
    assert not message_of(reach.check_loss, training(), 1.0, None)
    for step in (0, 1, 5, 4):
        assert message_of(reach.check_loss, training(step), value, None)
        assert not message_of(reach.check_loss, training(step), value, None)
    with torch.no_grad():
        assert not message_of(reach.check_loss, training(6), value, None)


def test_a_loss_may_depend_on_leaves_that_are_no_parameters():
    """Such as a tensor of the caller whose gradient is of interest."""
    reach, _ = foreign()
    leaf = torch.ones(2, requires_grad=True)
    assert not message_of(reach.check_loss, training(), leaf.sum(), None)
    assert not message_of(reach.check_output, "form", leaf * 2)


def test_every_node_of_a_graph_is_visited_once():
    """The number of paths doubles with every layer that has a residual connection."""
    weight = nn.Parameter(torch.ones(1))
    value = weight.sum()
    for _ in range(12):
        value = value.sin() + value.cos()
    assert len(list(_parameters([value.grad_fn], frozenset()))) == 1
    assert not list(_parameters([value.grad_fn], frozenset([value.grad_fn])))


def test_a_parameter_that_is_freed_gives_its_name_to_no_other_tensor():
    """Python gives its id to a new one; the names keep no parameter alive."""
    traced = chain(2)
    names = ModelParameters.of(traced)
    first, second = (module.weight for module in traced.modules)
    assert (names.name(first), names.name(second)) == ("part0.weight", "part1.weight")
    assert names.name(torch.ones(2)) is None
    later = nn.Parameter(torch.ones(2))
    reference = names.named[id(first)][0]
    names.named[id(later)] = reference, "part0.weight"
    assert names.name(later) is None
    del first, traced, second
    gc.collect()
    assert reference() is None


def test_a_layer_of_a_traced_model_has_its_names_in_the_model():
    """Not those of the layer before them."""
    traced = chain(1)
    traced.modules[0].whole_names = True
    assert ModelParameters.of(traced).name(traced.modules[0].weight) == "weight"
