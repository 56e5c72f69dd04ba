"""`Pipe` as an `nn.Module`: its layers, devices, types, state and checkpointing."""

from __future__ import annotations

import copy
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_model, save_model
from tests.pipe import traced
from tests.pipe.layers import make_model, make_pipe
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import SettingError
from penstock.pipe.pipe import Pipe


def test_it_counts_and_gives_its_layers_like_the_sequential():
    """`len`, `iter` and `[]` go through all partitions, in order."""
    model = make_model()
    layers = list(model)
    pipe = Pipe(model, [2, 3], devices=2)
    assert len(pipe) == 5
    assert list(pipe) == layers
    assert pipe[3] is layers[3]
    assert pipe[-1] is layers[4]
    with pytest.raises(IndexError, match="out of range"):
        _ = pipe[5]


def test_partitions_are_sequentials_whose_layers_keep_their_names():
    """Hooks and checkpoints of the peers go by `partitions.<place>.<name>`."""
    pipe = Pipe(
        nn.Sequential(OrderedDict(first=nn.Linear(1, 1), second=nn.Linear(1, 1))),
        [1, 1],
        devices=["cpu", "cpu"],
    )
    assert isinstance(pipe.partitions, nn.ModuleList)
    assert all(isinstance(partition, nn.Sequential) for partition in pipe.partitions)
    assert list(pipe.state_dict()) == [
        "partitions.0.first.weight",
        "partitions.0.first.bias",
        "partitions.1.second.weight",
        "partitions.1.second.bias",
    ]


@pytest.mark.parametrize(
    "move",
    [
        lambda p: p.cuda(),
        lambda p: p.cpu(),
        lambda p: p.to("cuda"),
        lambda p: p.to(0),
        lambda p: p.to(torch.device("cpu")),
        lambda p: p.to(device=0),
        lambda p: p.to(torch.rand(1)),
        lambda p: p.to(tensor=torch.rand(1)),
    ],
)
def test_moving_is_denied(move):
    """Every partition has its own device."""
    with pytest.raises(TypeError, match="denied to move parameters and buffers"):
        move(make_pipe())


def test_casting_is_allowed():
    """The type of numbers is nobody's place."""
    pipe = make_pipe().half().to(torch.double)
    assert pipe(torch.rand(6, 4, dtype=torch.double)).dtype is torch.double


@pytest.mark.parametrize("balance", [[2, 3], [4, 1], [5]])
def test_state_loads_under_another_balance_and_from_and_into_the_plain_model(balance):
    """A checkpoint must not be tied to a cut."""
    source, plain = make_pipe(), make_model()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1.0)
    reloaded = Pipe(make_model(), balance, devices=2)
    reloaded.load_state_dict(source.state_dict())
    plain.load_state_dict(reloaded.sequential_state_dict())
    again = Pipe(make_model(), balance, devices=2)
    again.load_state_dict(plain.state_dict())
    for pipe_copy in (reloaded, again):
        torch.testing.assert_close(
            pipe_copy.sequential_state_dict(), source.sequential_state_dict(), rtol=0, atol=0
        )


def test_state_loads_where_the_pipe_is_a_part_of_another_module():
    """`load_state_dict` of the whole comes by without asking the Pipe's own. A module beside the
    Pipe may have the name of one of its layers.
    """
    whole = nn.ModuleDict({"body": make_pipe(), "0": nn.Linear(4, 8)})
    plain = nn.ModuleDict({"body": make_model(), "0": nn.Linear(4, 8)})
    with torch.no_grad():
        plain["body"][0].bias.fill_(3.0)
        plain["0"].bias.fill_(5.0)
    whole.load_state_dict(plain.state_dict())
    assert whole["body"][0].bias.tolist() == [3.0] * 8
    assert whole["0"].bias.tolist() == [5.0] * 8


def test_parameters_may_be_replaced_by_those_of_a_state():
    """`assign=True` of torch, for a model that was made on the meta device."""
    with torch.device("meta"):
        model = make_model()
    pipe, state = Pipe(model, [2, 3], devices=["meta"] * 2), make_model().state_dict()
    pipe.load_state_dict(state, assign=True)
    assert torch.equal(pipe[4].bias, state["4.bias"])
    assert not any(parameter.is_meta for parameter in pipe.parameters())


