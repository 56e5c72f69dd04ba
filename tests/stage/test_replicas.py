"""Replicas of a stage: equal weights from the first batch on, and gradients summed by rank."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.conformance.models import CASES, made
from tests.conformance.reference import PlainTraining, added_up, differences, gradients
from tests.runtime.jobs import sgd
from tests.stage.parallel.scripted_groups import in_threads
from tests.stage.replica_groups import SENT, Table, Weights, groups_of
from torch import nn

import penstock as ps
from penstock.stage import replicas as replicas_module
from penstock.stage.replicas import WaveReplicaExchange, rows_of
from penstock.transport.update_messages import UpdateMessage

#: Two pipelines of two stages in opposite directions.
BOTH_WAYS = """rank 0 | 0F0 1F1 1B1 0F2 1F3 1B3 0B0 0B2 0U1 1U1
rank 1 | 0F1 1F0 1B0 0F3 1F2 1B2 0B1 0B3 0U1 1U1"""
#: The same stage three times: data parallelism.
THREE = "\n".join(
    f"rank {rank} | 0F{rank} 0F{rank + 3} 0B{rank} 0B{rank + 3} 0U1" for rank in range(3)
)


def pipeline(name, programs, lengths, **options):
    """Return a pipeline in this process, its model and its data."""
    case = CASES[name]
    model, x, y = made(case, 12)
    options = {"executor": "threads", **options}
    return (
        ps.Pipeline(
            model, loss=case.loss, balance=lengths, schedule=ps.Schedule.parse(programs), **options
        ),
        model,
        x,
        y,
    )


def test_three_replicas_sum_by_rank_to_the_bit():
    """With more than two replicas there are two rounds of pieces; the sum is the same on every
    rank.
    """
    pipe, model, x, y = pipeline("gpt", THREE, [5])
    loss, parts = PlainTraining(copy.deepcopy(model), CASES["gpt"].loss).backward_in_parts(x, y, 6)
    assert torch.equal(pipe.train_batch(x, y), loss)
    by_rank = [added_up(parts, (rank, rank + 3)) for rank in range(3)]
    assert differences(gradients(model), added_up(by_rank, range(3))) == []


class Sometimes(torch.nn.Module):
    """A layer with a parameter for negative samples, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.negative = torch.nn.Parameter(torch.ones(3))
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        """Scale the micro-batch if it has a negative number."""
        return x * self.negative if bool((x < 0).any()) else x.clone()


def test_a_parameter_that_no_replica_has_a_gradient_of_stays_without_one():
    """Zeros in its place would be stepped: momentum and weight decay would move the parameter."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), Sometimes())
    torch.nn.init.eye_(model[0].weight)
    pipe = ps.Pipeline(
        model,
        loss=torch.nn.functional.mse_loss,
        balance=[2],
        schedule=ps.Schedule.parse(THREE),
        executor="threads",
        device="cpu",
    )
    x = torch.ones(12, 3)
    x[:2] = -1.0  # micro-batch 0, on one of the replicas
    pipe.train_batch(x, torch.zeros(12, 3))
    for stage in pipe._assembly.stages:
        grads = {name.rpartition(".")[2]: grad for name, grad in _gradients(stage)}
        assert grads["negative"] is not None
        assert grads["unused"] is None


def test_a_gradient_of_an_earlier_batch_stays_where_a_later_one_has_none():
    """It is a sum over the replicas already, on all of them, and waits for the update."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), Sometimes())
    torch.nn.init.eye_(model[0].weight)
    pipe = ps.Pipeline(
        model,
        loss=torch.nn.functional.mse_loss,
        balance=[2],
        schedule=ps.Schedule.parse(THREE),
        executor="threads",
        device="cpu",
    )
    pipe.train_batch(-torch.ones(12, 3), torch.zeros(12, 3))
    before = [dict(_gradients(stage))["1.negative"].clone() for stage in pipe._assembly.stages]
    pipe.train_batch(torch.ones(12, 3), torch.zeros(12, 3))
    after = [dict(_gradients(stage))["1.negative"] for stage in pipe._assembly.stages]
    assert all(grad.any() for grad in before)
    assert all(map(torch.equal, after, before))


