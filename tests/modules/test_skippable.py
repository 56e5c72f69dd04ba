"""Skip connections between distant layers: in a plain model, in `Pipe`, and in a chain."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import ChainError
from penstock.modules.skippable import (
    Namespace,
    pop,
    skippable,
    stash,
    verify_skippables,
    waiting_skips,
    with_skip_carriers,
)
from penstock.pipe.pipe import Pipe


@skippable(stash=["early"])
class Down(nn.Module):
    """Stashes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        """Stash the input, and return another value."""
        yield stash("early", x)
        return self.linear(x).tanh()


@skippable(pop=["early"])
class Up(nn.Module):
    """Pops the stashed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        """Use both."""
        early = yield pop("early")
        return self.linear(x) * early


@skippable(stash=["late"], pop=["early"])
class Exchange(nn.Module):
    """Pops one tensor and stashes another."""

    def forward(self, x):
        """Stash before popping."""
        yield stash("late", x * 2)
        early = yield pop("early")
        return x + early


@skippable(pop=["late"])
class Last(nn.Module):
    """Pops the tensor of a second skip."""

    def forward(self, x):
        """Use it."""
        late = yield pop("late")
        return x - late


def unet() -> nn.Sequential:
    """Return layers with two nested skips and a third that overlaps them."""
    torch.manual_seed(1)
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        Down().isolate(outer),
        nn.Linear(4, 4),
        Down().isolate(inner),
        Exchange().isolate(inner, only=["early"]),
        nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
        Up().isolate(outer),
        Last(),
    )


def plainly(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """Compute the same as `unet`, without named skips."""
    first = model[0].linear(x).tanh()
    second = model[1](first)
    third = model[2].linear(second).tanh()
    return model[5].linear(model[4](third + second)) * x - third * 2


def test_in_a_plain_sequential_a_stashed_tensor_waits_for_its_pop():
    """A model with skips must also run without a pipeline, and leave no stashed tensor behind."""
    model, x = unet(), torch.randn(6, 4)
    waiting = {}
    with waiting_skips(waiting):
        torch.testing.assert_close(model(x), plainly(model, x))
    assert waiting == {}


def test_names_of_parameters_are_those_of_the_user_and_states_of_torchgpipe_load():
    """torchgpipe has the user's module one level down, as `.module.`."""
    down = Down()
    assert list(down.state_dict()) == ["linear.weight", "linear.bias"]
    theirs = {f"0.module.{name}": tensor + 1 for name, tensor in down.state_dict().items()}
    whole = nn.Sequential(Down())
    whole.load_state_dict(theirs)
    assert torch.equal(whole[0].linear.bias, down.linear.bias + 1)
    assert repr(Down()).startswith("@skippable(Down(")
    assert isinstance(pickle.loads(pickle.dumps(whole))[0], Down)


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("balance", [[7], [3, 4], [1, 1, 1, 1, 1, 1, 1], [2, 4, 1]])
def test_in_a_pipe_skips_go_from_where_they_are_stashed_to_where_they_are_popped(
    balance, mode, threads
):
    """They bypass the partitions between, in both directions."""
    model, x = unet(), torch.randn(6, 4)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = plainly(model, a)
    expected_grads = torch.autograd.grad(expected.square().sum(), [a, *model.parameters()])
    pipe = Pipe(model, balance, devices=len(balance), chunks=3, checkpoint=mode)
    pipe(x)
    for choice in pipe._engine.choices.values():
        choice.forced = threads
    output = pipe(b)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(
        torch.autograd.grad(output.square().sum(), [b, *model.parameters()]), expected_grads
    )


def test_none_may_be_stashed_and_what_is_stashed_may_need_no_gradient():
    """An optional mask."""

    @skippable(stash=["none", "mask"])
    class First(nn.Module):
        def forward(self, x):
            yield stash("none", None)
            yield stash("mask", x.detach() > 0)
            return x * 2

    @skippable(pop=["none", "mask"])
    class Second(nn.Module):
        def forward(self, x):
            assert (yield pop("none")) is None
            return x * (yield pop("mask"))

    x = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    Pipe(nn.Sequential(First(), Second()), [1, 1], devices=2, chunks=2)(x).sum().backward()
    assert x.grad.flatten().tolist() == [2.0, 0.0]


def declared(*, stashes=(), pops=()) -> nn.Module:
    """Return a layer that declares these skips and does not use them."""
    return skippable(stash=stashes, pop=pops)(type("Declared", (nn.Module,), {}))()


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([{"stashes": ["a"]}], "no module declared 'a' as poppable but stashed"),
        ([{"pops": ["a"]}], "'0' declared 'a' as poppable but it was not stashed"),
        (
            [{"stashes": ["a"]}, {"stashes": ["a"]}, {"pops": ["a"]}],
            "'1' redeclared 'a' as stashable",
        ),
        ([{"stashes": ["a"]}, {"pops": ["a"]}, {"pops": ["a"]}], "'2' redeclared 'a' as poppable"),
        ([{"stashes": ["a"], "pops": ["a"]}], "'0' declared 'a' both as stashable and as poppable"),
        (
            [{"pops": ["a"]}, {"stashes": ["a"]}],
            r"(?s)'0' declared 'a' as poppable but it was not stashed.*no module declared 'a'",
        ),
    ],
)
def test_skips_that_do_not_match_are_listed(layers, says):
    """All faults at once and before the run, which would report only the first."""
    model = nn.Sequential(*(declared(**names) for names in layers))
    with pytest.raises(TypeError, match=says):
        verify_skippables(model)
    with pytest.raises(TypeError, match=says):
        Pipe(model, [len(model)], devices=1)
    with pytest.raises(ChainError, match=says):
        with_skip_carriers(list(model.named_children()))


