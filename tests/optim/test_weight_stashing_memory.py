"""Memory of stashed weights: how many versions there are, what they share, and what is used again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.optim.stashed_modules import Recurrent, Tied, rows
from torch import nn

from penstock.weights.rule_types import Reads


def momentum(parameters):
    """Return SGD with momentum and weight decay."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


@pytest.mark.parametrize(("rule", "stages", "micro_batches", "version_count"), [
    ("stash", 4, 1, [4, 3, 2, 1]), ("stash", 4, 3, [2, 2, 2, 1]), ("double-buffer", 4, 4, [2, 2, 2, 2]),
    ("vertical-sync", 4, 1, [4, 4, 4, 4])])  # fmt: skip
def test_as_many_versions_are_kept_as_are_read(lab, rule, stages, micro_batches, version_count):
    """The paper's memory: p - s versions at stage s with a stash, two with a double buffer, and
    none besides for the update.
    """
    counts, bytes_held = [], []
    for stage in range(stages):
        module = lab.mlp()
        line = lab.line_of(rule, stage, stages, micro_batches, batches=12)
        weights = lab.make(lab.site_of(module, line, rule, lab.PAIRS["momentum"][0]))
        lab.play(module, weights, line.ops, lab.vectors, lab.squares)
        counts.append(weights.peak_versions)
        bytes_held.append(
            weights.held_bytes() / sum(parameter.nbytes for parameter in module.parameters())
        )
        weights.drain()
        assert weights.versions == 1
    assert counts == version_count
    assert bytes_held == version_count


def test_versions_share_what_no_update_has_touched(lab):
    """An embedding that a batch does not use, or a frozen layer, is not copied."""
    module = Tied()
    frozen = nn.Sequential(module, nn.Linear(6, 6).requires_grad_(False))
    line = lab.line_of("stash", stage=0, stages=4, micro_batches=1, batches=8)
    weights = lab.make(lab.site_of(frozen, line, "stash", momentum))
    lab.play(frozen, weights, line.ops, rows, nn.functional.mse_loss)
    trained = [module.enter.weight, module.enter.bias, module.back.bias]
    assert weights.peak_versions == 4
    most = (
        sum(parameter.nbytes for parameter in trained) * 4
        + module.sometimes.nbytes * 4
        + module.never.nbytes
    )
    assert most - module.sometimes.nbytes * 2 <= weights.held_bytes() < most


def test_a_stage_that_never_updates_holds_one_version(lab):
    """Unchanged versions share their memory."""
    module = lab.mlp()
    line = lab.line_of("stash", stage=0, stages=4, micro_batches=1, batches=8)
    weights = lab.make(lab.site_of(module, line, "stash", lab.PAIRS["adam"][0]))
    before = [parameter.data_ptr() for parameter in module.parameters()]
    for kind, number in line.ops:
        {"F": weights.before_forward, "B": weights.before_backward, "U": weights.update}[kind](
            number
        )
    assert (weights.versions, weights.peak_versions) == (1, 1)
    assert weights.held_bytes() == sum(parameter.nbytes for parameter in module.parameters())
    assert [parameter.data_ptr() for parameter in module.parameters()] == before


def test_memory_for_another_version_is_kept_for_the_next_time_and_counted(lab):
    """A backward that reads another version than its forward borrows a block; the next one as well."""
    module = nn.Linear(3, 3, bias=False).double()
    line = lab.line_of("stash", 0, 3, 1, batches=8)
    line.use, use = (
        lambda number: replace(use(number), reads=Reads(number and 1, 0)),
        line.use,
    )
    weights = lab.make(lab.site_of(module, line, "stash", lab.PAIRS["sgd"][0]))
    size = module.weight.nbytes
    weights.before_forward(0)
    module.weight.grad = torch.ones(3, 3, dtype=torch.float64)
    old = module.weight.detach().clone()
    weights.update(1)
    new, held = module.weight.detach().clone(), []
    for number in (1, 2, 3):
        weights.before_forward(number)
        assert torch.equal(module.weight, new)
        weights.before_backward(number)
        assert torch.equal(module.weight, old)
        held.append(weights.held_bytes() / size)
        weights.finished(number)
    weights.before_forward(4)
    assert held == [3, 3, 3]
    assert weights.held_bytes() / size == 3


