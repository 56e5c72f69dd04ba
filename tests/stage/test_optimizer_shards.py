"""The share of one replica in the optimizer state of a stage: updates and state that are exchanged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.errors import SettingError
from penstock.optim.update import Update
from penstock.stage.gradients.replica_messages import ReplicaMessages
from penstock.stage.optimizer_shards import OptimizerShards
from penstock.transport.in_process import Exchange, MemoryTransport


def test_frozen_parameters_do_not_count_in_the_division():
    """They have no state: the trained ones are divided in equal parts."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in (100, 8, 8, 8, 8)]
    parameters[0].requires_grad_(requires_grad=False)
    shards = []
    for rank in range(2):
        update = Update.make(parameters, lambda params: torch.optim.SGD(params, lr=0.1))
        messages = ReplicaMessages(0, (0, 1), rank, transport=None, guard=None)
        shards.append(OptimizerShards(update, parameters, messages))
    for parameter in parameters:
        assert sum(shard.is_updated_here(parameter) for shard in shards) == 1
    for position, shard in enumerate(shards):
        trained = shard.by_owner(parameters[1:])
        assert [len(group) for group in trained] == [2, 2]
        assert all(shard.is_updated_here(parameter) for parameter in trained[position])


def shards_of(sizes, count, optimizer, *, frozen=(), stage=0):
    """Return the shares of some replicas, with parameters of these sizes, and their links."""
    exchange, replicas, ranks = Exchange(), [], (2, 3, 7)[:count]
    for position, rank in enumerate(ranks):
        parameters = [nn.Parameter(torch.full((size,), position + 1.0)) for size in sizes]
        for place in frozen:
            parameters[place].requires_grad_(requires_grad=False)
        update = Update.make(parameters, optimizer)
        messages = ReplicaMessages(
            stage,
            ranks,
            rank,
            MemoryTransport(rank, exchange, 10.0),
            lambda _, call: call(),
        )
        replicas.append((OptimizerShards(update, parameters, messages), update, parameters))
    return replicas, exchange


def plain_adamw(parameters):
    """Return an optimizer whose state is a counter and two averages for each parameter."""
    return torch.optim.AdamW(parameters, lr=0.01, foreach=False)


@pytest.mark.parametrize("count", [2, 3])
def test_updates_of_all_owners_arrive_as_they_were_sent(count):
    """Also where a replica owns nothing, and where a parameter is frozen, which no replica sends until
    it is thawed.
    """
    replicas, exchange = shards_of([4, 2], count, sgd_of, frozen=[1])
    for thawed in (False, True):
        for rank, (shards, update, parameters) in enumerate(replicas):
            for parameter in parameters:
                parameter.data.fill_(rank + 1.0)
            if thawed:
                parameters[1].requires_grad_(requires_grad=True)
                update.refresh()
            shards.send_updates()
            rows = [payload for queue in exchange._payloads.values() for payload in queue]
            assert all(row.tensors for row in rows), "no message is without a tensor"
            for parameter in parameters:
                parameter.data += 100 * shards.is_updated_here(parameter)  # of the next batch
        for shards, _, _ in replicas:
            shards.receive_updates()
        assert not exchange._payloads
        for rank, (_, _, parameters) in enumerate(replicas):
            for place, parameter in enumerate(parameters):
                (owner,) = (
                    other
                    for other, (theirs, _, params) in enumerate(replicas)
                    if theirs.is_updated_here(params[place])
                )
                value = parameter[0].item()
                if owner == rank:
                    assert value == rank + 101.0
                elif place == 0 or thawed:
                    assert value == owner + 1.0
                else:
                    assert value == rank + 1.0


