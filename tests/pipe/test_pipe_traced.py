"""A `Pipe` of a traced model: calls, gradients, random numbers and names are those of the model."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import ChainError, SettingError

X = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
Y = torch.arange(8) % 3


class Residual(nn.Module):
    """A model with a skip, a scale that is an input, a tied weight and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.body = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.body.weight
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 3)

    def forward(self, x, scale=None):
        """Return the scores."""
        scale = torch.ones(len(x), 1) if scale is None else scale
        value = torch.relu(self.stem(x))
        value = value + self.dropout(torch.tanh(self.body(value)))
        value = self.again(value) * scale
        return {"scores": self.head(value), "skip": x}


def make_model(dropout: float = 0.0) -> Residual:
    """Return the model, the same at every call."""
    torch.manual_seed(0)
    return Residual(dropout)


def make_pipe(model=None, balance=(2, 2), **options) -> ps.Pipe:
    """Return a Pipe of the model on CPU threads."""
    options = {"chunks": 4, "devices": ["cpu"] * len(balance), **options}
    return ps.Pipe(ps.chain(model or make_model(), X), balance, **options)


def gradients(model, call):
    """Return the loss of a call, and the gradients of a model by name."""
    loss = functional.cross_entropy(call(model)["scores"], Y)
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("balance", [(4,), (1, 3), (2, 2), (1, 1, 1, 1)])
def test_gradients_are_those_of_the_plain_model(balance, checkpoint):
    """Under every cut and every checkpoint mode; they are in the model's own parameters."""
    expected_loss, expected = gradients(make_model(), lambda model: model(X))
    model = make_model()
    pipe = make_pipe(model, balance, checkpoint=checkpoint)
    loss = functional.cross_entropy(pipe(X)["scores"], Y)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected_loss)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name])


def test_outputs_have_the_class_of_the_model_for_other_numbers_of_samples():
    """The last batch of an epoch is smaller."""
    pipe, plain = make_pipe(), make_model()
    for samples in (8, 5, 2):
        output = pipe(X[:samples])
        assert list(output) == ["scores", "skip"]
        torch.testing.assert_close(output, plain(X[:samples]))


def test_inputs_may_be_given_by_keyword():
    """As Trainer and others call models; each form of inputs is traced once."""
    pipe, plain = make_pipe(), make_model()
    scale = torch.rand(8, 1)
    torch.testing.assert_close(pipe(x=X, scale=scale), plain(x=X, scale=scale))
    with pytest.raises(SettingError, match="scale: inputs by keyword are for a Pipe of a traced"):
        pipe(X, scale=scale)
    sequential = ps.Pipe(nn.Sequential(nn.Linear(5, 3)), [1], devices=["cpu"])
    with pytest.raises(SettingError, match="x: inputs by keyword are for"):
        sequential(x=X)


def test_a_module_with_an_example_is_traced():
    """`ps.Pipe(model, …, example=x)` is `ps.Pipe(ps.chain(model, x), …)`."""
    pipe = ps.Pipe(make_model(), [2, 2], devices=["cpu"] * 2, example=X)
    torch.testing.assert_close(pipe(X), make_model()(X))
    with pytest.raises(TypeError, match=r"not Residual; any other nn\.Module needs an example"):
        ps.Pipe(make_model(), [2, 2])


def test_a_chain_of_a_sequential_is_that_sequential():
    """It keeps its names; nested layers get numbers."""
    layers = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    pipe = ps.Pipe(ps.chain(layers), [1, 2], devices=["cpu"] * 2)
    assert sorted(pipe.sequential_state_dict()) == sorted(layers.state_dict())
    nested = nn.Sequential(nn.Sequential(nn.Linear(5, 4), nn.ReLU()), nn.Linear(4, 3))
    flat = ps.Pipe(ps.chain(nested), [1, 2], devices=["cpu"] * 2)
    torch.testing.assert_close(flat(X), nested(X))


def test_states_have_the_names_of_the_model_and_load_under_any_balance():
    """Also both names of the tied weight."""
    plain = make_model()
    pipe = make_pipe(balance=(1, 3))
    assert sorted(pipe.sequential_state_dict()) == sorted(plain.state_dict())
    with torch.no_grad():
        for weight in plain.parameters():
            weight.add_(1)
    pipe.load_state_dict(plain.state_dict())
    torch.testing.assert_close(pipe(X), plain(X))
    other = make_pipe(balance=(3, 1))
    other.load_state_dict(pipe.state_dict())
    torch.testing.assert_close(other(X), plain(X))


