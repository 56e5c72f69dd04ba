"""ZeRO, level 1: replicas that divide the optimizer state train to the bits of those that do not."""

from __future__ import annotations

import pytest
import torch
from tests.stage.gradients.jobs import SCHEDULES, batch, model, trained
from tests.stage.gradients.test_replicas_in_processes import over_network
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PlanError, SettingError


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

    __module__ = "torch_extras.optim"


@pytest.mark.parametrize("zero", [2, 3])
def test_levels_that_divide_gradients_name_fully_shard(zero):
    """Copies of a stage divide the state alone; FSDP2 divides the rest."""
    message = f"zero={zero}: copies of a stage divide optimizer state alone .* fully_shard"
    with pytest.raises(SettingError, match=message):
        pipeline(model(), ps.schedule("chimera", 2, 4), zero)


def test_an_optimizer_that_may_couple_parameters_is_refused():
    """Its update of a part of the parameters need not be that part of its update of all."""
    with pytest.raises(SettingError, match=r"torch_extras\.optim\.Coupled may compute an"):
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