def _gradients(stage):
    """Names and gradients of a stage's parameters."""
    for layer in stage.layers:
        for name, parameter in layer.module.named_parameters():
            yield f"{layer.name}.{name}", parameter.grad


def test_every_replica_steps_to_the_same_weights():
    """Every replica has its own momentum; after three steps all are equal."""
    pipe, model, x, y = pipeline("vgg", BOTH_WAYS, [7, 8], optimizer=sgd)
    for _ in range(3):
        pipe.train_batch(x, y)
    weights = {name: value for stage in pipe._assembly.stages for name, value in _weights(stage)}
    for stage in pipe._assembly.stages:
        assert (
            differences(dict(_weights(stage)), {name: weights[name] for name, _ in _weights(stage)})
            == []
        )
    assert differences(dict(model.state_dict()), pipe.state_dict()) == []


def _weights(stage):
    return [
        (name, value)
        for layer in stage.layers
        for name, value in layer.module.state_dict(prefix=f"{layer.name}.").items()
    ]


def test_unused_gradients_are_summed_once_over_two_batches():
    """Without an optimizer gradients stay with the user, and a sum must not be summed over the
    replicas again.
    """
    pipe, model, x, y = pipeline("mlp", BOTH_WAYS, [3, 4])
    pipe.train_batch(x, y)
    once = gradients(model)
    pipe.train_batch(x, y)
    assert differences(gradients(model), {name: grad + grad for name, grad in once.items()}) == []


def test_buffers_are_those_of_the_first_replica():
    """All replicas get the batch norm statistics of the first, as in DistributedDataParallel."""
    pipe, model, x, y = pipeline("resnet", THREE, [9])
    plain = PlainTraining(copy.deepcopy(model), CASES["resnet"].loss)
    pipe.train_batch(x, y)
    plain.model(torch.tensor_split(x, 6)[0])
    plain.model(torch.tensor_split(x, 6)[3])
    expected = dict(plain.model.named_buffers())
    for stage in pipe._assembly.stages:
        held = {name: value for name, value in _weights(stage) if name in expected}
        assert differences(held, expected) == []


def test_a_replica_without_micro_batches_joins_the_all_reduce():
    """A batch of one sample is one micro-batch: the other replica runs none, and gets the same
    update.
    """
    pipe, model, x, y = pipeline("gpt", BOTH_WAYS, [2, 3], optimizer=sgd)
    plain = PlainTraining(copy.deepcopy(model), CASES["gpt"].loss)
    optimizer = sgd(list(plain.model.parameters()))
    assert torch.equal(pipe.train_batch(x[:1], y[:1]), plain.backward(x[:1], y[:1], 4))
    optimizer.step()
    assert differences(dict(model.state_dict()), dict(plain.model.state_dict())) == []


def test_outputs_and_losses_come_from_all_replicas_of_the_last_stage():
    """They are in the order of the samples, independent of the replica."""
    pipe, model, x, y = pipeline("mlp", BOTH_WAYS, [3, 4])
    assert torch.equal(
        pipe.forward(x), torch.cat([model(part) for part in torch.tensor_split(x, 4)])
    )
    assert torch.allclose(pipe.eval_batch(x, y), CASES["mlp"].loss(model(x), y))


def test_the_self_check_sums_replicas_and_changes_nothing():
    """The summed gradients are those of one device; the weights are unchanged."""
    pipe, model, x, y = pipeline("vgg", BOTH_WAYS, [7, 8], optimizer=sgd)
    before = copy.deepcopy(model.state_dict())
    assert pipe.compare_with_one_device(x, y).worst[1] == pytest.approx(0, abs=1e-6)
    assert differences(dict(model.state_dict()), dict(before)) == []


def test_a_dense_gradient_has_all_rows_of_a_table_and_a_sparse_one_its_own():
    """A replica may have a dense gradient of an embedding where another has a sparse one."""
    table = torch.nn.Embedding(4, 2, sparse=True)
    weight = table.weight
    assert rows_of(weight).tolist() == [0, 0, 0, 0]
    table(torch.tensor([2, 0, 2])).sum().backward()
    assert rows_of(weight).tolist() == [1, 0, 1, 0]
    weight.grad = weight.grad.to_dense()
    assert rows_of(weight).tolist() == [1, 1, 1, 1]


