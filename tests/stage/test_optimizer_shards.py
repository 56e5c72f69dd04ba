"""ZeRO, level 1: replicas that divide the optimizer state train to the bits of those that do not."""

from __future__ import annotations

import re

import pytest
import torch
from tests.stage.gradients.jobs import SCHEDULES, batch, model, trained
from tests.stage.gradients.test_replicas_in_processes import over_network
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PlanError, SettingError
from penstock.optim.update import Update
from penstock.stage.gradients.replica_messages import ReplicaMessages
from penstock.stage.optimizer_shards import OptimizerShards
from penstock.transport.in_process import Exchange, MemoryTransport


def adamw(parameters):
    """Return an optimizer with two tensors and a counter for each parameter."""
    return torch.optim.AdamW(parameters, lr=0.01)


def groups(name, parameter):
    """Return other options for vectors than for matrices."""
    return {"lr": 0.03, "weight_decay": 0.0} if parameter.ndim < 2 else {}


#: Options that need all gradients at once, or change how they are used.
OPTIONS = {
    "plain": {"accumulate": 1},
    "accumulated": {},
    "clipped": {"clip_grad_norm": 0.1},
    "clipped values": {"clip_grad_value": 0.01},
    "scaled": {"scaler": True},
    "skipped": {"on_nonfinite": "skip", "accumulate": 1},
    "groups": {"optimizer": adamw, "parameter_groups": groups},
    "state from the constructor": {"optimizer": lambda p: torch.optim.Adagrad(p, lr=0.1)},
}


def assert_equal(result, expected):
    """Compare losses, weights and the whole optimizer state to the bit."""
    assert result["losses"] == expected["losses"]
    for name, value in expected["weights"].items():
        assert torch.equal(result["weights"][name], value), name
    torch.testing.assert_close(result["state"], expected["state"], rtol=0, atol=0)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_divided_state_trains_to_the_same_bits(schedule, options):
    """With a parameter that is frozen and thawed, one that few micro-batches use, and one unused."""
    expected = trained(schedule, options, "threads")
    assert_equal(trained(schedule, {**options, "zero": 1}, "threads"), expected)


@pytest.mark.parametrize(
    ("far", "schedule", "options"),
    [
        ((), "three", {"accumulate": 1}),
        ((), "both ways", {"clip_grad_norm": 0.1}),
        ((1,), "three", {"accumulate": 1}),
    ],
    ids=["shared memory", "shared memory and clipping", "between hosts"],
)
def test_processes_train_to_the_bits_of_threads(far, schedule, options):
    """Sums in shared memory, and in buckets between hosts; rank 0 has the whole state."""
    expected = trained(schedule, options, "threads")
    ranks = ps.Schedule.parse(SCHEDULES[schedule]).ranks
    zero = {**options, "zero": 1}
    first, *others = ps.launch(over_network, ranks, far, schedule, zero, threads=1)
    assert_equal(first, expected)
    for result in others:
        for name, value in expected["weights"].items():
            assert torch.equal(result["weights"][name], value), name


class Tied(nn.Linear):
    """A layer that uses the weight of another one."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(6, 6)
        self.weight = source.weight


def tied_model():
    """Return a model whose first and last layer share a weight, and which has a batch norm."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        first = nn.Linear(6, 6)
        return nn.Sequential(first, nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Tanh(), Tied(first))


def pipeline(network, schedule, zero, **options):
    """Return a pipeline of two stages, with ranks as threads."""
    return ps.Pipeline(
        network,
        loss=functional.mse_loss,
        optimizer=adamw,
        balance=[2, 3],
        schedule=schedule,
        executor="threads",
        zero=zero,
        **options,
    )


