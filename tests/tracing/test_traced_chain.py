"""Conversion of modules into a chain: order, names, shared tensors, and errors."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.errors import ChainError
from penstock.model.chain import TensorFacts
from penstock.tracing.traced_chain import chain
from penstock.zoo.catalogue import model, models

#: Nested Sequentials: a number n of 1 or 2 is a Linear of width 4 with or without bias, 0 a ReLU, a
#: list a Sequential of its own.
TREES = st.recursive(st.integers(0, 2), lambda inner: st.lists(inner, max_size=4), max_leaves=12)


def built(tree):
    """Return the module that a tree describes."""
    if isinstance(tree, list):
        return nn.Sequential(*map(built, tree))
    return nn.Linear(4, 4, bias=tree == 1) if tree else nn.ReLU()


def leaves(tree):
    """Return the number of modules in a tree that are not Sequentials."""
    return sum(map(leaves, tree)) if isinstance(tree, list) else 1


@given(st.lists(TREES, min_size=1, max_size=4).filter(leaves))
@settings(deadline=None, max_examples=60)
def test_nested_sequentials_are_flattened_in_the_order_of_running_under_the_names_of_the_state_dict(
    tree,
):
    """Checkpoints of the whole model and of the pipeline must have the same keys, and the layers in
    turn compute the same as the model.
    """
    whole = built(tree)
    traced = chain(whole)
    assert len(traced) == leaves(tree)
    assert [layer.name for layer in traced] == [
        name for name, part in whole.named_modules() if not isinstance(part, nn.Sequential)
    ]
    for layer, module in zip(traced, traced.modules, strict=True):
        assert whole.get_submodule(layer.name) is module
        assert list(layer.parameters) == list(module.state_dict(prefix=f"{layer.name}."))
    assert [name for layer in traced for name in layer.parameters] == list(whole.state_dict())
    assert traced.parameter_count == sum(parameter.numel() for parameter in whole.parameters())
    value = torch.randn(2, 4)
    expected = whole(value)
    for module in traced.modules:
        value = module(value)
    assert torch.equal(value, expected)


@pytest.mark.parametrize("name", sorted(models()))
def test_every_model_of_the_zoo_is_a_chain_that_accounts_for_all_its_tensors(name):
    """Plans would ignore the bytes of a tensor that no layer lists."""
    net = model(name, device="meta")
    traced = chain(net)
    listed = {
        *(p for layer in traced for p in layer.parameters),
        *(b for layer in traced for b in layer.buffers),
    }
    assert listed == set(net.state_dict())
    assert traced.parameter_count == sum(parameter.numel() for parameter in net.parameters())
    assert traced.description.tied == {}
    assert all(key == value for key, value in traced.aliases.items())
    assert len(traced) > 5


def test_a_layers_kind_modules_and_tensors_are_described():
    """Partitioners cut by kind, hooks refer to module names, and memory is the sum of the tensors'
    bytes.
    """
    block = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3).half())
    block[0].bias.requires_grad_(False)
    traced = chain(nn.Sequential(OrderedDict(body=block)))
    assert [layer.kind for layer in traced] == ["Linear", "BatchNorm1d"]
    assert traced[0].modules == ("body.0",)
    assert traced[1].buffers == (
        "body.1.running_mean",
        "body.1.running_var",
        "body.1.num_batches_tracked",
    )
    assert traced.description.tensor("body.0.weight") == TensorFacts(
        "body.0.weight", (3, 2), "float32", 24, trainable=True
    )
    assert traced.description.tensor("body.0.bias") == TensorFacts(
        "body.0.bias", (3,), "float32", 12, trainable=False
    )
    assert traced.description.tensor("body.1.running_var") == TensorFacts(
        "body.1.running_var", (3,), "float16", 6
    )
    assert traced.description.tensor("body.1.num_batches_tracked").bytes == 8
    deep = chain([nn.TransformerEncoderLayer(4, 2, 8)])
    assert deep[0].name == "0"
    assert {"0", "0.self_attn", "0.self_attn.out_proj", "0.linear1"} <= set(deep[0].modules)
    assert "0.self_attn.out_proj.weight" in deep[0].parameters


def test_a_relu_used_twice_is_two_layers_with_nothing_tied():
    """Many models use one ReLU everywhere; without weights nothing is tied."""
    relu = nn.ReLU()
    traced = chain(nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu))
    assert [layer.name for layer in traced] == ["0", "1", "2", "3"]
    assert traced.modules[1] is traced.modules[3]
    assert traced.description.tied == {}
    assert traced.description.stage_bounds([1, 1, 1, 1])


def test_a_linear_used_twice_is_one_set_of_tensors_that_two_layers_use():
    """It counts once for memory and parameters, even if a cut separates its uses."""
    shared = nn.Linear(3, 3)
    whole = nn.Sequential(shared, nn.ReLU(), shared)
    traced = chain(whole)
    assert [layer.parameters for layer in traced] == [
        ("0.weight", "0.bias"),
        (),
        ("0.weight", "0.bias"),
    ]
    assert [tensor.name for tensor in traced.description.tensors] == ["0.weight", "0.bias"]
    assert traced.parameter_count == 12
    assert traced.description.tied == {"0.weight": (0, 2), "0.bias": (0, 2)}
    assert traced.aliases == {
        "0.weight": "0.weight",
        "0.bias": "0.bias",
        "2.weight": "0.weight",
        "2.bias": "0.bias",
    }
    assert set(traced.aliases) == set(whole.state_dict())
    assert traced.description.stage_bounds([2, 1]) == [(0, 2), (2, 3)]


def test_a_weight_shared_by_different_modules_is_tied_under_the_first_name():
    """GPT-2's head and embedding: one tensor in two modules, one of which has another tensor too."""
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5)
    head.weight = embedding.weight
    traced = chain([embedding, nn.LayerNorm(4), head])
    assert traced[2].parameters == ("0.weight", "2.bias")
    assert traced.description.tied == {"0.weight": (0, 2)}
    assert traced.aliases["2.weight"] == "0.weight"
    assert traced.parameter_count == 20 + 8 + 5


