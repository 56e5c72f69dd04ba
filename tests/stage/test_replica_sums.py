"""Sums of gradients over two to four replicas in threads, by messages."""

from __future__ import annotations

import pytest
import torch
from tests.stage.replica_groups import SENT, Table, Weights, all_reduce, groups_of, sgd
from torch import nn

from penstock.errors import SettingError
from penstock.stage.replicas import sparse_of
from penstock.transport.update_messages import UpdateMessage


def random_grads(seed, missing):
    """Return a gradient for each parameter of `Weights`, None for the missing ones."""
    generator = torch.Generator().manual_seed(seed)
    return [
        None if place in missing else torch.randn(weight.shape, generator=generator).to(weight)
        for place, weight in enumerate(Weights().weights)
    ]


def summed(rows):
    """Return the sums of rows of gradients, from left to right; None where no row has one."""
    sums = []
    for column in zip(*rows, strict=True):
        terms = [torch.zeros_like(weight) if t is None else t for t, weight in column]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        sums.append(total if any(t is not None for t, _ in column) else None)
    return sums


def assert_same(grads, expected):
    """Compare gradients to the bit."""
    for grad, other in zip(grads, expected, strict=True):
        assert (grad is None) == (other is None)
        assert other is None or torch.equal(grad, other)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("missing", [{}, {0: {0, 3}, 1: {0, 1, 3}, 2: {3}, 3: {3}}], ids=str)
def test_gradients_are_summed_in_the_order_of_the_ranks_and_once(count, shares, missing):
    """A replica may have no gradient of a parameter, and all may; sums of an earlier batch are
    added and not summed again; the gradients that a replica has computed are not written to.
    """
    modules = [Weights(number + 1) for number in range(count)]
    groups = groups_of(modules, shares=shares)
    before = [None] * 4
    for batch in range(2):
        rows = [random_grads(10 * batch + n, missing.get(n, ())) for n in range(count)]
        if missing and batch:
            rows = [[*row[:1], None, *row[2:]] for row in rows]
        copies = [[None if grad is None else grad.clone() for grad in row] for row in rows]
        for module, group, row in zip(modules, groups, rows, strict=True):
            group.begin()
            assert all(weight.grad is None for weight in module.weights)
            for weight, grad in zip(module.weights, row, strict=True):
                weight.grad = grad
        all_reduce(groups)
        for row, copied in zip(rows, copies, strict=True):
            assert_same(row, copied)
        totals = summed([list(zip(row, modules[0].weights, strict=True)) for row in copies])
        before = [
            old if new is None else new if old is None else old + new
            for old, new in zip(before, totals, strict=True)
        ]
        for module in modules:
            assert_same([weight.grad for weight in module.weights], before)
            assert module.count.tolist() == [1, 2], "buffers are those of the first replica"


def test_parameters_of_other_stages_are_left_to_the_sum_over_stages():
    """Their gradients are neither set aside nor summed here."""
    modules = [Weights() for _ in range(2)]
    groups = groups_of(modules, tied=lambda module: [module.weights[1]])
    for number, (module, group) in enumerate(zip(modules, groups, strict=True)):
        module.weights[1].grad = torch.tensor(7.0 + number)
        group.begin()
        module.weights[0].grad = torch.ones(3, 2)
    all_reduce(groups)
    for number, module in enumerate(modules):
        assert float(module.weights[1].grad) == 7.0 + number
        assert module.weights[0].grad.tolist() == [[2.0, 2.0]] * 3


def test_thawed_parameters_are_summed_from_the_next_refresh_on():
    """Messages then have another form, and another name by which links know it."""
    for count in (2, 3):
        modules = [Weights() for _ in range(count)]
        for module in modules:
            module.weights[2].requires_grad_(requires_grad=False)
        groups = groups_of(modules)
        signatures = []
        for thawed in (False, True):
            for module, group in zip(modules, groups, strict=True):
                if thawed:
                    module.weights[2].requires_grad_(requires_grad=True)
                    group.stage.update.refresh()
                    group.refresh()
                group.begin()
                for weight in module.weights:
                    weight.grad = torch.ones_like(weight) if weight.requires_grad else None
            SENT.clear()
            all_reduce(groups)
            for module in modules:
                grad = module.weights[2].grad
                assert grad.tolist() == [float(count)] * 5 if thawed else grad is None
            numbers = {UpdateMessage.GRADIENTS, UpdateMessage.SUMS}
            signatures.append(
                {name for *_, message, name in SENT if message.micro_batch in numbers}
            )
        assert signatures[0].isdisjoint(signatures[1])
        assert len(signatures[0]) == count - 1, "two replicas need one round"


