"""One partition of a `Pipe`: the second forward of recomputed micro-batches."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from tests.pipe.layers import PassRecorder
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.errors import RunError
from penstock.modules.recomputing import is_recomputing
from penstock.modules.side_loss import side_loss
from penstock.modules.skippable import pop, skippable, stash
from penstock.pipe.pipe import Pipe
from penstock.pipe.pipe_arguments import build_stages, split_layers
from penstock.pipe.pipe_random import ForwardSeed


def test_the_recompute_is_in_the_mode_of_the_forward_and_sees_its_buffers():
    """`eval()` before `backward()` must not change what was computed, nor batch norm count twice."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    plain.load_state_dict(model.state_dict())
    pipe, x = Pipe(model, [2, 1], devices=2, chunks=2, checkpoint="always"), torch.randn(6, 4)
    loss = pipe(x).square().sum()
    pipe.eval()
    loss.backward()
    assert not any(part.training for part in pipe.modules())
    torch.cat([plain(part) for part in x.chunk(2)]).square().sum().backward()
    torch.testing.assert_close(
        [p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()]
    )
    torch.testing.assert_close(pipe.sequential_state_dict(), plain.state_dict())


def test_layers_can_tell_a_first_pass_from_a_second():
    """Effects besides the output are to be had once."""
    notes: list[tuple[bool, bool]] = []
    pipe = Pipe(nn.Sequential(PassRecorder(notes)), [1], devices=1, chunks=2)
    pipe(torch.rand(2, requires_grad=True)).sum().backward()
    assert notes == [(True, False), (False, False), (False, True)]


def test_layers_that_recompute_by_themselves_do_so_inside():
    """`torch.utils.checkpoint` runs a forward from a backward that runs in ours."""
    notes: list[tuple[bool, bool]] = []

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(PassRecorder(notes), nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model = nn.Sequential(Again(), nn.Linear(4, 2))
    x = torch.randn(6, 4)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    notes.clear()
    pipe = Pipe(model, [1, 1], devices=2, chunks=2, checkpoint="never")
    grads = torch.autograd.grad(pipe(x).square().sum(), list(pipe.parameters()))
    torch.testing.assert_close(grads, expected)
    assert notes == [(False, False)] * 2 + [(False, True)] * 2


def test_a_partition_that_draws_in_the_first_micro_batch_only_is_intercepted_later():
    """A micro-batch without draws does not hide those of another."""

    class DroppingOnes(nn.Module):
        def forward(self, x):
            return functional.dropout(x, 0.5) if bool(x.any()) else x

    pipe = Pipe(nn.Sequential(DroppingOnes()), [1], devices=1, chunks=2)
    x = torch.cat([torch.ones(1, 50), torch.zeros(1, 50)]).requires_grad_()
    for _ in range(3):
        x.grad = None
        output = pipe(x)
        output.sum().backward()
        torch.testing.assert_close(x.grad[:1], output.detach()[:1])


def test_a_layer_that_begins_to_draw_is_refused_its_recompute_once_and_then_allowed_for():
    """What it drew unseen cannot be drawn again: a wrong gradient, or a refusal."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shares = [0.0]

        def forward(self, x):
            return nn.functional.dropout(x, self.shares[0])

    layer = Hidden()
    pipe, x = (
        Pipe(
            nn.Sequential(layer, nn.Linear(20, 20)),
            [1, 1],
            devices=2,
            chunks=2,
            checkpoint="always",
        ),
        torch.ones(4, 20),
    )
    for _ in range(2):  # the forwards 1, 2, 4, 8 and so on are looked at whatever is known
        pipe(x).sum().backward()
    layer.shares[0] = 0.5
    loss = pipe(x).sum()
    with pytest.raises(RuntimeError, match="had drawn none before"):
        loss.backward()
    x = x.requires_grad_()
    # By itself a partition draws as any module does.
    torch.manual_seed(1)
    output = pipe.partitions[0](x)
    torch.manual_seed(1)
    torch.testing.assert_close(output, layer(x))
    pipe = Pipe(nn.Sequential(layer), [1], devices=1, chunks=2, checkpoint="always")
    output = pipe(x)
    output.sum().backward()
    torch.testing.assert_close(x.grad, output.detach())


def test_a_second_forward_whose_outputs_need_other_gradients_is_refused():
    """The gradients that arrive are those of the first forward's outputs."""

    class Switching(nn.Module):
        def forward(self, x):
            return x.detach() if is_recomputing() else x * 1

    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), Switching()), [2], checkpoint="always")
    loss = pipe(torch.ones(4, 2)).sum()
    with pytest.raises(RunError, match="a partition of a Pipe"):
        loss.backward()