def test_random_numbers_depend_on_neither_the_cut_nor_the_recompute():
    """Dropout masks of a layer and a micro-batch are the same in every pipe of one seed."""
    results = []
    for balance, checkpoint in (((4,), "never"), ((2, 2), "always"), ((1, 1, 2), "except_last")):
        model = make_model(0.5)
        pipe = make_pipe(model, balance, checkpoint=checkpoint)
        torch.manual_seed(3)
        functional.cross_entropy(pipe(X)["scores"], Y).backward()
        results.append([weight.grad for weight in model.parameters()])
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])
    calm = make_pipe(make_model(0.5)).eval()
    torch.testing.assert_close(calm(X), make_model(0.5).eval()(X))


def test_a_schedule_with_the_loss_inside_has_the_same_gradients():
    """1F1B needs it."""

    def loss_of(output, target):
        return functional.cross_entropy(output["scores"], target)

    expected_loss, expected = gradients(make_model(), lambda model: model(X))
    model = make_model()
    # The tied weight is used by the second and the third layer.
    pipe = make_pipe(model, (1, 3), schedule="1f1b", loss=loss_of)
    loss = pipe(X, Y)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected_loss)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name])


def test_a_model_that_changes_is_traced_anew():
    """A graph of the model as it was would train something else."""
    model = make_model(0.5)
    pipe = make_pipe(model)
    pipe(X)
    model.dropout.p = 0.0
    expected = copy.deepcopy(model)
    torch.testing.assert_close(pipe(X), expected(X))
    model.head = nn.Linear(6, 3)
    with pytest.raises(ChainError, match="is not the model that was traced"):
        pipe(X)


def test_gradients_of_inputs_are_refused():
    """Layers of several partitions read the inputs."""
    with pytest.raises(SettingError, match=r"detach\(\) the input"):
        make_pipe()(X.clone().requires_grad_())


def test_libraries_see_where_the_partitions_are():
    """Trainer and Accelerate leave a model with a device map in its place."""
    assert make_pipe().hf_device_map == {"partitions.0": "cpu", "partitions.1": "cpu"}
    assert make_pipe().accepts_loss_kwargs is False


def test_parameters_and_modules_are_those_of_the_model():
    """Libraries choose weights by name and by the type of their module, and load optimizers in the
    order of the model."""
    model = make_model()
    pipe = make_pipe(model)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in pipe.named_parameters()] == names
    assert all(
        ours is theirs for ours, theirs in zip(pipe.parameters(), model.parameters(), strict=True)
    )
    assert list(pipe.modules())[1:] == list(model.modules())[1:]