def test_beginning_again_keeps_what_was_set_aside():
    """A batch without a sum, such as one that failed before its first op, must not lose them."""
    pipe, _, _, _ = pipeline("gpt", THREE, [5])
    replicas = pipe._assembly.interpreters[1].replicas[0]
    parameters = replicas.stage.update.parameters
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, float(number))
    replicas.begin()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)  # of the batch without a sum
    replicas.begin()
    assert all(parameter.grad is None for parameter in parameters)
    replicas._set_grads([0] * len(parameters), [None] * len(parameters), {})
    assert [float(p.grad.flatten()[0]) for p in parameters] == list(range(len(parameters)))
    replicas.begin()
    replicas.forget()
    replicas._set_grads([0] * len(parameters), [None] * len(parameters), {})
    assert all(parameter.grad is None for parameter in parameters)


class Stub:
    """Sums in buckets or in shared memory that note their calls."""

    def __init__(self, nbytes, areas=()):
        self.nbytes, self.areas, self.calls = nbytes, areas, []

    def finish(self, subject, *needed):
        """Return sums of ones for two parameters."""
        self.calls.append(("finish", subject, *needed))
        return [1, 1], [torch.ones(2, 2), None if any(needed) else torch.ones(2)]

    def area(self, parameters):
        """Return the memory, which may not be had."""
        self.calls.append(("area", len(parameters)))
        return self.areas[1]

    def existing_area(self, parameters):
        """Return the memory if it was made before."""
        self.calls.append(("existing_area", len(parameters)))
        return self.areas[0]

    def __getattr__(self, name):
        return lambda *subjects: self.calls.append((name, *subjects))


def stubbed_group(monkeypatch, module, *, areas=None, buckets=None, **options):
    """Return the first of two replicas, and the stub of its shared memory."""
    memory = Stub(10, areas or (None, None))
    monkeypatch.setattr(replicas_module, "SharedMemorySum", lambda messages, opens: memory)
    open_segment = None if areas is None else int
    first, _ = groups_of(
        [module, module], open_segment=open_segment, buckets=buckets, optimizer=sgd, **options
    )
    return first, memory


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("existing", [None, "memory"])
def test_gradients_of_one_host_are_summed_in_shared_memory(monkeypatch, existing, zero):
    """It is started early only if it exists; buckets are for what has no memory. With ZeRO a
    replica copies the sums that it needs.
    """
    module, buckets = nn.Linear(2, 2), Stub(5)
    group, memory = stubbed_group(
        monkeypatch, module, areas=(existing, "memory"), buckets=buckets, zero=zero
    )
    assert group.sum_bytes == 15
    group.start()
    assert memory.calls == [("existing_area", 2), *([("start", "memory")] if existing else [])]
    memory.calls.clear()
    group.all_reduce()
    group.all_reduce(updates=True)
    needed = group.shards.is_updated_here if zero else None
    finish = ("finish", "memory")
    assert memory.calls == [("area", 2), (*finish, None), ("area", 2), (*finish, needed)]
    assert module.weight.grad.tolist() == [[1.0, 1.0]] * 2
    assert (module.bias.grad is None) == bool(zero)
    group.forget()
    assert memory.calls[-1] == buckets.calls[-1] == ("forget",)
    assert "finish" not in [name for name, *_ in buckets.calls]