def sgd_of(parameters):
    """Return an optimizer without state."""
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("count", [2, 3])
def test_the_first_replica_gathers_the_state_of_all(count):
    """Tensors, counters and numbers, under the parameters that they belong to. Where no state is
    yet, none is sent; afterwards it is dropped again.
    """
    replicas, exchange = shards_of([4, 2, 3, 1], count, plain_adamw)
    for shards, _, _ in reversed(replicas):
        shards.gather_state()
    assert not exchange._payloads
    for rank, (shards, update, parameters) in enumerate(replicas):
        for place, parameter in enumerate(parameters):
            if shards.is_updated_here(parameter):
                parameter.grad = torch.full_like(parameter, place + 1.0)
        update.optimizer.step()
        for parameter in parameters:
            if parameter in update.optimizer.state:
                update.optimizer.state[parameter]["note"] = rank + 0.5
    held = [len(update.optimizer.state) for _, update, _ in replicas]
    assert sum(held) == 4
    for shards, _, _ in reversed(replicas):
        shards.gather_state()
    assert not exchange._payloads
    assert [len(update.optimizer.state) for _, update, _ in replicas] == [4, *held[1:]]
    first, update, parameters = replicas[0]
    for place, parameter in enumerate(parameters):
        state = update.optimizer.state[parameter]
        (owner,) = (
            rank
            for rank, (shards, _, params) in enumerate(replicas)
            if shards.is_updated_here(params[place])
        )
        assert set(state) == {"step", "exp_avg", "exp_avg_sq", "note"}
        assert state["note"] == owner + 0.5
        assert float(state["step"]) == 1
        average = torch.full_like(parameter, 0.1 * (place + 1.0))
        torch.testing.assert_close(state["exp_avg"], average)
        assert state["exp_avg"].shape == parameter.shape
    update.drop_state_of_replicas()
    assert len(update.optimizer.state) == held[0]
    assert all(first.is_updated_here(parameter) for parameter in update.optimizer.state)


def test_only_state_of_own_parameters_is_sent():
    """A replica may have loaded the state of all; that of the others is old by now."""
    replicas, exchange = shards_of([1, 1, 1], 3, sgd_of)
    for rank, (shards, update, parameters) in enumerate(replicas):
        for parameter in parameters:
            current = shards.is_updated_here(parameter)
            update.optimizer.state[parameter] = {"rank": rank, "current": current}
    for shards, _, _ in reversed(replicas):
        shards.gather_state()
    assert not exchange._payloads
    states = replicas[0][1].optimizer.state.values()
    assert sorted((state["rank"], state["current"]) for state in states) == [
        (rank, True) for rank in range(3)
    ]


def test_state_of_numbers_alone_is_gathered_without_a_message_of_tensors():
    """The text says it all."""
    replicas, exchange = shards_of([1, 1], 2, sgd_of)
    (first, update, _), (second, other_update, other_parameters) = replicas
    owned = [p for p in other_parameters if second.is_updated_here(p)]
    other_update.optimizer.state[owned[0]] = {"count": 3, "name": "a", "flag": True, "none": None}
    second.gather_state()
    first.gather_state()
    assert not exchange._payloads
    (state,) = update.optimizer.state.values()
    assert state == {"count": 3, "name": "a", "flag": True, "none": None}
    assert not first.is_updated_here(next(iter(update.optimizer.state)))


def test_state_is_gathered_under_its_parameter_where_another_one_is_frozen():
    """A frozen parameter has no state and is not among the updated ones, but counts in the order."""
    replicas, exchange = shards_of([2, 1, 1], 2, sgd_of, frozen=[0])
    for shards, update, parameters in replicas:
        for place, parameter in enumerate(parameters[1:], start=1):
            if shards.is_updated_here(parameter):
                update.optimizer.state[parameter] = {"place": place, "momentum": torch.ones(1)}
    for shards, _, _ in reversed(replicas):
        shards.gather_state()
    assert not exchange._payloads
    _, update, parameters = replicas[0]
    assert {id(p): state["place"] for p, state in update.optimizer.state.items()} == {
        id(parameters[1]): 1,
        id(parameters[2]): 2,
    }