def tied_batch(number):
    """Return eight samples."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


def test_weights_of_several_stages_schedulers_and_averages_are_the_same_to_the_bit():
    """What is stepped at its home alone stays there; averages see the weights of all owners."""
    results = []
    for zero in (0, 1):
        pipe = pipeline(tied_model(), ps.schedule("chimera", 2, 4), zero)
        scheduler = pipe.scheduler(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2))
        average = pipe.ema(0.9)
        for number in range(5):
            pipe.train_batch(*tied_batch(number))
            scheduler.step()
            average.update()
        results.append((pipe.state_dict(), average.state_dict(), pipe.optimizer_state_dict()))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def held_state(pipe):
    """Return by stage and replica the bytes of optimizer state."""
    stages = pipe._assembly.stages
    return [
        sum(
            tensor.nbytes
            for state in stage.update.optimizer.state.values()
            for tensor in state.values()
        )
        for stage in stages
    ]


def test_replicas_hold_parts_of_the_state_also_after_saving_and_loading(tmp_path):
    """The whole state exists on the first replica for as long as it is copied, and no longer."""
    schedule = ps.schedule("1f1b", 2, 4, replicas=2)
    pipe = pipeline(model(), schedule, 1)
    whole = pipeline(model(), schedule, 0)
    for number in range(2):
        pipe.train_batch(*batch(number))
        whole.train_batch(*batch(number))
    parts, wholes = held_state(pipe), held_state(whole)
    by_stage = {}
    for stage, size in zip(pipe._assembly.stages, parts, strict=True):
        by_stage[stage.index] = by_stage.get(stage.index, 0) + size
    for stage, size in zip(whole._assembly.stages, wholes, strict=True):
        assert by_stage[stage.index] == size
    pipe.save(tmp_path)
    assert held_state(pipe) == parts
    pipe.load(tmp_path)
    assert held_state(pipe) == parts
    pipe.load_optimizer_state_dict(whole.optimizer_state_dict())
    assert held_state(pipe) == parts


@pytest.mark.parametrize(
    ("before", "after"),
    [((1, "chimera", {}), (0, "1f1b", {})), ((0, "1f1b", {}), (1, "1f1b", {"replicas": 2}))],
    ids=["divided, then whole", "whole, then divided"],
)
def test_checkpoints_do_not_know_how_state_was_divided(tmp_path, before, after):
    """A run goes on under another level and other copies, as under those of the checkpoint."""
    zero, name, options = before
    pipe = pipeline(model().double(), ps.schedule(name, 2, 4, **options), zero)
    for number in range(2):
        pipe.train_batch(*(tensor.double() for tensor in batch(number)))
    pipe.save(tmp_path)
    results = []
    for level, name, options in (after, (0, *after[1:])):
        resumed = pipeline(model().double(), ps.schedule(name, 2, 4, **options), level)
        resumed.load(tmp_path)
        for number in range(2, 4):
            resumed.train_batch(*(tensor.double() for tensor in batch(number)))
        results.append((resumed.state_dict(), resumed.optimizer_state_dict()))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_gradient_hooks_are_refused_beside_divided_state():
    """A hook would have no effect, and a user would believe that it had."""
    with pytest.raises(SettingError, match="zero=1 and gradient_hook='fp16'"):
        pipeline(model(), ps.schedule("chimera", 2, 4), 1, gradient_hook="fp16")


class Coupled(torch.optim.SGD):
    """An optimizer of a user, which may look at all of its parameters."""


@pytest.mark.parametrize("zero", [2, 3])
def test_levels_that_divide_gradients_name_fully_shard(zero):
    """Copies of a stage divide the state alone; FSDP2 divides the rest."""
    message = f"zero={zero}: copies of a stage divide optimizer state alone .* fully_shard"
    with pytest.raises(SettingError, match=message):
        pipeline(model(), ps.schedule("chimera", 2, 4), zero)


def test_an_optimizer_that_may_couple_parameters_is_refused():
    """Its update of a part of the parameters need not be that part of its update of all."""
    with pytest.raises(SettingError, match=re.escape("Coupled may compute an update from several")):
        ps.Pipeline(
            model(),
            loss=functional.mse_loss,
            optimizer=lambda parameters: Coupled(parameters, lr=0.1),
            balance=[2, 3],
            schedule=ps.schedule("chimera", 2, 4),
            executor="threads",
            zero=1,
        )


def test_a_plan_says_whether_state_is_divided_and_an_argument_overrules_it(cluster_of_two):
    """Plans of level 1 run; those of higher levels name the mesh."""
    profile, cluster = cluster_of_two
    plan = ps.plan(profile, cluster, batch=12, zero=1, stages=1, schedules=["gpipe"])
    assert plan.zero == 1
    options = {"loss": functional.mse_loss, "optimizer": adamw, "executor": "threads"}
    for zero, owned in ((None, True), (0, False)):
        pipe = ps.Pipeline(model(), plan, **options, zero=zero)
        pipe.train_batch(*batch(0))
        first, second = held_state(pipe)
        assert (first + second < 2 * max(first, second)) is owned
    plan = ps.plan(profile, cluster, batch=12, zero=3, stages=1, schedules=["gpipe"])
    with pytest.raises(PlanError, match="run it over a mesh with parallelize="):
        ps.Pipeline(model(), plan, **options)


@pytest.fixture
def cluster_of_two():
    """Return a profile of the model, and two devices on one host."""
    x, _ = batch(0)
    profile = ps.profile(model(), x, batch=12, repeats=1)
    return profile, ps.cluster("local:2")


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
    exchange, replicas = Exchange(), []
    for rank in range(count):
        parameters = [nn.Parameter(torch.full((size,), rank + 1.0)) for size in sizes]
        for place in frozen:
            parameters[place].requires_grad_(requires_grad=False)
        update = Update.make(parameters, optimizer)
        messages = ReplicaMessages(
            stage,
            tuple(range(count)),
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