def test_gradients_between_hosts_are_summed_in_buckets(monkeypatch):
    """Those of the trained parameters, from the last backward on; also where memory is lacking."""
    module = nn.Linear(2, 2)
    for areas in (None, (None, None)):
        buckets = Stub(5)
        group, _ = stubbed_group(monkeypatch, module, areas=areas, buckets=buckets)
        assert group.sum_bytes == (5 if areas is None else 15)
        group.watch()
        group.start()
        group.poll()
        group.all_reduce()
        group.forget()
        parameters = [module.weight, module.bias]
        assert [name for name, *_ in buckets.calls] == [
            "watch",
            "start",
            "poll",
            "finish",
            "forget",
        ]
        assert all(subject == parameters for _, subject in (*buckets.calls[:2], buckets.calls[3]))


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "sparse"])
def test_early_sums_leave_out_stages_that_are_frozen_or_have_sparse_gradients(monkeypatch, frozen):
    """Flat memory has a fixed size; a stage without gradients has nothing to sum."""
    module = nn.Linear(2, 2).requires_grad_(requires_grad=False) if frozen else Table()
    buckets = Stub(5)
    group, memory = stubbed_group(monkeypatch, module, areas=("memory",) * 2, buckets=buckets)
    group.watch()
    group.start()
    assert buckets.calls == memory.calls == []
    if frozen:
        group.all_reduce()
        assert SENT == []
    assert buckets.calls == memory.calls == []


def test_optional_steps_of_a_sum_do_nothing_without_buckets_and_memory():
    """Sums by messages begin and end in `all_reduce`; at level 0 no updates are exchanged."""
    first, _ = groups_of([nn.Linear(2, 2), nn.Linear(2, 2)])
    first.watch()
    first.start()
    first.poll()
    first.send_updates()
    first.receive_updates()
    first.forget()
    assert first.sum_bytes == 0
    assert SENT == []


def test_weights_and_buffers_of_the_first_replica_are_copied_to_all_others():
    """Frozen ones too, as they were when they were sent; no rank answers."""
    modules = [Weights(number + 1) for number in range(3)]
    for number, module in enumerate(modules):
        module.weights[0].requires_grad_(requires_grad=False)
        for weight in module.weights:
            weight.data.fill_(number + 1.0)
    groups = groups_of(modules)
    waits = []
    for group in groups:
        group.guard = lambda rank, action: waits.append(rank) or action()
    groups[0].share_weights()
    assert {(sender, peer) for sender, peer, *_ in SENT} == {(1, 3), (1, 5)}
    # Not the name of buffers, which are sent alone later: links know forms of messages by name.
    assert {name for *_, name in SENT} == {UpdateMessage.WEIGHTS.name}
    for weight in modules[0].weights:
        weight.data.zero_()
    for group in groups[1:]:
        group.share_weights()
    assert waits == [1, 1]
    for module in modules[1:]:
        assert all(bool((weight == 1).all()) for weight in module.weights)
        assert module.count.tolist() == [1, 2]


def test_updates_are_sent_by_their_owner_and_copied_by_the_others():
    """What was updated, and no other parameter."""
    modules = [Weights() for _ in range(2)]
    groups = groups_of(modules, optimizer=sgd, zero=1)
    for number, (module, group) in enumerate(zip(modules, groups, strict=True)):
        for weight in module.weights:
            weight.data.fill_(number + 1.0)
        group.send_updates()
    owned = [[group.shards.is_updated_here(w) for w in group._parameters] for group in groups]
    in_threads(2, lambda n: groups[n].receive_updates())
    for module in modules:
        values = [float(weight.detach().max()) for weight in module.weights]
        assert values == [1.0 if first else 2.0 for first in owned[0]]


def test_waves_go_to_all_other_replicas_and_do_not_mix():
    """A wave of the same number is another message; the order of arrivals is that of the ranks."""
    groups = groups_of([nn.Linear(1, 1) for _ in range(3)])
    waits = []
    for group in groups:
        group.guard = lambda rank, action: waits.append(rank) or action()
    ends = [WaveReplicaExchange(group) for group in groups]
    assert [end.copies for end in ends] == [3] * 3
    for wave in (0, 1):
        for number, end in enumerate(ends):
            end.send_wave(wave, [torch.tensor(10.0 * wave + number), torch.ones(2)])
    assert waits == [3, 5, 1, 5, 1, 3] * 2
    waits.clear()
    for wave in (1, 0):
        for number, end in enumerate(ends):
            rows = end.receive_wave(wave)
            others = [other for other in range(3) if other != number]
            assert [float(row[0]) for row in rows] == [10.0 * wave + other for other in others]
            assert all(len(row) == 2 for row in rows)
    assert waits == [3, 5, 1, 5, 1, 3] * 2