def test_a_stage_without_trained_parameters_still_shares_its_buffers():
    """A frozen batch norm has statistics; without those there is nothing to send."""
    modules = [Weights(number).requires_grad_(requires_grad=False) for number in (4, 5)]
    all_reduce(groups_of(modules))
    assert [module.count.tolist() for module in modules] == [[4, 8]] * 2
    SENT.clear()
    linears = [nn.Linear(2, 2).requires_grad_(requires_grad=False) for _ in range(2)]
    all_reduce(groups_of(linears))
    assert SENT == []


def sparse(rows):
    """Return a sparse gradient of the table: by row, its value."""
    values = torch.tensor([[float(value)] * 2 for value in rows.values()]).reshape(-1, 2)
    return torch.sparse_coo_tensor(
        torch.tensor([[*rows]]).long(), values, (6, 2), check_invariants=True
    )


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize(
    ("grads", "expected"),
    [
        ([sparse({0: 1, 2: 2}), sparse({2: 5, 4: 0}), None], {0: 1, 2: 7, 4: 0}),
        ([sparse({3: 1}), None, None], {3: 1}),
        (
            [None, torch.ones(6, 2), sparse({1: 4})],
            {row: 1 + 4 * (row == 1) for row in range(6)},
        ),
        ([None, None, None], None),
    ],
    ids=["rows of two", "of one replica", "dense", "none"],
)
def test_a_sum_of_sparse_gradients_has_the_rows_of_all(count, earlier, grads, expected):
    """Also rows of zeros, which an optimizer for sparse gradients steps; ZeRO changes nothing."""
    if count == 2 and expected and len(expected) == 6:
        expected = dict.fromkeys(range(6), 1)
    modules = [Table() for _ in range(count)]
    groups = groups_of(modules)
    for module, group, grad in zip(modules, groups, grads[:count], strict=True):
        if earlier:
            module.table.weight.grad = sparse({5: 10})
        group.begin()
        module.table.weight.grad = grad
        module.bias.grad = torch.ones(2)
    all_reduce(groups)
    if earlier:
        expected = {**(expected or {})}
        expected[5] = expected.get(5, 0) + 10
    for module in modules:
        assert module.bias.grad.tolist() == [count, count]
        grad = module.table.weight.grad
        assert (grad is None) == (expected is None)
        if expected is not None:
            grad = grad.coalesce()
            assert grad.shape == (6, 2)
            assert grad.indices()[0].tolist() == sorted(expected)
            assert grad.values()[:, 0].tolist() == [expected[row] for row in sorted(expected)]


def test_a_sparse_gradient_of_a_parameter_that_declares_none_is_refused():
    """Its rows would not be sent; the message names the stage."""
    (module, _), groups = (pair := [Weights(), Weights()]), groups_of(pair)
    module.weights[0].grad = torch.eye(3, 2).to_sparse()
    with pytest.raises(SettingError, match=r"a gradient of stage 3, of shape \(3, 2\), is .*spars"):
        groups[0].all_reduce()


