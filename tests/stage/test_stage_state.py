"""The model's state under its own names, independent of the cut."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.conformance.models import CASES, lengths_of, made
from tests.conformance.random_programs import random_schedule
from tests.conformance.reference import differences, layers_of
from torch import nn

import penstock as ps
from penstock.errors import SettingError
from penstock.stage import stage_state
from penstock.stage.stage_state import (
    collect,
    collect_grads,
    copy_into_stages,
    owned_tensors,
)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [2, 5, 9])
def test_the_state_is_the_models_own_under_any_placement(name, seed):
    """Names, order of ranks and stages, buffers: none depends on the cut."""
    case = CASES[name]
    model, _, _ = made(case)
    schedule = random_schedule(seed, 4, 3, 2)
    pipe = ps.Pipeline(
        model,
        loss=case.loss,
        balance=lengths_of(len(layers_of(model)), 4),
        schedule=schedule,
        executor="threads",
    )
    state = pipe.state_dict()
    assert differences(state, dict(model.state_dict())) == []
    next(iter(state.values())).add_(1)
    assert differences(state, dict(model.state_dict())) != []  # it is a copy


def test_a_state_is_loaded_completely_or_not_at_all():
    """A partly loaded state would be a mixture of two models."""
    model, _, _ = made(CASES["mlp"])
    pipe = ps.Pipeline(model, loss=CASES["mlp"].loss, balance=[3, 4], executor="threads")
    before = pipe.state_dict()
    values = {name: tensor + 1 for name, tensor in before.items()}
    with pytest.raises(SettingError, match=r"it has no 'fc4\.bias'\. With strict=False"):
        pipe.load_state_dict(
            {name: tensor for name, tensor in values.items() if name != "fc4.bias"}
        )
    with pytest.raises(
        SettingError, match=r"fc3\.weight has shape \(2,\) in the state and \(16, 16\) in the model"
    ):
        pipe.load_state_dict({**values, "fc3.weight": torch.zeros(2)})
    with pytest.raises(SettingError, match=r"fc3\.weight has shape \(256,\) in the state and"):
        pipe.load_state_dict({**values, "fc3.weight": values["fc3.weight"].flatten()})
    assert differences(pipe.state_dict(), before) == []
    pipe.load_state_dict(values)
    assert differences(pipe.state_dict(), values) == []


def test_tied_weights_have_both_names_and_lists_of_modules_have_numbers():
    """As in torch's own state_dict of the same model."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)]
    layers[1].weight = layers[0].weight
    pipe = ps.Pipeline(layers, loss=nn.MSELoss(), balance=[2, 1], executor="threads")
    assert list(pipe.state_dict()) == list(nn.Sequential(*layers).state_dict())


def tied_pipeline(**options):
    """Return a pipeline of three stages in which the first and the last share a weight."""
    torch.manual_seed(0)
    layers = [
        nn.Embedding(6, 4, sparse=True),
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        nn.Linear(4, 4),
        nn.Linear(4, 4),
    ]
    layers[4].weight = layers[1].weight
    layers[3].requires_grad_(requires_grad=False)
    pipe = ps.Pipeline(
        nn.Sequential(*layers),
        loss=nn.functional.mse_loss,
        balance=[2, 2, 1],
        executor="threads",
        device="cpu",
        **options,
    )
    return pipe, copy.deepcopy(nn.Sequential(*layers))


def test_without_strictness_names_are_skipped_and_reported():
    """Of the whole model, in both directions; shapes must fit all the same."""
    pipe, _ = tied_pipeline(schedule="gpipe", micro_batches=2)
    before = pipe.state_dict()
    values = {name: tensor + 1 for name, tensor in before.items() if name != "3.bias"}
    result = pipe.load_state_dict({**values, "foreign": torch.ones(1)}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["3.bias"], ["foreign"])
    after = pipe.state_dict()
    assert torch.equal(after.pop("3.bias"), before["3.bias"])
    assert differences(after, values) == []
    with pytest.raises(SettingError, match=r"3\.bias has shape"):
        pipe.load_state_dict({"3.bias": torch.zeros(2)}, strict=False)


def test_of_a_tied_weight_the_first_name_is_enough():
    """A state of `named_parameters` has that one alone."""
    pipe, _ = tied_pipeline(schedule="gpipe", micro_batches=2)
    values = {key: tensor + 1 for key, tensor in pipe.state_dict().items()}
    second = values.pop("4.weight")
    pipe.load_state_dict(values)
    assert torch.equal(pipe.state_dict()["4.weight"], second)
    assert pipe.load_state_dict(values, strict=False).missing_keys == []
    del values["1.weight"]
    with pytest.raises(SettingError, match=r"it has no '1\.weight'"):
        pipe.load_state_dict({**values, "4.weight": second})