def test_each_fault_of_skips_is_listed_once():
    """In the order of the layers, and last what is never popped."""
    model = nn.Sequential(
        declared(stashes=["a", "b"], pops=["b"]),
        declared(stashes=["a", "c"], pops=["d"]),
        declared(pops=["a"]),
        declared(pops=["a", "b"]),
    )
    with pytest.raises(TypeError) as caught:
        verify_skippables(model)
    assert str(caught.value).split("\n  * ") == [
        "one or more pairs of stash and pop do not match:",
        "'0' declared 'b' both as stashable and as poppable",
        "'1' redeclared 'a' as stashable but not isolated by namespace",
        "'1' declared 'd' as poppable but it was not stashed",
        "'3' redeclared 'a' as poppable but not isolated by namespace",
        "'3' declared 'b' as poppable but it was not stashed",
        "no module declared 'c' as poppable but stashed",
    ]


def test_one_name_twice_is_two_skips_in_two_namespaces():
    """Blocks of a network are created in a loop."""
    one, other = Namespace(), Namespace()
    assert one != other
    assert copy.deepcopy(one) == one
    verify_skippables(
        nn.Sequential(
            *(
                declared(**{kind: ["a"]}).isolate(space)
                for kind, space in (
                    ("stashes", one),
                    ("stashes", other),
                    ("pops", one),
                    ("pops", other),
                )
            )
        )
    )
    with pytest.raises(ValueError, match="has no skip 'b' to isolate; it has 'a'"):
        declared(pops=["a"]).isolate(one, only=["b"])


def running(body, **declares) -> nn.Module:
    """Return a layer with this forward."""
    return skippable(**declares)(type("Running", (nn.Module,), {"forward": body}))()


def stashing_a(_, x):
    """Stash as 'a'."""
    yield stash("a", x)
    return x


def popping_a(_, x):
    """Pop 'a'."""
    yield pop("a")
    return x


def popping_a_twice(_, x):
    """Pop it twice."""
    yield pop("a")
    yield pop("a")
    return x


def yielding(_, x):
    """Yield another object."""
    yield x


@pytest.mark.parametrize(
    ("body", "declares", "kind", "says"),
    [
        (
            lambda _, x: x,
            {"stash": ["a"]},
            RuntimeError,
            "'a' must be stashed by the forward of Running, and was not",
        ),
        (
            lambda _, x: x,
            {"pop": ["a"]},
            RuntimeError,
            "'a' must be popped by the forward of Running, and was not",
        ),
        (stashing_a, {}, RuntimeError, "'a' has not been declared as stashable"),
        (popping_a, {}, RuntimeError, "'a' has not been declared as poppable"),
        (popping_a_twice, {"pop": ["a"]}, RuntimeError, "'a' has been popped already"),
        (yielding, {}, TypeError, "it may yield"),
    ],
)
def test_a_forward_that_differs_from_its_declared_skips_is_refused(body, declares, kind, says):
    """Skips are static; a forward that omits one would leave a tensor behind, or wait for one."""
    layer = running(body, **declares)
    waiting = dict.fromkeys(layer.poppable(), torch.ones(1))
    with waiting_skips(waiting), pytest.raises(kind, match=says):
        layer(torch.ones(1))


def test_a_pop_before_its_stash_is_refused():
    """The layers are in the wrong order."""
    with (
        waiting_skips({}),
        pytest.raises(RuntimeError, match="'early' has not been stashed before Up pops it"),
    ):
        Up()(torch.rand(1, 4))


def test_without_skippables_the_layers_of_a_chain_are_left_as_they_are():
    """Most models have no skippable layers."""
    named = list(nn.Sequential(nn.Linear(1, 1), nn.Tanh()).named_children())
    assert with_skip_carriers(named) == named


def test_in_a_chain_skips_travel_and_names_stay():
    """The value between layers contains the skips in flight; parameters keep their names in the
    model.
    """
    model, x = unet(), torch.randn(6, 4)
    named = [(f"body.{name}", layer) for name, layer in model.named_children()]
    carried = with_skip_carriers(named)
    assert [name for name, _ in carried] == [name for name, _ in named]
    names = [name for _, layer in carried for name, _ in layer.named_parameters()]
    assert names == [f"body.{name}" for name, _ in model.named_parameters()]
    value = x
    for _, layer in carried:
        value = layer(value)
    torch.testing.assert_close(value, plainly(model, x))
    assert len(carried[2][1](carried[1][1](carried[0][1](x)))[1]) == 2


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("balance", [[3, 4], [1, 2, 2, 2]])
def test_a_pipeline_trains_a_model_with_skips_as_one_device_does(balance, recompute):
    """Gradients of `ps.Pipeline` are those of plain training."""
    model, x, y = unet(), torch.randn(8, 4), torch.randn(8, 4)
    expected = torch.autograd.grad(
        functional.mse_loss(plainly(model, x), y), list(model.parameters())
    )
    pipe = ps.Pipeline(
        [layer for _, layer in with_skip_carriers(list(model.named_children()))],
        loss=functional.mse_loss,
        balance=balance,
        schedule="1f1b",
        micro_batches=4,
        recompute=recompute,
        executor="threads",
        device="cpu",
    )
    pipe.train_batch(x, y)
    torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))
    pipe.close()
