"""`Pipe` as a module: what it is made of, what it refuses, its state, copies and modes."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

from penstock.errors import SettingError
from penstock.pipe.pipe import Pipe


def make_model() -> nn.Sequential:
    """Five layers of few numbers, always the same ones."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    )


def make_pipe(**settings) -> Pipe:
    """These layers on two threads, three micro-batches."""
    return Pipe(make_model(), [2, 3], **{"devices": 2, "chunks": 3, **settings})


def test_settings_are_kept_as_plain_lists_and_values():
    """Code written for the peers reads them."""
    pipe = Pipe(nn.Sequential(nn.Linear(1, 1)), balance=(1,), devices=("cpu", "cpu"), chunks=42.0)
    assert (pipe.balance, pipe.devices, pipe.chunks, pipe.checkpoint) == (
        [1],
        [torch.device("cpu")],
        42,
        "except_last",
    )


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
    ("module", "settings", "kind", "says"),
    [
        (
            nn.Linear(1, 1),
            {"balance": [1]},
            TypeError,
            "module must be nn.Sequential to be partitioned, not Linear",
        ),
        (
            nn.Sequential(nn.Tanh()),
            {},
            ValueError,
            "balance is required: the number of layers of each partition, 1 in total",
        ),
        (
            nn.Sequential(nn.Tanh()),
            {"balance": [2]},
            ValueError,
            r"different length \(module: 1, sum of balance: 2\)",
        ),
        (
            nn.Sequential(nn.Tanh()),
            {"balance": [1, 0]},
            ValueError,
            r"must be positive integer \(balance: \[1, 0\]\)",
        ),
        (
            nn.Sequential(nn.Tanh()),
            {"balance": [1], "chunks": 0},
            ValueError,
            "number of chunks must be positive integer, not 0",
        ),
        (
            nn.Sequential(nn.Tanh()),
            {"balance": [1], "checkpoint": "sometimes"},
            ValueError,
            "checkpoint is not one of 'always', 'except_last', or 'never'",
        ),
        (
            nn.Sequential(nn.Tanh(), nn.Tanh()),
            {"balance": [1, 1], "devices": ["cpu"]},
            IndexError,
            r"too few devices to hold given partitions \(devices: 1, partitions: 2\)",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_the_peers_kinds_of_error(module, settings, kind, says):
    """Whoever catches the peers' errors catches these."""
    with pytest.raises(kind, match=says):
        Pipe(module, **{"devices": 4, **settings})


def test_a_layer_in_two_places_is_refused():
    """It would be moved twice, and be in two partitions at the same time."""
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="module with duplicate children is not supported"):
        Pipe(nn.Sequential(layer, layer), [1, 1], devices=2)


class Holder(nn.Module):
    """A layer around another one, which may be in two of these."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        """Run the inner one."""
        return self.inner(x)


def test_a_weight_on_two_devices_is_refused_with_both_its_names():
    """Moved to one device it would be lost to the other, as silently as can be."""
    inner = nn.Linear(2, 2)
    with pytest.raises(
        ValueError,
        match=r"0\.inner\.weight \(partition 0 on cpu\) is 1\.inner\.weight \(partition 1 on meta\)",
    ):
        Pipe(nn.Sequential(Holder(inner), Holder(inner)), [1, 1], devices=["cpu", "meta"])


@pytest.mark.parametrize("threads", [False, True])
def test_a_weight_in_two_partitions_on_one_device_has_the_sum_of_both_gradients(threads):
    """Tied weights are one parameter to the caller's graph, whoever uses them."""
    inner = nn.Linear(2, 2)
    plain, x = nn.Sequential(Holder(inner), Holder(inner)), torch.randn(6, 2)
    expected = torch.autograd.grad(plain(x).square().sum(), list(inner.parameters()))
    pipe = Pipe(plain, [1, 1], devices=2, chunks=3)
    pipe(x)
    force(pipe, threads)
    pipe(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in inner.parameters()], list(expected))