class Transformer(nn.Module):
    """A layer norm, and a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(6))
        self.stem = nn.Linear(5, 6)
        self.first = nn.LayerNorm(6)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        """Return the scores."""
        return self.head(self.drop(self.first(self.stem(x) + self.shift)))


def make_transformer() -> Transformer:
    """Return the model, the same at every call."""
    torch.manual_seed(0)
    return Transformer()


def test_layer_norms_get_no_weight_decay_from_trainer():
    """It looks for their type; by the names alone it would decay them."""
    pytest.importorskip("transformers")
    from transformers.trainer_pt_utils import get_parameter_names

    model = make_transformer()
    expected = get_parameter_names(model, [nn.LayerNorm])
    assert get_parameter_names(make_pipe(model, (2, 1)), [nn.LayerNorm]) == expected
    assert "shift" in expected
    assert not any("first" in name for name in expected)


def test_the_state_has_the_names_of_the_model_and_every_parameter_once():
    """Also a parameter of the model itself; it loads into the plain model and back."""
    plain, pipe = make_transformer().eval(), make_pipe(make_transformer(), (1, 2)).eval()
    assert sorted(pipe.state_dict()) == sorted(plain.state_dict())
    doubled = {name: 2 * value for name, value in pipe.state_dict().items()}
    plain.load_state_dict(doubled)
    pipe.load_state_dict(doubled)
    torch.testing.assert_close(pipe(X), plain(X))
    with pytest.raises(SettingError, match="leave assign out"):
        pipe.load_state_dict(doubled, assign=True)
    with pytest.raises(RuntimeError, match="Missing key"):
        pipe.load_state_dict({"shift": doubled["shift"]})


def test_modes_of_the_pipe_and_of_the_model_are_one():
    """`from_pretrained` leaves a model in evaluation mode, and Trainer calls `train()`."""
    model = make_transformer().eval()
    pipe = make_pipe(model, (2, 1))
    expected = make_transformer().eval()(X)
    torch.testing.assert_close(pipe(X), expected)
    pipe.train()
    assert model.drop.training
    assert not torch.equal(pipe(X), pipe(X))
    model.eval()
    torch.testing.assert_close(pipe(X), expected)
    model.drop.train()
    assert not torch.equal(pipe(X), pipe(X))
    pipe.eval()
    torch.testing.assert_close(pipe(X), expected)


def test_settings_of_modules_of_the_pipe_are_those_of_the_model():
    """As in `for module in pipe.modules()`, and by `apply`."""
    plain, pipe = make_transformer(), make_pipe(make_transformer(), (2, 1))

    def change(module):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.LayerNorm):
            nn.init.constant_(module.weight, 0.5)

    torch.testing.assert_close(pipe.apply(change)(X), plain.apply(change)(X))


def test_a_copy_follows_its_own_modules():
    """As of a model that is averaged, or trained from one start several times."""
    pipe = make_pipe(make_transformer(), (2, 1))
    copied = copy.deepcopy(pipe)
    for module in copied.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    torch.testing.assert_close(copied(X), make_transformer().eval()(X))
    copied(X).sum().backward()
    assert all(weight.grad is not None for weight in copied.parameters())
    assert all(weight.grad is None for weight in pipe.parameters())
    assert not torch.equal(pipe(X), pipe(X))


def test_a_safetensors_file_without_the_second_name_of_a_tied_weight_loads(tmp_path):
    """Accelerate saves and loads so: a file has a tied weight once."""
    torch.manual_seed(3)
    source, target = make_pipe(Residual()), make_pipe()
    save_model(source, tmp_path / "model.safetensors")
    assert load_model(target, tmp_path / "model.safetensors") == (set(), [])
    torch.testing.assert_close(target(X), source(X))


def test_missing_keys_have_the_names_of_the_model():
    """The message of a strict load lists them, also of a Pipe in another module."""
    pipe = make_pipe()
    assert pipe.load_state_dict({}, strict=False).missing_keys == list(make_model().state_dict())
    holder = nn.Module()
    holder.net = pipe
    with pytest.raises(RuntimeError, match=r'Missing key.*: "net.stem.weight", "net.stem.bias"'):
        holder.load_state_dict({})


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double])
def test_another_dtype_after_tracing_is_refused(convert):
    """The graphs hold for the dtype that the parameters had; Fabric's "bf16-true" converts them."""
    pipe = make_pipe()
    with pytest.raises(SettingError, match="before it becomes a Pipe"):
        convert(pipe)
    assert pipe.float() is pipe
    assert pipe(X)["scores"].dtype == torch.float32


def test_trainer_smooths_labels_as_for_the_model():
    """It reads the configuration, shifts labels by the name of the class, and may add a number to
    the inputs.
    """
    model = make_model()
    pipe = make_pipe(model)
    assert not hasattr(pipe, "config")
    model.config = SimpleNamespace(problem_type=None)
    assert pipe.config is model.config
    assert pipe._get_name() == "Residual"
    assert repr(pipe).startswith("Pipe(\n")
    assert not pipe.accepts_loss_kwargs
    with pytest.raises(SettingError, match="num_items_in_batch"):
        pipe(X, num_items_in_batch=8)
    model.accepts_loss_kwargs = True
    assert pipe.accepts_loss_kwargs
    torch.testing.assert_close(pipe(x=X, num_items_in_batch=8), model(X))
    layers = ps.Pipe(nn.Sequential(nn.Linear(3, 4)), [1])
    assert layers._get_name() == "Pipe"
    assert not layers.accepts_loss_kwargs
    with pytest.raises(AttributeError, match="no attribute 'config'"):
        _ = layers.config