def test_parts_keep_the_modes_that_they_have_after_the_second_forward():
    """A frozen batch norm in a model that trains, and the other way round. The second forward has
    the modes of the first.
    """
    layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.0))
    layers[1].eval()
    plain, x = copy.deepcopy(layers), torch.rand(4, 2)
    pipe = Pipe(layers, [3], chunks=2, checkpoint="always")
    loss = pipe(x).square().sum()
    layers[1].train()
    layers[2].eval()
    loss.backward()
    assert [layer.training for layer in layers] == [True, True, False]
    assert layers[1].num_batches_tracked == 0
    plain(x).square().sum().backward()
    torch.testing.assert_close(layers[0].weight.grad, plain[0].weight.grad)


def test_a_weight_of_any_partition_changed_before_the_recompute_is_refused():
    """The recompute would see other weights than the forward, and the gradient would be of neither.
    Without a recompute the change does no harm.
    """
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], devices=2, chunks=2)
    pipe.checkpoint = "always"
    for index in (0, 1):
        loss = pipe(torch.ones(4, 2)).sum()
        with torch.no_grad():
            pipe[index].bias.add_(1)
        with pytest.raises(
            RuntimeError, match=r"changed in place .* call optimizer\.step\(\) after"
        ):
            loss.backward()
    pipe.checkpoint = "never"
    loss = pipe(torch.ones(4, 2)).sum()
    with torch.no_grad():
        pipe[0].bias.add_(1)
    loss.backward()


def test_a_side_loss_may_be_a_constant_beside_one_with_a_gradient():
    """A layer may report a number that no weight changes, also in another dtype."""

    class Reporting(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            side_loss(torch.ones((), dtype=torch.float64))
            side_loss(output.square().mean())
            return output

    pipe = Pipe(nn.Sequential(Reporting(2, 2)), [1], chunks=2)
    x = torch.ones(4, 2)
    (pipe(x).sum() + pipe.side_loss).backward()
    output = nn.functional.linear(x, pipe[0].weight, pipe[0].bias)
    (expected,) = torch.autograd.grad(output.sum() + output.square().mean(), [pipe[0].weight])
    torch.testing.assert_close(pipe[0].weight.grad, expected)


class Growing(nn.Module):
    """Multiplies by the number of its calls, which a list outside of the model holds."""

    def __init__(self, calls: list[int]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x):
        """Return another result at every call."""
        self.calls.append(0)
        return x * len(self.calls)


def test_a_recompute_with_another_result_is_refused_with_its_layers_and_micro_batch():
    """The gradient would be that of another network."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), Growing([]), nn.Tanh())
    pipe = Pipe(layers, [1, 2, 1], devices=3, chunks=2, checkpoint="always")
    loss = pipe(torch.ones(4, 2)).sum()
    with pytest.raises(
        RunError, match=r"layers 1 to 2 of a Pipe \(1, 2\), micro-batch 1: recomputed for the back"
    ):
        loss.backward()


def test_buffers_of_a_layer_that_was_replaced_are_restored_for_the_recompute():
    """Its batch norm counts every micro-batch once, as that of the layer before."""
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), [2], chunks=2)
    pipe.checkpoint = "always"
    for _ in range(2):
        pipe.partitions[0][1] = nn.BatchNorm1d(2)
        pipe(torch.rand(4, 2)).sum().backward()
        assert pipe[1].num_batches_tracked == 2


class Noting(nn.Module):
    """Notes whether its input requires a gradient."""

    def __init__(self, notes: list[bool]) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, x):
        """Return the input."""
        self.notes.append(x.requires_grad)
        return x


def test_inputs_of_a_partition_require_gradients_only_where_the_caller_or_a_layer_before_needs_them():
    """Otherwise a backward would compute gradients of the batch that nobody asks for. Without
    gradients no input requires one, and what a layer returns as it is does not either.
    """
    notes: list[bool] = []
    layers = nn.Sequential(Noting(notes), nn.Linear(2, 2), Noting(notes))
    pipe = Pipe(layers, [2, 1], devices=2, checkpoint="never")
    pipe(torch.ones(4, 2))
    assert notes == [False, True]
    notes.clear()
    pipe(torch.ones(4, 2, requires_grad=True))
    assert notes == [True, True]
    notes.clear()
    pipe.requires_grad_(False)
    pipe(torch.ones(4, 2))
    with torch.no_grad():
        alone = Pipe(nn.Sequential(Noting(notes)), [1])
        for _ in range(2):  # the first forward has copies of its inputs
            assert not alone(torch.ones(4, 2, requires_grad=True)).requires_grad
    assert notes == [False] * 4


def test_only_weights_that_are_trained_make_a_backward_necessary():
    """A frozen partition in front of a trained one records no graph."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layers[0].requires_grad_(False)
    stage = build_stages(split_layers(layers, [2]), [torch.device("cpu")])[0]
    weights = stage.begin(ForwardSeed()).weights
    assert [id(weight) for weight in weights] == [id(weight) for weight in layers[1].parameters()]


class Exponential(nn.Module):
    """Computes a sine of an exponential, of which autograd saves the exponential."""

    def __init__(self, references: list[weakref.ref]) -> None:
        super().__init__()
        self.references = references

    def forward(self, x):
        """Return it."""
        value = x.exp()
        self.references.append(weakref.ref(value))
        return value.sin()


def test_a_first_forward_saves_nothing_between_its_inputs_and_its_outputs():
    """That is why it is recomputed; the last micro-batch, which is not, saves its activations."""
    references: list[weakref.ref] = []
    pipe = Pipe(
        nn.Sequential(nn.Linear(2, 2), Exponential(references), nn.Tanh()), [2, 1], chunks=3
    )
    output = pipe(torch.rand(6, 2))
    gc.collect()
    assert [reference() is None for reference in references] == [True, True, False]
    output.sum().backward()
    assert len(references) == 5


class Pair(nn.Module):
    """Returns two outputs, of which the second has a gradient for positive inputs only."""

    def forward(self, x):
        """Return them."""
        return x * 2, x * 3 if bool((x > 0).all()) else x.detach() * 3


@pytest.mark.parametrize("mode", ["never", "always"])
def test_outputs_without_a_gradient_and_gradients_of_none_are_left_out_of_a_backward(mode):
    """An output that nobody uses has none; one that is a constant in a micro-batch takes none."""
    x = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    pipe = Pipe(nn.Sequential(Pair()), [1], chunks=2, checkpoint=mode)
    for place, expected in ((0, [[2.0], [2.0]]), (1, [[3.0], [0.0]])):
        x.grad = None
        pipe(x)[place].sum().backward()
        assert x.grad.tolist() == expected


@skippable(stash=["one", "two"])
class StashingTwo(nn.Module):
    """Stashes its input in two ways."""

    def forward(self, x):
        """Return it."""
        yield stash("two", x * 3)
        yield stash("one", x + 5)
        return x * 1


@skippable(pop=["one", "two"])
class PoppingTwo(nn.Module):
    """Uses both."""

    def forward(self, x):
        """Return a combination."""
        one = yield pop("one")
        two = yield pop("two")
        return x + one.square() * two


def test_skips_between_two_partitions_are_not_exchanged():
    """Each has a port of its own, in one order on both sides."""
    x = torch.rand(4, 2, requires_grad=True)
    pipe = Pipe(nn.Sequential(StashingTwo(), PoppingTwo()), [1, 1], devices=2, chunks=2)
    output = pipe(x)
    expected = x + (x + 5).square() * (x * 3)
    torch.testing.assert_close(output, expected)
    (grad,) = torch.autograd.grad(output.sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), x)[0])