@pytest.mark.parametrize(
    ("prefix", "advice"),
    [
        ("module.", r"Take 'module\.' off its names"),
        ("_orig_mod.", r"Take '_orig_mod\.' off its names"),
        ("other.", "With strict=False such names are skipped"),
    ],
)
def test_the_names_of_a_wrapper_are_recognised(prefix, advice):
    """DistributedDataParallel and torch.compile put a prefix before all names."""
    pipe, _ = tied_pipeline(schedule="gpipe", micro_batches=2)
    values = {prefix + name: tensor for name, tensor in pipe.state_dict().items()}
    with pytest.raises(SettingError, match=advice):
        pipe.load_state_dict(values)
    if prefix == "module.":
        with pytest.raises(SettingError, match="With strict=False"):
            pipe.load_state_dict({**pipe.state_dict(), "module.foreign": torch.ones(1)})


def test_the_gradients_of_all_ranks_are_those_of_the_model():
    """Dense, under one name each, zeros where there is none, and none of frozen parameters."""
    pipe, model = tied_pipeline(schedule="gpipe", micro_batches=1)
    placed, world = pipe._assembly.placed, pipe._world
    empty = collect_grads(world, placed)
    assert all(not grad.any() for grad in empty.values())
    x, y = torch.tensor([0, 1, 1, 5]), torch.randn(4, 4)
    pipe.train_batch(x, y)
    nn.functional.mse_loss(model(x), y).backward()
    expected = {
        name: parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    grads = collect_grads(world, placed)
    assert set(grads) == set(expected) == set(empty)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name])


def test_values_are_copied_into_all_stages_or_into_none():
    """A missing or misshapen tensor of the last stage leaves the first as it was."""
    pipe, _ = tied_pipeline(schedule="gpipe", micro_batches=2)
    placed = pipe._assembly.placed
    before = pipe.state_dict()
    values = {name: tensor + 1 for name, tensor in before.items()}
    for change in ({"4.bias": torch.zeros(9)}, {"4.bias": None}):
        damaged = {
            name: tensor for name, tensor in {**values, **change}.items() if tensor is not None
        }
        with pytest.raises(SettingError, match=r"4\.bias"):
            copy_into_stages(placed, damaged)
        assert differences(pipe.state_dict(), before) == []
    copy_into_stages(placed, values)
    assert differences(pipe.state_dict(), values) == []


def test_a_replica_is_no_home_and_owns_its_tensors_on_its_own_rank():
    """The first rank of a stage is its home; a shared tensor belongs to the home of the first."""
    pipe = ps.Pipeline(
        [nn.Linear(4, 4), nn.Linear(4, 4)],
        loss=nn.functional.mse_loss,
        balance=[1, 1],
        schedule=ps.Schedule.parse("0F0 1F0 1B0 0B0 0U1 1U1\n0F1 1F1 1B1 0B1 0U1 1U1"),
        executor="threads",
        device="cpu",
    )
    placed = pipe._assembly.placed
    homes = [placed.is_home(stage) for stage in placed.local]
    assert homes == [True, True, False, False]
    assert placed.layers_of_rank() == {0: [0, 1]}
    for stage in placed.local:
        names = {f"{stage.index}.weight", f"{stage.index}.bias"}
        assert set(owned_tensors(placed, stage)) == names
        assert set(owned_tensors(placed, stage, 1)) == names
    tied, _ = tied_pipeline(schedule="gpipe", micro_batches=2)
    placed = tied._assembly.placed
    last = placed.local[-1]
    assert set(owned_tensors(placed, last)) == {"4.bias"}
    first = placed.local[0]
    assert set(owned_tensors(placed, first)) == {"0.weight", "1.weight", "1.bias"}
    assert set(owned_tensors(placed, first, 2)) == {"0.weight", "1.bias"}


def test_replicas_gather_shared_tensors_with_the_home_which_alone_sends_them(monkeypatch):
    """All processes that share a tensor take part in making it whole."""
    pipe = ps.Pipeline(
        [nn.Linear(4, 4), nn.Linear(4, 4)],
        loss=nn.functional.mse_loss,
        balance=[1, 1],
        schedule=ps.Schedule.parse("0F0 1F0 1B0 0B0 0U1 1U1\n0F1 1F1 1B1 0B1 0U1 1U1"),
        executor="threads",
        device="cpu",
    )
    placed, world = pipe._assembly.placed, pipe._world
    wholes = []
    monkeypatch.setattr(stage_state, "whole", lambda tensor: wholes.append(tensor) or tensor)
    replica = placed.local[3].layers[0].module
    for sharded, count in (([], 4), ([replica.weight], 6)):
        monkeypatch.setattr(
            stage_state,
            "is_sharded",
            lambda tensor, sharded=sharded: any(tensor is other for other in sharded),
        )
        wholes.clear()
        state = collect(world, placed)
        assert len(wholes) == count
        assert list(state) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        homes = [stage.layers[0].module for stage in placed.local[:2]]
        assert [state[f"{n}.weight"] is module.weight for n, module in enumerate(homes)]