def test_trainer_counts_targets_as_for_the_model():
    """A causal language model shifts its targets, and Trainer divides by their number."""
    model = make_transformer()
    pipe = make_pipe(model, (2, 1))
    assert pipe.loss_type is None
    model.loss_type = "ForCausalLM"
    assert pipe.loss_type == "ForCausalLM"
    model.config = SimpleNamespace(is_encoder_decoder=True)
    assert pipe.loss_type is None


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
    example = {"x": X, "labels": Y} if chunks == 1 else {"x": X}
    pipe = ps.Pipe(
        copy.deepcopy(model), [1, 1], chunks=chunks, devices=["cpu"] * 2, example=example
    )
    return model, pipe


@pytest.mark.parametrize("batches", [1, 2])
def test_a_loss_from_labels_is_divided_by_the_number_of_targets_of_trainer(batches):
    """It counts those of all accumulated batches, which have different numbers of them here. The
    graph holds for every number.
    """
    model, pipe = make_labelled(1)
    labels = Y.clone()
    labels[1:4] = -100
    assert pipe.accepts_loss_kwargs
    for number in range(2):
        count = (labels != -100).sum() if batches == 1 else (labels != -100).sum() + 8
        for batch in (labels, Y)[:batches]:
            losses = []
            for trained in (model, pipe):
                targets = batch.roll(number)
                loss = trained(x=X, labels=targets, num_items_in_batch=count + number)["loss"]
                loss.backward()
                losses.append(loss.detach())
            torch.testing.assert_close(losses[1], losses[0])
    for trained, plain in zip(pipe.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(trained.grad, plain.grad)
    counted = pipe(x=X, labels=labels, num_items_in_batch=10)["loss"]
    torch.testing.assert_close(counted, model(X, labels, num_items_in_batch=10)["loss"])
    torch.testing.assert_close(pipe(x=X, labels=labels)["loss"], model(X, labels)["loss"])


def test_a_loss_from_labels_of_several_micro_batches_is_refused():
    """Each has a loss of its own; a loss that is computed from the outputs takes the number."""
    model, pipe = make_labelled(2)
    with pytest.raises(SettingError, match=r"chunks=2.*compute_loss_func= of Trainer"):
        pipe(x=X, labels=Y, num_items_in_batch=torch.tensor(8))
    output = pipe(x=X, num_items_in_batch=torch.tensor(8))
    torch.testing.assert_close(output, model(X))


class Normed(nn.Module):
    """A batch norm in a traced model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        """Return the scores."""
        return self.head(self.norm(self.stem(x)))


def test_deferred_batch_norm_is_refused_for_a_traced_model():
    """A graph calls no modules, so that nothing would be deferred."""
    chain = ps.chain(Normed(), X)
    with pytest.raises(SettingError, match=r"Normed is traced: .* statistics of norm at every"):
        ps.Pipe(chain, [1, 2], devices=["cpu"] * 2, deferred_batch_norm=True)
    with pytest.raises(SettingError, match="Normed is traced"):
        ps.Pipeline(chain, loss=functional.cross_entropy, balance=[3], deferred_batch_norm=True)


class Embedded(nn.Module):
    """A model with an embedding that it names, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 3)

    def get_input_embeddings(self):
        """Return the embedding."""
        return self.table

    def forward(self, tokens):
        """Return the scores."""
        return self.head(self.table(tokens))


def test_a_hook_on_the_input_embeddings_runs_as_neftune_of_trainer_needs_it():
    """The model is traced again with the hook, and without it when it is removed."""
    model, tokens = Embedded(), torch.arange(4)
    pipe = ps.Pipe(ps.chain(model, tokens), [1, 1], chunks=2, devices=["cpu"] * 2)
    before = pipe(tokens)
    hook = pipe.get_input_embeddings().register_forward_hook(lambda *call: call[2] + 1.0)
    shifted = pipe(tokens)
    assert torch.allclose(shifted, model(tokens))
    assert not torch.allclose(shifted, before)
    hook.remove()
    assert torch.equal(pipe(tokens), before)
    assert not hasattr(make_pipe(), "get_input_embeddings")