def test_a_tensor_shared_inside_one_layer_ties_no_layers():
    """A block is never cut, so tensors shared within it are no constraint; its state still has both
    names.
    """

    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = self.a

    traced = chain(nn.Sequential(Twins(), nn.ReLU()))
    assert traced[0].parameters == ("0.a.weight", "0.a.bias")
    assert traced.description.tied == {}
    assert traced.aliases["0.b.weight"] == "0.a.weight"
    assert traced.parameter_count == 6


class Residual(nn.Sequential):
    """A Sequential with a skip around its children."""

    def forward(self, x):
        """Run the parts beside a skip."""
        return x + super().forward(x)


class Named(nn.Sequential):
    """A Sequential subclass that changes nothing."""


def hooked(kind):
    """A Sequential with a hook of the given kind."""
    sequential = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    getattr(sequential, f"register_{kind}")(lambda *_: None)
    return sequential


def patched():
    """A Sequential whose forward was replaced on the object, as some libraries do."""
    sequential = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    sequential.forward = lambda x: x
    return sequential


@pytest.mark.parametrize(
    "make",
    [
        lambda: Residual(nn.Linear(2, 2), nn.ReLU()),
        *(
            lambda kind=kind: hooked(kind)
            for kind in (
                "forward_hook",
                "forward_pre_hook",
                "full_backward_hook",
                "full_backward_pre_hook",
            )
        ),
        patched,
    ],
    ids=[
        "own forward",
        "forward hook",
        "forward pre-hook",
        "backward hook",
        "backward pre-hook",
        "patched forward",
    ],
)
def test_a_sequential_that_does_more_than_run_its_parts_is_one_layer(make):
    """If it were cut, its skip or hook would be lost silently; alone it cannot be cut, and the
    message has the remedy.
    """
    traced = chain(nn.Sequential(nn.Linear(2, 2), make(), nn.ReLU()))
    assert [layer.name for layer in traced] == ["0", "1", "2"]
    assert traced[1].parameters == ("1.0.weight", "1.0.bias")
    assert [layer.name for layer in chain([make(), nn.ReLU()])] == ["0", "1"]
    with pytest.raises(
        ChainError,
        match=r"^\w+ has a forward or hooks of its own, so where it may be cut is not known\. Let it be traced on an example of its inputs: ps\.chain\(model, example\); or give its layers",
    ):
        chain(make())