class Penalised(nn.Module):
    """Has a side loss with a gradient for positive inputs, and a constant one for others."""

    def forward(self, x):
        """Return the input."""
        value = x.mean() if bool((x > 0).all()) else torch.ones(())
        side_loss(value)
        return x * 1


@pytest.mark.parametrize("signs", [(1.0, -1.0), (-1.0, 1.0)])
def test_a_side_loss_with_a_gradient_in_any_micro_batch_must_be_in_the_loss(signs):
    """Without it the backward would train another model; constants may be left out."""
    pipe = Pipe(nn.Sequential(nn.Identity(), Penalised()), [1, 1], devices=2, chunks=2)
    x = torch.tensor(signs)[:, None].requires_grad_()
    with pytest.raises(RunError, match=r"have called ps\.side_loss"):
        pipe(x).sum().backward()
    pipe(-torch.ones(2, 1, requires_grad=True)).sum().backward()
    assert not pipe.side_loss.requires_grad


def test_masks_differ_by_layer_and_micro_batch_and_stay_under_another_balance():
    """Layers are counted in the whole model."""
    masks = []
    for balance in ([1, 1], [2]):
        layers = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
        pipe = Pipe(layers, balance, devices=2, chunks=2)
        torch.manual_seed(3)
        masks.append(pipe(torch.ones(2, 200)))
    assert torch.equal(*masks)
    assert not torch.equal(*masks[0])
    # Equal masks of both layers would leave a half of the numbers, not a quarter.
    assert 0.15 < float((masks[0] != 0).float().mean()) < 0.35


def test_a_backward_that_draws_leaves_the_generator_of_the_caller():
    """Two partitions that draw in their backwards would otherwise depend on the order of threads."""

    class Noisy(nn.Module):
        def forward(self, x):
            x = x * 1
            x.register_hook(lambda grad: grad * torch.rand(()))
            return x

    pipe = Pipe(nn.Sequential(Noisy()), [1], chunks=1)
    for _ in range(3):
        loss = pipe(torch.ones(2, 2, requires_grad=True)).sum()
        state = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), state)


def test_a_partition_that_is_called_by_itself_draws_as_any_module_does():
    """Also after a forward in which its layers had the generators for themselves."""

    class Dropping(nn.Module):
        def forward(self, x):
            return functional.dropout(x, 0.5)

    layer, x = Dropping(), torch.ones(4, 20)
    pipe = Pipe(nn.Sequential(layer), [1])
    pipe(x)
    results = []
    for module in (layer, pipe.partitions[0]):
        torch.manual_seed(1)
        results.append(module(x))
    assert torch.equal(*results)
