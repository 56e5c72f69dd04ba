"""One partition of a `Pipe`: the second forward of recomputed micro-batches."""

from __future__ import annotations

import copy

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
    output = pipe.partitions[0](x)
    assert output.requires_grad
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


@skippable(stash=["input"])
class Stashing(nn.Module):
    """Stashes its input, and returns it."""

    def forward(self, x):
        """Return it."""
        yield stash("input", x)
        return x


@skippable(pop=["input"])
class Doubling(nn.Module):
    """Doubles its input in place, and adds what was stashed."""

    def forward(self, x):
        """Return the sum."""
        x.mul_(2)
        return x + (yield pop("input"))


def test_a_change_in_place_of_a_value_that_a_skip_shares_is_refused():
    """In the plain model the stashed tensor changes too; behind the ports each is by itself."""
    pipe = Pipe(nn.Sequential(Stashing(), Doubling()), [1, 1], devices=2, chunks=2)
    with pytest.raises(RunError, match=r"share memory cross .* changes one of them in place"):
        pipe(torch.ones(4, 2))


def test_a_layer_that_begins_to_change_its_input_in_place_is_refused_once():
    """Without copies, which it did not need before, the partition before would see the change."""

    class Changing(nn.Module):
        in_place = False

        def forward(self, x):
            return x.mul_(2) if self.in_place else x * 2

    layers = nn.Sequential(nn.Linear(2, 2), Changing())
    pipe, x = Pipe(layers, [1, 1], devices=2, chunks=1).eval(), torch.ones(4, 2)
    expected = pipe(x).detach()
    layers[1].in_place = True
    with torch.no_grad():
        with pytest.raises(RunError, match=r"in place .* had not done so in its first forward"):
            pipe(x)
        torch.testing.assert_close(pipe(x), expected)