def test_a_subclass_of_sequential_that_only_has_another_name_is_flattened():
    """Model zoos define such subclasses for stems and heads."""
    assert [layer.name for layer in chain(Named(nn.ReLU(), Named(nn.Linear(2, 2))))] == ["0", "1.0"]


def test_a_list_of_modules_is_named_as_a_sequential_of_them():
    """Checkpoints of `ps.chain([model.stem, *model.blocks])` must be readable elsewhere."""
    parts = [
        nn.Linear(2, 2),
        nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 3))),
        nn.Sequential(),
    ]
    traced = chain(parts)
    assert [layer.name for layer in traced] == ["0", "1.0", "1.1.0"]
    assert list(traced.aliases) == list(nn.Sequential(*parts).state_dict())
    assert (
        chain(tuple(parts)).fingerprint
        == chain(iter(parts)).fingerprint
        == traced.fingerprint
        == chain(nn.Sequential(*parts)).fingerprint
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (nn.Sequential(), r"^the model has no layers$"),
        ([], r"^the model has no layers$"),
        (nn.Sequential(nn.Sequential(), nn.Sequential()), r"^the model has no layers$"),
        (
            nn.Linear(2, 2),
            r"^Linear is not an nn\.Sequential, so where it may be cut is not known\. Let it be traced on an example of its inputs: ps\.chain\(model, example\); or give its layers in order: ps\.chain\(\[",
        ),
        (nn.ModuleList([nn.ReLU()]), r"^ModuleList is not an nn\.Sequential"),
        (
            [nn.ReLU(), torch.relu],
            r"^a chain is made of nn\.Module objects, not builtin_function_or_method$",
        ),
        ([nn.ReLU(), None], r"^a chain is made of nn\.Module objects, not NoneType$"),
        ("vgg11", r"^a chain is made of nn\.Module objects, not str$"),
        (
            torch.relu,
            r"^a chain is made of a model or a list of modules, not builtin_function_or_method$",
        ),
        (7, r"^a chain is made of a model or a list of modules, not int$"),
        (
            nn.Sequential(nn.ReLU(), nn.LazyLinear(3)),
            r"^1\.weight has no shape yet: run the model once on an example before",
        ),
    ],
)
def test_an_object_that_is_not_a_chain_is_refused_with_its_type(wrong, message):
    """Most models are not Sequentials at first; the message has the line to write."""
    with pytest.raises(ChainError, match=message):
        chain(wrong)


def test_the_fingerprint_depends_on_names_kinds_and_shapes_and_not_on_values():
    """A plan is rejected for another model, but not for the same model after training or on the
    meta device.
    """

    def of(width=4, name="a", kind=nn.ReLU, dtype=torch.float32, device="cpu"):
        with torch.device(device):
            return chain(
                nn.Sequential(OrderedDict({name: nn.Linear(4, width, dtype=dtype), "b": kind()}))
            ).fingerprint

    first = of()
    assert first == of() == of(device="meta")
    assert len({first, of(width=5), of(name="c"), of(kind=nn.Tanh), of(dtype=torch.float64)}) == 5
    trained = nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.ReLU()))
    before = chain(trained).fingerprint
    nn.init.zeros_(trained.a.weight)
    assert chain(trained.eval()).fingerprint == before == first


