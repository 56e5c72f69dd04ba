"""Weight stashing: backwards read their version of the weights, whatever has been updated since."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tests.optim.stashed_modules import (
    MODULES,
    Reassigning,
    Recurrent,
    images,
    rows,
    sequences,
)
from torch import nn

from penstock.errors import RunError
from penstock.weights.rule_types import Reads

FACTORIES = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "momentum, foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "adam, one by one": lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=False),
    "adamw, fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "groups": lambda ps: torch.optim.Adam(
        [{"params": ps[::2], "lr": 0.03}, {"params": ps[1::2], "weight_decay": 0.1}], lr=0.01
    ),
}


def stashed(module, line, data, factory):
    """Stash with copies of the whole module; return gradients by micro-batch, losses and newest
    weights.
    """
    newest = copy.deepcopy(module)
    optimizer = factory(list(newest.parameters()))
    versions, graphs, losses, grads, latest = [copy.deepcopy(newest)], {}, [], {}, newest
    for kind, number in line.ops:
        if kind == "F":
            reader = copy.deepcopy(versions[line.use(number).reads.forward])
            for (
                name,
                buffer,
            ) in latest.named_buffers():  # buffers are no weights: the latest are everybody's
                reader.get_buffer(name).copy_(buffer)
            reader.calls = getattr(latest, "calls", 0)
            inputs, targets = data(number)
            loss = nn.functional.mse_loss(reader(inputs), targets)
            graphs[number], latest = (reader, loss), reader
            losses.append(loss.detach())
        elif kind == "B":
            reader, loss = graphs.pop(number)
            loss.backward()
            grads[number] = [parameter.grad for parameter in reader.parameters()]
            for parameter, grad in zip(newest.parameters(), grads[number], strict=True):
                if grad is not None:
                    parameter.grad = (
                        grad.clone() if parameter.grad is None else parameter.grad + grad
                    )
        else:
            optimizer.step()
            optimizer.zero_grad()
            versions.append(copy.deepcopy(newest))
    return grads, losses, list(newest.parameters())


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("name", MODULES)
def test_a_backward_gives_bit_for_bit_the_gradients_of_the_version_that_its_forward_read(
    lab, name, factory
):
    """Updates come between a forward and its backward and must not affect graphs in flight, however
    layers save weights.
    """
    make, data = MODULES[name]
    torch.manual_seed(0)
    module = make()
    line = lab.line_of("stash", stage=1, stages=4, micro_batches=1, batches=7)
    expected, expected_losses, expected_weights = stashed(module, line, data, FACTORIES[factory])
    weights = lab.make(lab.site_of(module, line, "stash", FACTORIES[factory]))
    actual = {}
    losses = lab.play(module, weights, line.ops, data, nn.functional.mse_loss, actual.__setitem__)
    assert all(map(torch.equal, losses, expected_losses))
    for number, grads in expected.items():
        for parameter, a, b in zip(module.parameters(), actual[number], grads, strict=True):
            assert (a is None and b is None) if a is None or b is None else torch.equal(a, b), (
                number,
                parameter.shape,
            )
    weights.drain()
    assert all(map(torch.equal, module.parameters(), expected_weights))
    assert weights.peak_versions == 3


@pytest.mark.parametrize("optimizer", ["sgd", "sgd with decay", "momentum", "adam", "adamw"])
@pytest.mark.parametrize("rule", ["stash", "vertical-sync", "double-buffer"])
@pytest.mark.parametrize(
    ("stage", "stages", "micro_batches"), [(0, 3, 1), (1, 4, 1), (0, 3, 2), (2, 3, 3), (0, 3, 4)]
)
def test_a_stream_does_what_the_published_equation_says(
    lab, rule, optimizer, stage, stages, micro_batches
):
    """The reference has explicit versions, and optimizers as formulas."""
    if rule == "double-buffer" and micro_batches < stages:
        micro_batches = stages
    line = lab.line_of(rule, stage, stages, micro_batches, batches=9)
    factory, formula = lab.PAIRS[optimizer]
    module = lab.mlp()
    losses, newest = lab.literal(module, line, lab.vectors, lab.squares, formula())
    weights = lab.make(lab.site_of(module, line, rule, factory))
    assert lab.close(lab.play(module, weights, line.ops, lab.vectors, lab.squares), losses)
    weights.drain()
    assert lab.close(lab.values_of(module), newest)


def test_versions_keep_the_layout_that_recurrent_layers_want(lab):
    """cuDNN requires contiguous weights; otherwise it copies them at every forward, and warns."""
    module = Recurrent()
    parameters = list(module.parameters())

    def offsets():
        assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 1
        return [parameter.storage_offset() for parameter in parameters]

    before = offsets()
    line = lab.line_of("stash", stage=0, stages=3, micro_batches=1, batches=5)
    weights = lab.make(lab.site_of(module, line, "stash", FACTORIES["momentum"]))
    places = set()
    lab.play(module, weights, line.ops[:3], sequences, nn.functional.mse_loss)
    for version in range(1, 4):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        weights.update(version)
        assert offsets() == before
        places.add(parameters[0].data_ptr())
    assert len(places) == 3  # a forward to come may read any of them


def test_strides_of_weights_stay(lab):
    """Kernels are chosen by layout, and other kernels round differently."""
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    strides = module.weight.stride()
    line = lab.line_of("stash", stage=0, stages=2, micro_batches=1, batches=3)
    weights = lab.make(lab.site_of(module, line, "stash", FACTORIES["momentum"]))
    before = module.weight.data_ptr()
    weights.before_forward(0)
    weights.before_forward(1)
    module.weight.grad = torch.ones_like(module.weight)
    weights.update(1)
    assert module.weight.data_ptr() != before
    assert module.weight.stride() == strides


def test_a_layer_may_move_its_weights_in_its_forward(lab):
    """Models call `flatten_parameters` in their forward: the next update has to restore the
    connection of version and parameter.
    """

    class Moving(nn.Linear):
        def forward(self, x):
            for parameter in self.parameters():
                parameter.data = parameter.data.clone()
            return super().forward(x)

    line = lab.line_of("stash", stage=0, stages=2, micro_batches=1, batches=6)
    torch.manual_seed(0)
    moving, still = Moving(6, 6), nn.Linear(6, 6)
    still.load_state_dict(moving.state_dict())
    losses = []
    for module in (moving, still):
        weights = lab.make(lab.site_of(module, line, "stash", FACTORIES["momentum"]))
        losses.append(lab.play(module, weights, line.ops, rows, nn.functional.mse_loss))
        weights.drain()
    assert losses[0] == losses[1]
    assert all(map(torch.equal, moving.parameters(), still.parameters()))


@pytest.mark.parametrize(
    "make",
    [
        lambda lab: (lab.mlp(), lab.vectors),
        lambda lab: (MODULES["convolutions"][0]().double(), None),
    ],
    ids=["linear", "convolutions"],
)
def test_a_rule_whose_backward_reads_another_version_than_its_forward_finds_it_in_all_that_was_saved(
    lab, make
):
    """A user's rule may limit the age of weights. Linear layers save a view of the weight,
    convolutions the parameter itself.
    """
    module, data = make(lab)
    data = data or (lambda n: tuple(tensor.double() for tensor in images(n)))
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = 0.0
    line = lab.Line(
        0, 4, 1, 9, lambda at: Reads(at.at_forward, max(at.at_forward, at.at_backward - 1))
    )
    losses, newest = lab.literal(module, line, data, lab.squares, lab.Sgd(0.02, 0.8))
    weights = lab.make(lab.site_of(module, line, "capped", lab.PAIRS["momentum"][0]))
    assert lab.close(lab.play(module, weights, line.ops, data, lab.squares), losses)
    weights.drain()
    assert lab.close(lab.values_of(module), newest)


def test_a_backward_in_two_parts_finds_its_version_at_both(lab):
    """W may come long after I, with forwards of other micro-batches between."""
    module = nn.Linear(2, 2)
    line = lab.line_of("stash", stage=0, stages=3, micro_batches=1, batches=5)
    weights = lab.make(lab.site_of(module, line, "stash", FACTORIES["momentum"]))
    weights_read = {}
    for op, number in [
        ("F", 0),
        ("F", 1),
        ("F", 2),
        ("I", 0),
        ("W", 0),
        ("U", 1),
        ("I", 1),
        ("F", 3),
        ("W", 1),
        ("U", 2),
        ("F", 4),
    ]:
        if op == "F":
            weights.before_forward(number)
            weights_read[number] = module.weight.detach().clone()
        elif op == "U":
            module.weight.grad = torch.ones(2, 2)
            weights.update(number)
        else:
            weights.before_backward(number)
            assert torch.equal(module.weight, weights_read[number])
            if op == "W":
                weights.finished(number)
    assert not torch.equal(weights_read[3], weights_read[0])


def test_a_version_that_was_let_go_or_not_made_yet_is_named_with_those_that_are_held(lab):
    """Otherwise a program that does not follow the rule would train on wrong weights."""
    module = nn.Linear(2, 2)
    line = lab.line_of("stash", stage=0, stages=1, micro_batches=1, batches=5)
    use = line.use(0)
    line.use = lambda number: replace(use, reads=Reads(number // 2, number // 2), next_forward=2)
    weights = lab.make(lab.site_of(module, line, "stash", FACTORIES["momentum"]))
    with pytest.raises(
        RunError,
        match=r"stage 0: micro-batch 6 reads weight version 3, which does not exist yet; available are 0\. The pro",
    ):
        weights.before_forward(6)
    weights.drain()
    weights.before_forward(0)
    weights.finished(0)
    module.weight.grad = torch.ones(2, 2)
    weights.update(1)
    with pytest.raises(
        RunError,
        match=r"micro-batch 1 reads weight version 0, which was released, since no micro-batch in flight .*; available are 1\.",
    ):
        weights.before_forward(1)


def test_a_drain_lets_go_whatever_was_in_flight(lab):
    """After a failure within a stream, a run begins again."""
    module = lab.mlp()
    line = lab.line_of("stash", stage=0, stages=4, micro_batches=1, batches=8)
    weights = lab.make(lab.site_of(module, line, "stash", lab.PAIRS["momentum"][0]))
    lab.play(module, weights, line.ops[:11], lab.vectors, lab.squares)
    assert weights.versions > 1
    held = weights.held_bytes()
    newest = [tensor.clone() for tensor in weights._versions[weights._newest].tensors]
    weights.drain()
    assert weights.versions == 1
    assert weights.held_bytes() == held, "the memory is kept for the next versions"
    for parameter, tensor in zip(module.parameters(), newest, strict=True):
        assert torch.equal(parameter, tensor)
    lab.play(module, weights, line.ops, lab.vectors, lab.squares)
    assert weights.held_bytes() <= max(
        held, 4 * sum(parameter.nbytes for parameter in module.parameters())
    )


def test_backwards_that_read_other_versions_than_their_forwards_leave_these_as_they_were(lab):
    """Three micro-batches of one forward version, whose backwards read three versions in turn."""
    module = nn.Linear(2, 1, bias=False)
    line = lab.line_of("stash", 0, 3, 1, batches=8)
    backward_versions = {0: 1, 1: 0, 2: 2, 3: 1}
    use = line.use
    line.use = lambda n: replace(use(n), reads=Reads(0, backward_versions[n]), next_forward=0)
    weights = lab.make(lab.site_of(module, line, "stash", lab.PAIRS["sgd"][0]))
    versions = []
    for number in range(4):
        weights.before_forward(number)
    place = module.weight.data_ptr()
    for version in (1, 2):
        versions.append(module.weight.detach().clone())
        module.weight.grad = torch.ones_like(module.weight)
        weights.update(version)
    versions.append(module.weight.detach().clone())
    for number in (0, 2, 1, 3, 0, 1):
        weights.before_backward(number)
        assert torch.equal(module.weight, versions[backward_versions[number]])
        assert module.weight.data_ptr() == place
    assert torch.equal(weights.newest()[0], versions[2].flatten())


def test_backwards_of_unlike_forwards_that_read_one_version_find_it_each_in_its_memory(lab):
    """Of two that follow each other, the second reads it in another place than the first."""
    module = nn.Linear(2, 1, bias=False)
    line = lab.line_of("stash", 0, 3, 1, batches=8)
    use = line.use
    line.use = lambda n: replace(use(n), reads=Reads(n, 2), next_forward=0)
    weights = lab.make(lab.site_of(module, line, "stash", lab.PAIRS["sgd"][0]))
    versions = []
    for number in range(3):
        weights.before_forward(number)
        versions.append((module.weight.detach().clone(), module.weight.data_ptr()))
        if number < 2:
            module.weight.grad = torch.ones_like(module.weight)
            weights.update(number + 1)
    for number in (0, 1, 0, 2, 1):
        weights.before_backward(number)
        assert torch.equal(module.weight, versions[2][0])
        assert module.weight.data_ptr() == versions[number][1]


def test_an_optimizer_may_give_the_parameters_new_memory(lab):
    """Its result is copied to the memory of the version, from which later ops read it."""
    line = lab.line_of("stash", 0, 3, 1, batches=6)
    losses, newest = lab.literal(lab.mlp(), line, lab.vectors, lab.squares, lab.Sgd(0.05))
    module = lab.mlp()
    weights = lab.make(lab.site_of(module, line, "stash", lambda ps: Reassigning(ps, lr=0.05)))
    assert lab.close(lab.play(module, weights, line.ops, lab.vectors, lab.squares), losses)
    weights.drain()
    assert lab.close(lab.values_of(module), newest)


def test_a_version_that_only_a_backward_reads_is_kept_until_then(lab):
    """No forward reads it, neither the one of its micro-batch nor the next."""
    module = nn.Linear(2, 1, bias=False)
    line = lab.line_of("stash", 0, 3, 1, batches=8)
    use = line.use
    line.use = lambda n: replace(use(n), reads=Reads(0, 1), next_forward=4)
    weights = lab.make(lab.site_of(module, line, "stash", lab.PAIRS["sgd"][0]))
    weights.before_forward(0)
    versions = []
    for version in (1, 2, 3):
        versions.append(module.weight.detach().clone())
        module.weight.grad = torch.ones_like(module.weight)
        weights.update(version)
    weights.before_backward(0)
    assert torch.equal(module.weight, versions[1])
    weights.finished(0)
    module.weight.grad = torch.ones_like(module.weight)
    weights.update(4)
    assert weights.versions == 1
    with pytest.raises(RunError, match=r"version 0, which was released, .*; available are 4\."):
        weights.before_forward(1)


def test_values_that_are_loaded_after_a_layer_has_moved_its_weights_are_trained(lab):
    """A drain gives the parameters the memory of the newest version, to which others then write."""
    module = nn.Linear(2, 1, bias=False)
    line = lab.line_of("stash", 0, 2, 1, batches=8)
    weights = lab.make(lab.site_of(module, line, "stash", lambda ps: torch.optim.SGD(ps, lr=1.0)))
    weights.before_forward(0)
    module.weight.data = module.weight.data.clone()
    weights.drain()
    with torch.no_grad():
        module.weight.fill_(7.0)
    weights.before_forward(0)
    module.weight.grad = torch.ones_like(module.weight)
    weights.update(1)
    assert module.weight.tolist() == [[6.0, 6.0]]
    weights.before_backward(0)
    assert module.weight.tolist() == [[7.0, 7.0]]


def test_a_drain_restores_the_newest_version_from_a_backward_that_read_an_older_one(lab):
    """A stream that fails after such a backward leaves the older values in its memory."""
    module = nn.Linear(2, 1, bias=False)
    line = lab.line_of("stash", 0, 2, 1, batches=8)
    use = line.use
    line.use = lambda n: replace(use(n), reads=Reads(n, 0), next_forward=0)
    weights = lab.make(lab.site_of(module, line, "stash", lambda ps: torch.optim.SGD(ps, lr=1.0)))
    with torch.no_grad():
        module.weight.fill_(7.0)
    weights.before_forward(0)
    module.weight.grad = torch.ones_like(module.weight)
    weights.update(1)
    weights.before_forward(1)
    weights.before_backward(1)
    assert module.weight.tolist() == [[7.0, 7.0]]
    weights.drain()
    assert module.weight.tolist() == [[6.0, 6.0]]