def test_a_drain_keeps_the_memory_of_all_versions_for_the_next_stream(lab):
    """Their blocks are free again: the next stream allocates none."""
    module = lab.mlp()
    line = lab.line_of("stash", 0, 4, 1, batches=8)
    weights = lab.make(lab.site_of(module, line, "stash", lab.PAIRS["sgd"][0]))
    held = []
    for _ in range(3):
        lab.play(module, weights, line.ops, lab.vectors, lab.squares)
        held.append(weights.held_bytes())
        weights.drain()
        held.append(weights.held_bytes())
        assert weights.versions == 1
    assert held == held[:1] * 6


def start_of_stream(lab, module, reads=lambda n: Reads(0, 0), next_forward=0):
    """Return the stashed weights of a module, with other reads than those of the rule."""
    line = lab.line_of("stash", 0, 3, 1, batches=8)
    use = line.use
    line.use = lambda n: replace(use(n), reads=reads(n), next_forward=next_forward)
    return lab.make(lab.site_of(module, line, "stash", lab.PAIRS["sgd"][0]))


def step(weights, module, version, *names):
    """Update with gradients of 1 for some parameters; return the values before."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        parameter.grad = torch.ones_like(parameter) if name in names else None
    weights.update(version)
    return before


def test_the_newest_values_are_those_of_its_updates_while_a_backward_reads_older_ones(lab):
    """A backward that reads version 0 puts its values into the memory of version 1."""
    for method in ("newest", "unshared_newest"):
        module = nn.Linear(2, 2, bias=False)
        weights = start_of_stream(lab, module, lambda n: Reads(n, 0))
        weights.before_forward(0)
        old = step(weights, module, 1, "weight")["weight"]
        weights.before_forward(1)
        new = module.weight.detach().clone()
        weights.before_backward(1)
        assert torch.equal(module.weight, old)
        (values,) = getattr(weights, method)()
        assert torch.equal(values, new.flatten())


def test_values_added_to_the_newest_version_do_not_change_older_ones_that_share_its_memory(lab):
    """Changes that arrive from replicas are added in place; the parameters have them at once."""
    module = nn.Linear(2, 2)
    weights = start_of_stream(lab, module)
    weights.before_forward(0)
    before = step(weights, module, 1, "weight")
    held = weights.held_bytes()
    newest = weights.unshared_newest()
    assert weights.held_bytes() == held + module.bias.nbytes, "the weight's memory is not shared"
    for values in newest:
        values.add_(10)
    assert torch.equal(module.bias, before["bias"] + 10)
    weights.before_backward(0)
    assert torch.equal(module.weight, before["weight"])
    assert torch.equal(module.bias, before["bias"])


@pytest.mark.parametrize("trained", range(4))
def test_contiguous_parameters_are_copied_whichever_of_them_has_the_gradient(lab, trained):
    """They have one block of memory, which a version in flight reads as a whole."""
    module = Recurrent()
    names = [name for name, _ in module.named_parameters()]
    weights = start_of_stream(lab, module)
    weights.before_forward(0)
    before = step(weights, module, 1, names[trained])
    weights.before_backward(0)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_only_the_blocks_in_which_two_versions_differ_are_put_aside(lab):
    """A backward that reads another version finds a shared parameter where it is."""
    module = nn.Linear(4, 4, bias=False)
    module.register_parameter("unused", nn.Parameter(torch.ones(1000)))
    weights = start_of_stream(lab, module, lambda n: Reads(0, 1))
    weights.before_forward(0)
    step(weights, module, 1, "weight")
    held = weights.held_bytes()
    weights.before_backward(0)
    assert weights.held_bytes() == held + module.weight.nbytes


def test_micro_batches_of_a_stream_that_failed_hold_no_versions_of_the_next(lab):
    """They were in flight at the drain, and will never finish."""
    module = nn.Linear(2, 2)
    weights = start_of_stream(lab, module, next_forward=1)
    for number in range(3):
        weights.before_forward(number)
    weights.drain()
    weights.before_forward(0)
    weights.finished(0)
    step(weights, module, 1, "weight", "bias")
    assert weights.versions == 1