def test_gradients_that_are_missing_are_zeros_of_the_dtype_of_their_parameter():
    """As those that exist are; the first batch of a model in double precision included."""
    pipe = ps.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(),
        loss=nn.functional.mse_loss,
        balance=[1, 1],
        executor="threads",
        device="cpu",
    )
    grads = collect_grads(pipe._world, pipe._assembly.placed)
    assert list(grads) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert {grad.dtype for grad in grads.values()} == {torch.float64}


def test_a_tensor_that_later_stages_share_belongs_to_the_first_of_them():
    """Not to the first stage of the model, which does not have it."""
    layers = [nn.Linear(4, 4) for _ in range(3)]
    layers[2].weight = layers[1].weight
    pipe = ps.Pipeline(
        layers,
        loss=nn.functional.mse_loss,
        balance=[1, 1, 1],
        executor="threads",
        device="cpu",
    )
    placed = pipe._assembly.placed
    assert [set(owned_tensors(placed, stage)) for stage in placed.local] == [
        {"0.weight", "0.bias"},
        {"1.weight", "1.bias"},
        {"2.bias"},
    ]


class Named(nn.Sequential):
    """A model with a second name for the weight of a layer."""

    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self.first = self[0].weight


def test_names_that_a_container_gives_to_tensors_of_its_layers_are_in_the_state():
    """As in torch's own; the state of the model is loaded and returned under all names."""
    model = Named()
    pipe = ps.Pipeline(
        model, loss=nn.functional.mse_loss, balance=[1, 1], executor="threads", device="cpu"
    )
    state = pipe.state_dict()
    assert set(state) == {"first", "0.weight", "0.bias", "1.weight", "1.bias"}
    assert torch.equal(state["first"], state["0.weight"])
    values = {name: tensor + 1 for name, tensor in state.items()}
    result = pipe.load_state_dict(values)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert torch.equal(model.first, values["first"])


def test_a_state_with_other_names_is_described_in_both_directions():
    """What it lacks and what it has too many."""
    pipe = ps.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        loss=nn.functional.mse_loss,
        balance=[1, 1],
        executor="threads",
        device="cpu",
    )
    state = pipe.state_dict()
    state["2.bias"] = state.pop("1.bias")
    with pytest.raises(SettingError, match=r"it has no '1\.bias'; the model has no '2\.bias'"):
        pipe.load_state_dict(state)


class Scratch(nn.Linear):
    """A layer with a buffer that is no part of the state."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("scratch", torch.zeros(4), persistent=False)


def test_a_buffer_that_is_no_part_of_the_state_is_unexpected_in_one():
    """As in torch: it would not be loaded."""
    model = nn.Sequential(Scratch(), nn.Linear(4, 4))
    pipe = ps.Pipeline(
        model, loss=nn.functional.mse_loss, balance=[1, 1], executor="threads", device="cpu"
    )
    values = {**pipe.state_dict(), "0.scratch": torch.ones(4)}
    assert model.load_state_dict(values, strict=False).unexpected_keys == ["0.scratch"]
    assert pipe.load_state_dict(values, strict=False).unexpected_keys == ["0.scratch"]
    with pytest.raises(SettingError, match=r"the model has no '0\.scratch'"):
        pipe.load_state_dict(values)


@pytest.mark.parametrize("gather", [collect, collect_grads])
def test_every_rank_knows_the_forms_of_the_tensors_that_are_sent(gather):
    """A receiver makes its memory from them, before anything has arrived."""
    layers = [nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2, dtype=torch.float64)]
    pipe = ps.Pipeline(
        layers, loss=nn.functional.mse_loss, balance=[2, 1], executor="threads", device="cpu"
    )
    sent = []

    class World:
        """The ranks of this process; what they send arrives nowhere."""

        local_ranks = pipe._world.local_ranks

        def gather(self, local, forms):
            """Note what is sent, and how it is announced."""
            sent.append((local, forms))
            return {}

    assert gather(World(), pipe._assembly.placed) == {}
    ((local, forms),) = sent
    assert list(map(len, local.values())) == ([7, 2] if gather is collect else [4, 2])
    for rank, tensors in local.items():
        announced = [(form.shape, form.torch_dtype) for form in forms[rank]]
        assert announced == [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


class Twice(nn.Module):
    """A model that calls one layer twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        """Call it before and after the other one."""
        return self.inner(self.norm(self.inner(x)))


def test_a_name_of_several_layers_of_a_traced_model_is_missing_once():
    """As in torch's own result."""
    model = Twice()
    chain = ps.chain(model, torch.randn(4, 4))
    pipe = ps.Pipeline(
        chain,
        loss=nn.functional.mse_loss,
        balance=[len(chain)],
        schedule="gpipe",
        micro_batches=1,
        executor="threads",
        device="cpu",
    )
    missing = pipe.load_state_dict({}, strict=False).missing_keys
    assert sorted(missing) == sorted(model.state_dict())