def test_the_fingerprint_distinguishes_tied_weights_from_equal_ones():
    """The shapes are equal, but cuts of a tied model synchronise a weight."""
    shared = nn.Linear(2, 2)
    assert (
        chain([shared, shared]).fingerprint != chain([nn.Linear(2, 2), nn.Linear(2, 2)]).fingerprint
    )


@pytest.mark.parametrize("name", ["gpt", "resnet18", "mlp"])
def test_meta_and_real_builds_of_a_model_have_one_fingerprint(name):
    """Plans are made from models on the meta device and executed with real ones."""
    options = {"gpt": {"layers": 1, "width": 8, "heads": 2}, "resnet18": {"image": 32}}.get(
        name, {}
    )
    assert (
        chain(model(name, device="meta", **options)).fingerprint
        == chain(model(name, **options)).fingerprint
    )


class Scaled(nn.Sequential):
    """A Sequential with a tensor of its own."""

    def __init__(self, *layers, tensor_kind):
        super().__init__(*layers)
        if tensor_kind == "parameter":
            self.scale = nn.Parameter(torch.ones(3))
        elif tensor_kind == "buffer":
            self.register_buffer("scale", torch.ones(3))
        elif tensor_kind == "passing":
            self.register_buffer("scale", torch.ones(3), persistent=False)
        else:
            self.scale = self[0].weight


@pytest.mark.parametrize("tensor_kind", ["parameter", "buffer"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_sequential_with_parameters_or_buffers_is_refused_or_traced(tensor_kind, nested):
    """No stage would have them: they would be neither trained nor in state_dict."""
    net = Scaled(nn.Linear(3, 3), nn.ReLU(), tensor_kind=tensor_kind)
    net = nn.Sequential(nn.Linear(3, 3), net) if nested else net
    name = r"1\.scale" if nested else "scale"
    with pytest.raises(
        ChainError,
        match=rf"^{name} is a {tensor_kind} of an nn\.Sequential itself.*ps\.chain\(model",
    ):
        chain(net)
    with pytest.raises(ChainError, match=rf"^0\.{name} is a {tensor_kind}"):
        chain([net, nn.Linear(3, 3)])
    traced = chain(net, torch.randn(4, 3))
    assert {tensor.name for tensor in traced.description.tensors} == set(net.state_dict())


def test_a_sequential_may_give_a_layers_tensor_another_name_or_hold_what_is_not_saved():
    """The first is tied to a layer's tensor, the second is not part of the state."""
    net = nn.Sequential(Scaled(nn.Linear(3, 3), nn.ReLU(), tensor_kind="tied"), nn.Linear(3, 2))
    traced = chain(net)
    assert traced.aliases["0.scale"] == "0.0.weight"
    assert traced.container_names == ("0.scale",)
    assert traced.parameter_names() == ["0.0.weight", "0.0.bias", "1.weight", "1.bias"]
    assert len(chain(Scaled(nn.Linear(3, 3), nn.ReLU(), tensor_kind="passing"))) == 2


class Doubling(nn.Sequential):
    """Runs its children differently, by its `__call__`."""

    def __call__(self, x):
        """Run it."""
        return 2 * super().__call__(x)


class Twice(nn.Sequential):
    """Runs its children differently, by its `__iter__`."""

    def __iter__(self):
        return iter([*super().__iter__()] * 2)


@pytest.mark.parametrize("kind", [Doubling, Twice])
def test_a_sequential_with_a_custom_call_or_iteration_is_one_layer(kind):
    """Cut into its modules, it would compute something else."""
    container = kind(nn.Linear(3, 3), nn.Tanh())
    traced = chain(nn.Sequential(nn.Linear(3, 3), container))
    assert len(traced) == 2
    assert traced.modules[1] is container
    with pytest.raises(ChainError, match=f"{kind.__name__} has a forward or hooks of its own"):
        chain(container)
