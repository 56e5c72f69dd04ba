"""A `Pipe` of a traced model: calls, gradients, random numbers and names are those of the model."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.pipe.traced import X, Y, make_model, make_pipe, make_transformer
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import ChainError, SettingError
from penstock.pipe.pipe_traced import prepare_graphs
from penstock.tracing.capture import Form
from penstock.transport.payload import Payload


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


class Doubled(nn.Sequential):
    """Does more than its layers."""

    def forward(self, x):
        """Run them, and double the result."""
        return 2 * super().forward(x)


def test_a_sequential_that_does_more_than_its_layers_is_traced_as_other_modules_are():
    """With an example; one that does not is taken as it is."""
    model = Doubled(nn.Linear(5, 4), nn.Linear(4, 3))
    pipe = ps.Pipe(model, [1, 1], devices=["cpu"] * 2, example=X)
    torch.testing.assert_close(pipe(X), model(X))
    plain = nn.Sequential(nn.Linear(5, 3))
    assert ps.Pipe(plain, [1], devices=["cpu"], example=X)[0] is plain[0]


def test_a_chain_of_a_sequential_is_that_sequential():
    """It keeps its names; nested layers get numbers."""
    layers = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    pipe = ps.Pipe(ps.chain(layers), [1, 2], devices=["cpu"] * 2)
    assert sorted(pipe.sequential_state_dict()) == sorted(layers.state_dict())
    nested = nn.Sequential(nn.Sequential(nn.Linear(5, 4), nn.ReLU()), nn.Linear(4, 3))
    flat = ps.Pipe(ps.chain(nested), [1, 2], devices=["cpu"] * 2)
    torch.testing.assert_close(flat(X), nested(X))


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


def test_graphs_are_traced_before_partitions_run_and_changes_of_drawing_are_told():
    """Partitions in threads would else trace at the same time; those that begin to draw are built
    anew.
    """
    model = make_model(0.0)
    variants = ps.chain(model, X).variants
    micro_batches = [Payload.of({"x": X[:2], "scale": torch.ones(2, 1)})]
    form = Form.of(micro_batches[0].value())
    assert not variants.has(form, training=True)
    prepare_graphs(variants, micro_batches, training=True)
    assert variants.has(form, training=True)
    assert not prepare_graphs(variants, micro_batches, training=True)
    model.dropout.p = 0.5
    assert prepare_graphs(variants, micro_batches, training=True)
    assert not prepare_graphs(variants, micro_batches, training=True)


class Scaled(nn.Module):
    """Draws for inputs with a scale alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.dropout, self.head = nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x, scale=None):
        """Return the scores."""
        value = self.stem(x)
        return self.head(value if scale is None else self.dropout(value) * scale)


def test_inputs_of_another_form_may_need_other_partitions():
    """Their graph draws, and those before do not."""
    variants = ps.chain(Scaled(), X).variants
    plain, scaled = Payload.of({"x": X}), Payload.of({"x": X, "scale": torch.ones(8, 1)})
    assert not prepare_graphs(variants, [plain], training=True)
    assert prepare_graphs(variants, [plain, scaled], training=True)
    assert not prepare_graphs(variants, [plain, scaled], training=True)


def test_gradients_of_inputs_are_refused():
    """Layers of several partitions read the inputs."""
    with pytest.raises(SettingError, match=r"detach\(\) the input"):
        make_pipe()(X.clone().requires_grad_())


def test_modes_of_the_pipe_and_of_the_model_are_one():
    """`from_pretrained` leaves a model in evaluation mode, and Trainer calls `train()`."""
    model = make_transformer().eval()
    pipe = make_pipe(model, (2, 1))
    expected = make_transformer().eval()(X)
    torch.testing.assert_close(pipe(X), expected)
    pipe.train()
    assert model.drop.training
    assert pipe.training
    assert all(partition.training for partition in pipe.partitions)
    assert not torch.equal(pipe(X), pipe(X))
    model.eval()
    torch.testing.assert_close(pipe(X), expected)
    model.drop.train()
    assert not torch.equal(pipe(X), pipe(X))
    pipe.eval()
    assert not pipe.training
    torch.testing.assert_close(pipe(X), expected)


def test_a_pipe_begins_in_the_mode_of_the_model():
    """Of a traced model, and of the layers of a nested nn.Sequential."""
    nested = nn.Sequential(nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5)), nn.Linear(4, 3))
    for model in (make_transformer(), nested):
        for mode in (False, True):
            pipe = ps.Pipe(ps.chain(model.train(mode), X), [2, 1], devices=["cpu"] * 2)
            assert pipe.training is mode
            assert all(part.training is mode for part in model.modules())


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