def test_a_layer_may_have_the_name_of_the_partitions():
    """Its keys in the plain model begin as those of a Pipe do."""

    def make():
        inner = nn.Sequential(OrderedDict(inner=nn.Linear(2, 2)))
        return nn.Sequential(OrderedDict(first=nn.Linear(2, 2), partitions=inner))

    plain = make()
    pipe = Pipe(make(), [1, 1], devices=2)
    pipe.load_state_dict(plain.state_dict())
    assert torch.equal(pipe[1].inner.weight, plain.partitions.inner.weight)
    assert list(pipe.sequential_state_dict()) == list(plain.state_dict())
    weights = nn.Sequential(OrderedDict(partitions=nn.ParameterList([torch.ones(2)])))
    pipe = Pipe(copy.deepcopy(weights), [1], devices=1)
    pipe.load_state_dict({"partitions.0": torch.zeros(2)})
    assert pipe[0][0].tolist() == [0.0, 0.0]


def test_a_missing_and_an_unexpected_tensor_are_named():
    """Strictness stays what it is."""
    state = make_model().state_dict()
    state["4.extra"] = state.pop("4.bias")
    state["2"] = torch.ones(1)
    with pytest.raises(
        RuntimeError,
        match=r'(?s)Missing.*"partitions\.1\.4\.bias".*Unexpected.*"2", "partitions\.1\.4\.extra"',
    ):
        make_pipe().load_state_dict(state)


def test_activation_checkpointing_of_trainer_recomputes_all_micro_batches():
    """By both of its names; disabling it brings the mode before back."""
    pipe = Pipe(nn.Sequential(nn.Linear(3, 4)), [1], chunks=2)
    pipe.gradient_checkpointing_enable({"use_reentrant": False})
    pipe.activation_checkpointing_enable()
    assert pipe.checkpoint == "always"
    pipe.gradient_checkpointing_disable()
    assert pipe.checkpoint == "except_last"
    pipe.activation_checkpointing_disable()
    assert pipe.checkpoint == "never"


@pytest.mark.parametrize(
    "settings",
    [
        {"every_n_layers": 2},
        {"offload": True},
        {"activation_checkpointing_kwargs": {"context_fn": None}},
    ],
)
def test_activation_checkpointing_that_a_pipe_has_not_is_refused(settings):
    """The message names the setting."""
    pipe = Pipe(nn.Sequential(nn.Linear(3, 4)), [1])
    old_names = {
        name.replace("activation_", "gradient_"): value for name, value in settings.items()
    }
    for enable, arguments in (
        (pipe.activation_checkpointing_enable, settings),
        (pipe.gradient_checkpointing_enable, old_names),
    ):
        with pytest.raises(SettingError, match="a Pipe recomputes whole partitions"):
            enable(**arguments)
    assert pipe.checkpoint == "except_last"