def force(pipe: Pipe, threads: bool | None) -> None:
    """Let the pipe use threads, or none, whatever it thinks of them. It has run once."""
    for choice in pipe._engine.choices.values():
        choice.forced = threads


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
    """`load_state_dict` of the whole comes by without asking the Pipe's own."""
    whole, plain = nn.ModuleDict({"body": make_pipe()}), nn.ModuleDict({"body": make_model()})
    with torch.no_grad():
        plain["body"][0].bias.fill_(3.0)
    whole.load_state_dict(plain.state_dict())
    assert whole["body"][0].bias.tolist() == [3.0] * 8


def test_a_missing_and_an_unexpected_tensor_are_named():
    """Strictness stays what it is."""
    state = make_model().state_dict()
    state["4.extra"] = state.pop("4.bias")
    with pytest.raises(
        RuntimeError,
        match=r'(?s)Missing.*"partitions\.1\.4\.bias".*Unexpected.*"partitions\.1\.4\.extra"',
    ):
        make_pipe().load_state_dict(state)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_has_weights_and_threads_of_its_own(make):
    """Averaged models are deep copies; a copy of a pipe that has run must run."""
    pipe, x = make_pipe(), torch.randn(6, 4)
    pipe(x).sum().backward()
    other = make(pipe)
    force_first = other.train(mode=False)(x)
    torch.testing.assert_close(force_first, pipe.train(mode=False)(x))
    assert all(a is not b for a, b in zip(pipe.parameters(), other.parameters(), strict=True))


def test_modes_reach_the_layers_and_evaluation_keeps_running_statistics():
    """`eval()` is the module's own."""
    pipe, x = make_pipe(), torch.randn(6, 4)
    pipe(x)
    before = pipe[3].running_mean.clone()
    torch.testing.assert_close(pipe.eval()(x), nn.Sequential(*pipe)(x))
    assert torch.equal(pipe[3].running_mean, before)
    assert pipe.train()[3].training


def test_it_takes_over_the_mode_of_the_model():
    """A model in evaluation mode stays in it."""
    assert not Pipe(make_model().eval(), [5], devices=1).training


def test_layers_keep_the_modes_that_they_have():
    """A batch norm that was frozen stays frozen, until `train` is called, as in the plain model."""
    model = make_model()
    model[3].eval()
    pipe = Pipe(model, [2, 3], devices=2)
    assert pipe.training
    assert not model[3].training
    pipe.train()
    assert model[3].training


def test_an_empty_pipe_returns_its_input_and_refuses_what_is_no_tensor():
    """As the peers do."""
    assert Pipe(nn.Sequential(), [])(torch.tensor(42)) == 42
    with pytest.raises(TypeError, match="expected Tensor, but got int"):
        Pipe(nn.Sequential(), [])(42)