def test_state_of_another_dtype_is_another_message():
    """Links know the form of a message by its name, which is the text of the state."""
    texts = []
    for dtype in (torch.float32, torch.bfloat16):
        (_, (shards, update, parameters)), _ = shards_of([1, 1], 2, sgd_of)
        owned = [p for p in parameters if shards.is_updated_here(p)]
        update.optimizer.state[owned[0]] = {"momentum": torch.ones(1, dtype=dtype)}
        shards._messages = SimpleNamespace(
            ranks=(2, 3),
            position=1,
            send_text=lambda rank, number, text: texts.append(text),
            send_row=lambda rank, number, tensors, text: texts.append(text),
        )
        shards.gather_state()
    assert texts[0] == texts[1] != texts[2] == texts[3]


def test_state_of_other_objects_is_refused():
    """The message names the optimizer and the way out."""
    replicas, _ = shards_of([1, 1], 2, sgd_of)
    second, update, parameters = replicas[1]
    for parameter in parameters:
        update.optimizer.state[parameter] = {"history": {1, 2}}
    with pytest.raises(SettingError, match=r"^SGD keeps state that is neither .*set.*: use zero=0"):
        second.gather_state()


def test_a_stage_without_an_optimizer_has_no_state_to_gather():
    """It exchanges nothing, and its parameters are divided all the same."""
    replicas, exchange = shards_of([2, 2], 2, None)
    for shards, _, parameters in replicas:
        shards.gather_state()
        assert [len(group) for group in shards.by_owner(parameters)] == [1, 1]
    assert not exchange._payloads


def test_every_replica_keeps_the_state_of_its_own_parameters():
    """What an optimizer makes in its constructor for the others is dropped at once."""
    replicas, _ = shards_of([2, 2, 2], 2, lambda p: torch.optim.Adagrad(p, lr=0.1))
    for shards, update, parameters in replicas:
        owned = [p for p in parameters if shards.is_updated_here(p)]
        assert list(map(id, update.optimizer.state)) == list(map(id, owned))


def test_parameters_are_divided_by_their_bytes():
    """A long one of 16 bits counts as much as a short one of 64."""
    parameters = [nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.float64,) * 2]
    parameters += [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    parameters += [nn.Parameter(torch.zeros(12, dtype=torch.bfloat16))]
    groups = []
    for rank in range(2):
        messages = ReplicaMessages(0, (0, 1), rank, transport=None, guard=None)
        shards = OptimizerShards(Update.make(parameters, sgd_of), parameters, messages)
        groups.append([p.nbytes for p in shards.by_owner(parameters)[rank]])
    assert [*map(sum, groups)] == [48, 48]
    assert sorted(map(len, groups)) == [2, 3]


@pytest.mark.parametrize("stage", [0, 1])
def test_of_equal_parameters_stages_begin_with_different_replicas(stage):
    """A rank that holds several stages would otherwise have the larger part of each."""
    replicas, _ = shards_of([2], 2, sgd_of, stage=stage)
    owned = [shards.is_updated_here(parameters[0]) for shards, _, parameters in replicas]
    assert owned == [stage == 0, stage == 1]


def test_updates_of_more_parameters_are_another_message():
    """Links know the form of a message by its name; after a thaw a rank sends more."""
    ((shards, update, parameters), _), _ = shards_of([1, 1, 1], 2, sgd_of, frozen=[0])
    names = []
    shards._messages = SimpleNamespace(
        ranks=(2, 3),
        position=0,
        send=lambda number, parts, name: names.append(name),
        receive=lambda number, name: names.append(name) or {},
    )
    for thawed in (False, True):
        parameters[0].requires_grad_(requires_grad=thawed)
        update.refresh()
        shards.send_updates()
        shards.receive_updates()
    assert names[0] == names[1] != names[2] == names[3]


class Coupled(torch.optim.SGD):
    """An optimizer of a user, which may update parameters together."""


def test_an_optimizer_that_is_not_one_of_torch_is_refused():
    """The message names the stage and the class; without an optimizer nothing is refused."""
    name = rf"^zero=1 divides the parameters of stage 5 .* {__name__}\.Coupled may compute an"
    with pytest.raises(SettingError, match=name):
        shards_of([1, 1], 2, lambda parameters: Coupled(parameters, lr=0.1), stage=5)
    shards_of([1, 1], 2, None, stage=5)