class Labelled(nn.Module):
    """A model that computes its loss from labels, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x, labels=None, **kwargs):
        """Return the scores, and the loss if there are labels: a mean, or divided by a number."""
        scores = self.head(torch.tanh(self.stem(x)))
        if labels is None:
            return {"scores": scores}
        count = kwargs.get("num_items_in_batch")
        if count is None:
            return {"loss": functional.cross_entropy(scores, labels), "scores": scores}
        total = functional.cross_entropy(scores, labels, reduction="sum")
        return {"loss": total / count, "scores": scores}


def make_labelled(chunks: int) -> tuple[Labelled, ps.Pipe]:
    """Return a model, and a Pipe of an equal one."""
    torch.manual_seed(0)
    model = Labelled()
    example = {"x": traced.X, "labels": traced.Y} if chunks == 1 else {"x": traced.X}
    pipe = ps.Pipe(
        copy.deepcopy(model), [1, 1], chunks=chunks, devices=["cpu"] * 2, example=example
    )
    return model, pipe


def test_states_have_the_names_of_the_model_and_load_under_any_balance():
    """Also both names of the tied weight."""
    plain = traced.make_model()
    pipe = traced.make_pipe(balance=(1, 3))
    assert sorted(pipe.sequential_state_dict()) == sorted(plain.state_dict())
    with torch.no_grad():
        for weight in plain.parameters():
            weight.add_(1)
    pipe.load_state_dict(plain.state_dict())
    torch.testing.assert_close(pipe(traced.X), plain(traced.X))
    other = traced.make_pipe(balance=(3, 1))
    other.load_state_dict(pipe.state_dict())
    torch.testing.assert_close(other(traced.X), plain(traced.X))


def test_libraries_see_where_the_partitions_are():
    """Trainer and Accelerate leave a model with a device map in its place."""
    assert traced.make_pipe().hf_device_map == {"partitions.0": "cpu", "partitions.1": "cpu"}
    assert traced.make_pipe().accepts_loss_kwargs is False


def test_parameters_and_modules_are_those_of_the_model():
    """Libraries choose weights by name and by the type of their module, and load optimizers in the
    order of the model."""
    model = traced.make_model()
    pipe = traced.make_pipe(model)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in pipe.named_parameters()] == names
    assert all(
        ours is theirs for ours, theirs in zip(pipe.parameters(), model.parameters(), strict=True)
    )
    assert list(pipe.modules())[1:] == list(model.modules())[1:]


def test_layer_norms_get_no_weight_decay_from_trainer():
    """It looks for their type; by the names alone it would decay them."""
    pytest.importorskip("transformers")
    from transformers.trainer_pt_utils import get_parameter_names

    model = traced.make_transformer()
    expected = get_parameter_names(model, [nn.LayerNorm])
    assert get_parameter_names(traced.make_pipe(model, (2, 1)), [nn.LayerNorm]) == expected
    assert "shift" in expected
    assert not any("first" in name for name in expected)


def test_the_state_has_the_names_of_the_model_and_every_parameter_once():
    """Also a parameter of the model itself; it loads into the plain model and back."""
    plain, pipe = (
        traced.make_transformer().eval(),
        traced.make_pipe(traced.make_transformer(), (1, 2)).eval(),
    )
    assert sorted(pipe.state_dict()) == sorted(plain.state_dict())
    doubled = {name: 2 * value for name, value in pipe.state_dict().items()}
    plain.load_state_dict(doubled)
    pipe.load_state_dict(doubled)
    torch.testing.assert_close(pipe(traced.X), plain(traced.X))
    with pytest.raises(SettingError, match="leave assign out"):
        pipe.load_state_dict(doubled, assign=True)
    with pytest.raises(RuntimeError, match="Missing key"):
        pipe.load_state_dict({"shift": doubled["shift"]})


def test_a_safetensors_file_without_the_second_name_of_a_tied_weight_loads(tmp_path):
    """Accelerate saves and loads so: a file has a tied weight once."""
    torch.manual_seed(3)
    source, target = traced.make_pipe(traced.Residual()), traced.make_pipe()
    save_model(source, tmp_path / "model.safetensors")
    assert load_model(target, tmp_path / "model.safetensors") == (set(), [])
    torch.testing.assert_close(target(traced.X), source(traced.X))


def test_missing_keys_have_the_names_of_the_model():
    """The message of a strict load lists them, also of a Pipe in another module."""
    pipe = traced.make_pipe()
    assert pipe.load_state_dict({}, strict=False).missing_keys == list(
        traced.make_model().state_dict()
    )
    holder = nn.Module()
    holder.net = pipe
    with pytest.raises(RuntimeError, match=r'Missing key.*: "net.stem.weight", "net.stem.bias"'):
        holder.load_state_dict({})


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double])
def test_another_dtype_after_tracing_is_refused(convert):
    """The graphs hold for the dtype that the parameters had; Fabric's "bf16-true" converts them."""
    pipe = traced.make_pipe()
    with pytest.raises(SettingError, match="before it becomes a Pipe"):
        convert(pipe)
    assert pipe.float() is pipe
    assert pipe(traced.X)["scores"].dtype == torch.float32