class Returning(nn.Module):
    """Whatever the input, it returns this."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, x):
        """Return it."""
        return self.make(x)


@pytest.mark.parametrize(
    ("make", "x", "kind", "says"),
    [
        (
            lambda x: "hello",
            torch.rand(2),
            TypeError,
            "expected Tensor, but got str: the output of the last layer",
        ),
        (
            lambda x: x,
            (torch.rand(2), "hello"),
            TypeError,
            "expected Tensor, but got str: a Pipe takes",
        ),
        (
            lambda x: x[0],
            (torch.rand(4), torch.rand(1)),
            ValueError,
            r"must be the same number of samples in each; these have \(4,\), \(1,\)",
        ),
        (
            lambda x: x[0],
            (torch.rand(4), torch.rand(2)),
            ValueError,
            r"must be the same number of samples in each; these have \(4,\), \(2,\)",
        ),
        (lambda x: x.sum(), torch.rand(4), RuntimeError, "a tensor without dimensions"),
        (lambda x: x.mean(0, True), torch.rand(4, 2), RuntimeError, r"shape \(1, 2\), \(1, 2\)"),
        (
            lambda x: x.transpose(0, 1),
            torch.rand(4, 6, 3),
            RuntimeError,
            r"shape \(6, 2, 3\), \(6, 2, 3\), … for micro-batches of 2, 2, … samples",
        ),
        (lambda x: torch.ones(3, 2), torch.rand(4), RuntimeError, "must index the samples"),
        (lambda x: [x] * int(x[0]), torch.arange(1.0, 5.0), RuntimeError, "nested in another way"),
    ],
)
def test_what_cannot_be_cut_or_joined_is_refused(make, x, kind, says):
    """Micro-batches are cut out of the input and joined to the output."""
    with pytest.raises(kind, match=says):
        Pipe(nn.Sequential(Returning(make)), [1], devices=1, chunks=2)(x)


def test_nested_inputs_boundaries_and_outputs_pass_with_none_and_constants_between():
    """In one process anything may cross; only what is cut or joined must be tensors or None."""
    model = nn.Sequential(
        Returning(lambda x: {"a": x["a"] * 2, "scale": 3.0, "none": x["none"]}),
        Returning(lambda x: (x["a"] * x["scale"], [x["a"], x["none"]])),
    )
    a = torch.randn(5, 2, requires_grad=True)
    tripled, (doubled, none) = Pipe(model, [1, 1], devices=2, chunks=2)({"a": a, "none": None})
    assert none is None
    torch.testing.assert_close((tripled, doubled), (a * 6, a * 2))
    (tripled.sum() + doubled.sum()).backward()
    torch.testing.assert_close(a.grad, torch.full((5, 2), 8.0))


@pytest.mark.parametrize("samples", [1, 2, 7, 8])
def test_batches_of_any_size_are_cut_as_torch_chunk_does(samples):
    """A small last batch has fewer micro-batches."""
    sizes: list[int] = []
    pipe = Pipe(
        nn.Sequential(Returning(lambda x: sizes.append(len(x)) or x)), [1], devices=1, chunks=4
    )
    x = torch.rand(samples, 2)
    torch.testing.assert_close(pipe(x), x)
    assert sizes == [len(part) for part in x.chunk(4)]


def test_deferred_batch_norm_gets_the_whole_batchs_running_statistics():
    """Also from a last batch of fewer micro-batches, and with micro-batches that run twice."""
    plain, pipe = make_model(), make_pipe(deferred_batch_norm=True, checkpoint="always", chunks=4)
    for samples in (14, 6):
        x = torch.randn(samples, 4)
        plain(x)
        pipe(x).sum().backward()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(pipe[3], name), getattr(plain[3], name))


def test_the_parts_of_this_room_that_theirs_have_by_name_are_where_the_page_says():
    """docs/pipe.md tells programs of the peers what to import."""
    from penstock.modules import deferred_batch_norm, recomputing, skippable

    assert all(
        hasattr(skippable, name)
        for name in ("skippable", "stash", "pop", "Namespace", "verify_skippables")
    )
    assert callable(recomputing.is_checkpointing)
    assert callable(recomputing.is_recomputing)
    assert callable(deferred_batch_norm.convert)


class Doubled(nn.Sequential):
    """Does more than its layers."""

    def forward(self, x):
        """Run it."""
        return 2 * super().forward(x)


class Owner(nn.Sequential):
    """Has a parameter of its own."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.ones(2))


def test_a_sequential_that_does_or_has_more_than_its_layers_is_refused():
    """Partitions take the layers alone: the rest was dropped without a word."""
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(SettingError, match=r"^Doubled has a forward, .* runs the layers alone"):
        Pipe(Doubled(*layers), [1, 1], devices=["cpu"] * 2)
    hooked = nn.Sequential(*layers)
    hooked.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(
        SettingError, match=r"^Sequential has a forward, an order of its layers or hooks"
    ):
        Pipe(hooked, [1, 1], devices=["cpu"] * 2)
    with pytest.raises(
        SettingError, match=r"^scale is a parameter or buffer of the nn\.Sequential itself"
    ):
        Pipe(Owner(*layers), [1, 1], devices=["cpu"] * 2)


def test_torch_compile_leaves_a_pipe_as_it_is():
    """With a warning; the results are those without it."""
    torch.manual_seed(0)
    pipe = Pipe(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), [2, 1], chunks=2)
    x = torch.randn(4, 3)
    pipe(x).sum().backward()
    expected = [weight.grad.clone() for weight in pipe.parameters()]
    pipe.zero_grad()
    compiled = torch.compile(pipe, backend="eager")
    with pytest.warns(UserWarning, match="torch.compile leaves a Pipe as it is"):
        compiled(x).sum().backward()
    for weight, grad in zip(pipe.parameters(), expected, strict=True):
        assert torch.equal(weight.grad, grad)


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
    with pytest.raises(SettingError, match="a Pipe recomputes whole partitions"):
        pipe.activation_checkpointing_enable(**settings)