def test_a_sparse_gradient_is_made_of_the_marked_rows():
    """In their order, with the dtype and shape of the dense one."""
    dense = torch.arange(8.0, dtype=torch.float64).view(4, 2)
    grad = sparse_of(dense, torch.tensor([0.0, 2.0, 0.0, 1.0]))
    assert grad.is_coalesced()
    assert (grad.shape, grad.dtype) == (dense.shape, dense.dtype)
    assert grad.indices().tolist() == [[1, 3]]
    assert grad.values().tolist() == [[2.0, 3.0], [6.0, 7.0]]
    assert sparse_of(dense, torch.zeros(4))._nnz() == 0


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("frozen", [False, True])
def test_with_zero_a_replica_gets_the_sums_of_what_it_updates(count, frozen):
    """All others have no gradient then; where no update follows at once, all have all sums. A
    replica that owns nothing takes part.
    """
    modules = [Weights() for _ in range(count)]
    for module in modules:
        if frozen:
            for weight in module.weights[1:]:
                weight.requires_grad_(requires_grad=False)
    groups = groups_of(modules, optimizer=sgd, zero=1)
    trained = 1 if frozen else 4
    for updates in (True, False):
        for module, group in zip(modules, groups, strict=True):
            group.begin()
            for place, weight in enumerate(module.weights[:trained]):
                weight.grad = torch.full_like(weight, place + 1.0)
        all_reduce(groups, updates=updates)
        owners = [0] * trained
        for module, group in zip(modules, groups, strict=True):
            for place, weight in enumerate(module.weights[:trained]):
                owned = group.shards.is_updated_here(weight)
                owners[place] += owned
                if updates and not owned:
                    assert weight.grad is None
                else:
                    batches = 2 if owned and not updates else 1
                    total = (place + 1.0) * count * batches
                    assert torch.equal(weight.grad, torch.full_like(weight, total))
        assert owners == [1] * trained


@pytest.mark.parametrize("count", [2, 3])
def test_with_zero_a_parameter_that_no_replica_has_a_gradient_of_stays_without_one(count):
    """Zeros in its place would be stepped by momentum; one replica with a gradient is enough."""
    modules = [Weights() for _ in range(count)]
    groups = groups_of(modules, optimizer=sgd, zero=1)
    for group in groups:
        group.begin()
    modules[-1].weights[1].grad = torch.tensor(3.0)
    all_reduce(groups, updates=True)
    grads = [weight.grad for module in modules for weight in module.weights]
    assert [grad.item() for grad in grads if grad is not None] == [3.0]


def test_with_zero_sparse_gradients_are_summed_on_all_replicas():
    """Their rows have no fixed form, by which sums could be divided."""
    modules = [Table() for _ in range(2)]
    groups = groups_of(modules, optimizer=sgd, zero=1, tied=lambda module: [module.bias])
    assert groups[0].shards is not None
    for module in modules:
        module.table.weight.grad = sparse({1: 3})
        module.bias.grad = torch.ones(2)
    all_reduce(groups, updates=True)
    for module in modules:
        assert module.table.weight.grad.coalesce().values().tolist() == [[6.0, 6.0]]
        assert module.bias.grad.tolist() == [1.0, 1.0], "another sum has it"


def test_with_zero_thawed_parameters_are_divided_and_those_of_other_stages_are_not():
    """All replicas step a tied weight, whose gradient another sum has made equal."""
    modules = [Weights() for _ in range(2)]
    for module in modules:
        module.weights[2].requires_grad_(requires_grad=False)
    groups = groups_of(modules, optimizer=sgd, zero=1, tied=lambda module: [module.weights[0]])
    for module, group in zip(modules, groups, strict=True):
        module.weights[2].requires_grad_(requires_grad=True)
        group.stage.update.refresh()
        group.refresh()
        group.begin()
        for weight in module.weights:
            weight.grad = torch.ones_like(weight)
    all_reduce(groups, updates=True)
    steps = [[] for _ in modules[0].weights]
    for module, group in zip(modules, groups, strict=True):
        group.stage.update.step()
        for weight, row in zip(module.weights, steps, strict=True):
            row.append(round(-float(weight.detach().sum()) / weight.numel(), 4))
    assert steps[0] == [0.1, 0.1]
    assert [sorted(row) for row in steps[1:]] == [[0.0, 0.2]] * 3


def test_divided_sums_have_a_name_of_their_own():
    """Links know the form of a message by its name, and these have another one; so has a sum after
    parameters have been thawed.
    """
    names = []
    for updates, frozen in ((False, False), (True, False), (True, True)):
        modules = [Weights() for _ in range(2)]
        for module in modules:
            module.weights[0].requires_grad_(requires_grad=not frozen)
        all_reduce(groups_of(modules, optimizer=sgd, zero=1), updates=updates)
        number = UpdateMessage.GRADIENTS
        names.append({name for *_, message, name in SENT if message.micro_batch == number})
    assert all(len(some) == 1 for some in names)
    assert len(set.union(*names)) == 3