def test_another_dtype_of_the_same_size_is_refused():
    """Both halves have two bytes."""
    model = nn.Linear(5, 3).bfloat16()
    pipe = ps.Pipe(ps.chain(model, traced.X.bfloat16()), [1], devices=["cpu"])
    with pytest.raises(SettingError, match=r"convert the model to torch\.float16"):
        pipe.half()


def test_a_pipe_without_state_lacks_the_attributes_of_a_model():
    """As `copy` and `pickle` make it: they ask for attributes before they set any."""
    empty = Pipe.__new__(Pipe)
    for name in ("config", "_traced", "partitions"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(empty, name)


def test_trainer_smooths_labels_as_for_the_model():
    """It reads the configuration, shifts labels by the name of the class, and may add a number to
    the inputs.
    """
    model = traced.make_model()
    pipe = traced.make_pipe(model)
    assert not hasattr(pipe, "config")
    model.config = SimpleNamespace(problem_type=None)
    assert pipe.config is model.config
    assert pipe._get_name() == "Residual"
    assert repr(pipe).startswith("Pipe(\n")
    assert not pipe.accepts_loss_kwargs
    with pytest.raises(SettingError, match="num_items_in_batch"):
        pipe(traced.X, num_items_in_batch=8)
    model.accepts_loss_kwargs = True
    assert pipe.accepts_loss_kwargs
    torch.testing.assert_close(pipe(x=traced.X, num_items_in_batch=8), model(traced.X))
    model.accepts_loss_kwargs = False
    assert not pipe.accepts_loss_kwargs
    layers = ps.Pipe(nn.Sequential(nn.Linear(3, 4)), [1])
    assert layers._get_name() == "Pipe"
    assert not layers.accepts_loss_kwargs
    with pytest.raises(AttributeError, match="no attribute 'config'"):
        _ = layers.config


def test_trainer_counts_targets_as_for_the_model():
    """A causal language model shifts its targets, and Trainer divides by their number."""
    model = traced.make_transformer()
    pipe = traced.make_pipe(model, (2, 1))
    assert pipe.loss_type is None
    model.loss_type = "ForCausalLM"
    assert pipe.loss_type == "ForCausalLM"
    model.config = SimpleNamespace(is_encoder_decoder=False)
    assert pipe.loss_type == "ForCausalLM"
    model.config = SimpleNamespace(is_encoder_decoder=True)
    assert pipe.loss_type is None


@pytest.mark.parametrize("batches", [1, 2])
def test_a_loss_from_labels_is_divided_by_the_number_of_targets_of_trainer(batches):
    """It counts those of all accumulated batches, which have different numbers of them here. The
    graph holds for every number.
    """
    model, pipe = make_labelled(1)
    labels = traced.Y.clone()
    labels[1:4] = -100
    assert pipe.accepts_loss_kwargs
    for number in range(2):
        count = (labels != -100).sum() if batches == 1 else (labels != -100).sum() + 8
        for batch in (labels, traced.Y)[:batches]:
            losses = []
            for trained in (model, pipe):
                targets = batch.roll(number)
                loss = trained(x=traced.X, labels=targets, num_items_in_batch=count + number)[
                    "loss"
                ]
                loss.backward()
                losses.append(loss.detach())
            torch.testing.assert_close(losses[1], losses[0])
    for trained, plain in zip(pipe.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(trained.grad, plain.grad)
    counted = pipe(x=traced.X, labels=labels, num_items_in_batch=10)["loss"]
    torch.testing.assert_close(counted, model(traced.X, labels, num_items_in_batch=10)["loss"])
    torch.testing.assert_close(
        pipe(x=traced.X, labels=labels)["loss"], model(traced.X, labels)["loss"]
    )


def test_a_loss_from_labels_of_several_micro_batches_is_refused():
    """Each has a loss of its own; a loss that is computed from the outputs takes the number."""
    model, pipe = make_labelled(2)
    with pytest.raises(SettingError, match=r"chunks=2.*compute_loss_func= of Trainer"):
        pipe(x=traced.X, labels=traced.Y, num_items_in_batch=torch.tensor(8))
    for no_labels in ({}, {"labels": None}):
        output = pipe(x=traced.X, num_items_in_batch=torch.tensor(8), **no_labels)
        torch.testing.assert_close(output, model(traced.X))
