"""`Pipe` with `loss=`: every synchronous schedule, with the gradients of the plain model."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import RunError, ScheduleError, SettingError
from penstock.modules.recomputing import is_checkpointing, is_recomputing
from penstock.pipe.pipe import Pipe
from penstock.schedule.catalogue import schedules

MODES = ("never", "except_last", "always")

#: Synchronous schedules of one copy of each stage whose micro-batches are not cut.
SCHEDULES = sorted(
    name
    for name, facts in schedules().items()
    if facts.synchronous
    and not facts.causal
    and name not in ("chimera", "dualpipe", "gems")  # copies of stages
)


def make_layers(count: int = 8) -> nn.Sequential:
    """Some layers of doubles, so that gradients can be compared closely."""
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(count // 2):
        layers += [nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(*layers).double()


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets; torch's default generator stays as it is."""
    source = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 6, generator=source, dtype=torch.float64)
    return x, torch.randn(samples, 6, generator=source, dtype=torch.float64)


def make_pipe(threads: bool | None, layers: nn.Sequential | None = None, **options) -> Pipe:
    """A Pipe of four partitions of equal size, in threads or one thread, or as it chooses."""
    layers = make_layers() if layers is None else layers
    options = {"chunks": 4, "loss": functional.mse_loss, "schedule": "1f1b", **options}
    balance = options.pop("balance", [len(layers) // 4] * 4)
    pipe = Pipe(layers, balance, devices=["cpu"] * len(balance), **options)
    force(pipe, threads)
    return pipe


def force(pipe: Pipe, threads: bool | None) -> None:
    """Let the ranks of a Pipe run in threads, or in the caller's thread."""
    pipe._scheduled_run(pipe.loss).choice.forced = threads


def grads_of(model: nn.Module) -> list[torch.Tensor | None]:
    """The gradients of all parameters."""
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gives_loss_and_gradients_of_the_plain_model(name, mode):
    """Whole batches, small ones and uneven ones, in threads and in one; two batches add up. Every
    mode has a size of its own, as far as the schedule can be made in three.
    """
    sizes = []
    for stages, chunks in ((2, 3), (4, 4), (4, 8)):
        with contextlib.suppress(ScheduleError):  # such as interleaved, which takes whole rounds
            ps.schedule(name, stages, chunks)
            sizes.append((stages, chunks))
    stages, chunks = sizes[MODES.index(mode) % len(sizes)]
    plain = make_layers()
    balance = [8 // stages] * stages
    pipe = make_pipe(None, schedule=name, chunks=chunks, checkpoint=mode, balance=balance)
    for samples, threads in ((16, True), (13, False), (2, True)):
        force(pipe, threads)
        x, y = batch(samples)
        loss, expected = pipe(x, y), functional.mse_loss(plain(x), y)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(grads_of(pipe), grads_of(plain))


class Counting(nn.Module):
    """Counts the micro-batches between their forward and their backward."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def forward(self, x):
        """Pass on a value, and count it until its gradient comes."""
        if is_checkpointing():
            return x * 1
        self.now += 1
        self.most = max(self.most, self.now)
        x = x * 1
        x.register_hook(self.end)
        return x

    def end(self, _):
        """One less."""
        self.now -= 1


@pytest.mark.parametrize("threads", [False, True])
def test_1f1b_holds_as_many_micro_batches_as_stages_follow(threads):
    """GPipe holds all of them: that is what the other schedules are for."""
    for name, expected in (("1f1b", [3, 2, 1]), ("gpipe", [6, 6, 6])):
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [nn.Linear(6, 6).double(), Counting()]
        pipe = make_pipe(
            threads, nn.Sequential(*layers), schedule=name, chunks=6, balance=[2, 2, 2]
        )
        pipe.checkpoint = "never"
        force(pipe, threads)
        pipe(*batch(12)).backward()
        assert [layer.most for layer in layers if isinstance(layer, Counting)] == expected


@pytest.mark.parametrize("threads", [False, True])
def test_gradients_are_handed_on_as_autograd_does(threads):
    """Hooks see the whole batch's gradient once, times that of the loss; frozen layers get none."""
    plain, pipe = make_layers(), make_pipe(threads)
    x, y = batch(9)
    seen: list[torch.Tensor] = []
    pipe[0].weight.register_hook(seen.append)
    for model in (plain, pipe):
        model[2].weight.requires_grad_(False)
    for model, loss in ((plain, functional.mse_loss(plain(x), y)), (pipe, pipe(x, y))):
        (loss.exp() + model[0].weight.sum()).backward()
    torch.testing.assert_close(grads_of(pipe), grads_of(plain))
    assert pipe[2].weight.grad is None
    # One call of the hook, with both terms of the sum.
    torch.testing.assert_close(seen, [plain[0].weight.grad])
    for model in (plain, pipe):  # thawed between batches
        model[2].weight.requires_grad_()
    functional.mse_loss(plain(x), y).backward()
    pipe(x, y).backward()
    torch.testing.assert_close(grads_of(pipe), grads_of(plain))


def test_autograd_grad_and_backward_with_inputs_leave_the_rest_alone():
    """The gradients wait in the node; nothing is in `.grad` before the caller says so."""
    plain, pipe = make_layers(), make_pipe(None)
    x, y = batch(8)
    loss = pipe(x, y)
    assert grads_of(pipe) == [None] * 8
    weights = [pipe[0].weight, pipe[6].bias]
    expected = torch.autograd.grad(
        functional.mse_loss(plain(x), y), [plain[0].weight, plain[6].bias]
    )
    torch.testing.assert_close(torch.autograd.grad(loss, weights), expected)
    pipe(x, y).backward(inputs=[pipe[0].weight])
    assert [grad is None for grad in grads_of(pipe)] == [False] + [True] * 7


def test_a_loss_has_one_backward_and_no_second_derivative():
    """As without loss=."""
    pipe = make_pipe(None)
    loss = pipe(*batch(8))
    with pytest.raises(RunError, match="create_graph"):
        torch.autograd.grad(loss, [pipe[0].weight], create_graph=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


class Odd(Exception):
    """An error of the user's own."""


class Failing(nn.Module):
    """Fails in its forward or its backward, if it is to."""

    when: str | None = None

    def forward(self, x):
        """Fail, or pass on."""
        if self.when == "forward":
            raise Odd("as it was to")
        x = x * 1
        x.register_hook(self.fail)
        return x

    def fail(self, _):
        """Fail, or pass on."""
        if self.when == "backward":
            raise Odd("as it was to")


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_the_error_of_a_layer_arrives_as_it_is_and_the_pipe_goes_on(when, threads):
    """What was in `.grad` is there again."""
    layers = make_layers()
    layers.insert(3, Failing())
    plain, pipe = make_layers(), make_pipe(threads, layers, balance=[2, 3, 2, 2])
    x, y = batch(8)
    pipe(x, y).backward()
    functional.mse_loss(plain(x), y).backward()
    layers[3].when = when
    with pytest.raises(Odd):
        pipe(x, y)
    torch.testing.assert_close(grads_of(pipe), grads_of(plain))
    layers[3].when = None
    pipe(x, y).backward()
    functional.mse_loss(plain(x), y).backward()
    torch.testing.assert_close(grads_of(pipe), grads_of(plain))


def dropping() -> nn.Sequential:
    """Layers that draw: torch's own, and a function."""

    class Noise(nn.Module):
        """Noise in training."""

        def forward(self, x):
            """Add some."""
            return x + torch.randn_like(x) if self.training else x

    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Linear(6, 6), Noise()).double()


def test_random_numbers_depend_on_the_callers_seed_alone():
    """The same under any schedule, in threads and in one, recomputed or not."""
    results = []
    for name, mode, threads in (
        ("gpipe", "never", True),
        ("1f1b", "never", False),
        ("1f1b", "always", True),
        ("zb-h1", "except_last", False),
    ):
        pipe = make_pipe(threads, dropping(), balance=[2, 2], schedule=name, checkpoint=mode)
        torch.manual_seed(7)
        losses = []
        for _ in range(3):
            loss = pipe(*batch(8))
            loss.backward()
            losses.append(loss.item())
        assert len(set(losses)) == 3
        results.append([losses, grads_of(pipe), torch.get_rng_state()])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_a_model_that_draws_nothing_leaves_the_generator_alone():
    """As without loss=."""
    pipe = make_pipe(None)
    before = torch.get_rng_state()
    pipe(*batch(8)).backward()
    assert torch.equal(before, torch.get_rng_state())


def test_outputs_and_losses_without_gradients():
    """In evaluation and under no_grad the Pipe is the plain model; in training it says what to do."""
    plain, pipe = make_layers(), make_pipe(None)
    x, y = batch(8)
    with pytest.raises(SettingError, match=r"call model\(input, target\)"):
        pipe(x)
    with torch.no_grad():
        torch.testing.assert_close(pipe(x), plain(x))
        loss = pipe(x, y)
    torch.testing.assert_close(loss, functional.mse_loss(plain(x), y).detach())
    assert not loss.requires_grad
    torch.testing.assert_close(pipe.eval()(x), plain(x))


def test_gpipe_with_a_loss_is_called_either_way():
    """Its backwards can wait for the caller's loss."""
    plain, pipe = make_layers(), make_pipe(None, schedule="gpipe")
    x, y = batch(8)
    functional.mse_loss(plain(x), y).backward()
    functional.mse_loss(plain(x), y).backward()
    functional.mse_loss(pipe(x), y).backward()
    pipe(x, y).backward()
    torch.testing.assert_close(grads_of(pipe), grads_of(plain))


@pytest.mark.parametrize("threads", [False, True])
def test_a_loss_that_ignores_targets_is_that_of_the_whole_batch(threads):
    """Micro-batches count as many tokens as they have."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))
    pipe = make_pipe(
        threads, copy.deepcopy(plain), balance=[1, 2], loss=nn.CrossEntropyLoss(ignore_index=0)
    )
    x, y = torch.randn(8, 5), torch.tensor([0, 0, 0, 1, 2, 3, 0, 2])
    expected, loss = functional.cross_entropy(plain(x), y, ignore_index=0), pipe(x, y)
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(grads_of(pipe), grads_of(plain))
    with torch.no_grad():
        torch.testing.assert_close(pipe(x, y), expected.detach())


def test_a_loss_that_cannot_be_divided_is_refused():
    """Its micro-batches would add up to another number."""
    pipe = make_pipe(None, loss=lambda output, target: (output - target).square().mean().sqrt())
    with pytest.raises(SettingError):
        pipe(*batch(8))


class Penalty(nn.Module):
    """A layer with a loss of its own."""

    def forward(self, x):
        """Call it."""
        ps.side_loss(x.square().mean())
        return x


@pytest.mark.parametrize("mode", MODES)
def test_side_losses_are_part_of_the_loss(mode):
    """As in ps.Pipeline."""
    plain = make_layers()
    layers = make_layers()
    layers.insert(2, Penalty())
    pipe = make_pipe(None, layers, balance=[2, 3, 2, 2], checkpoint=mode)
    x, y = batch(8)
    expected = functional.mse_loss(plain(x), y) + plain[:2](x).square().mean()
    loss = pipe(x, y)
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(grads_of(pipe), grads_of(plain))
    assert float(pipe.side_loss) == 0
    with torch.no_grad():
        torch.testing.assert_close(pipe(x, y), expected.detach())


@ps.skippable(stash=["early"])
class Stash(nn.Module):
    """Hands on its input to a layer far ahead."""

    def forward(self, x):
        """Stash it."""
        yield ps.stash("early", x)
        return x * 2


@ps.skippable(pop=["early"])
class Pop(nn.Module):
    """Takes it."""

    def forward(self, x):
        """Add it."""
        early = yield ps.pop("early")
        return x + early


@pytest.mark.parametrize("threads", [False, True])
def test_skips_pass_over_partitions(threads):
    """From the first partition to the last."""

    def skipping() -> nn.Sequential:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(6, 6), Stash(), nn.Linear(6, 6), Pop()).double()

    plain, pipe = skipping(), make_pipe(threads, skipping(), balance=[2, 1, 1])
    x, y = batch(8)
    functional.mse_loss(plain(x), y).backward()
    pipe(x, y).backward()
    torch.testing.assert_close(grads_of(pipe), grads_of(plain))


class Recomputing(nn.Module):
    """Runs a layer again in the backward."""

    def __init__(self, layer: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x):
        """Run it."""
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("threads", [False, True])
def test_deferred_batch_norm_has_the_statistics_of_the_whole_batch(mode, threads):
    """Also in a small batch."""

    def normed() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)).double()

    plain = normed()
    pipe = make_pipe(
        threads, normed(), balance=[2, 1], checkpoint=mode, deferred_batch_norm=True, chunks=4
    )
    for samples in (16, 6):
        x, y = batch(samples)
        plain(x)
        pipe(x, y).backward()
        torch.testing.assert_close(pipe[1].running_mean, plain[1].running_mean)
        torch.testing.assert_close(pipe[1].running_var, plain[1].running_var)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("loss", [None, functional.mse_loss])
def test_deferred_batch_norm_counts_once_where_a_layer_recomputes_by_itself(loss, reentrant):
    """The second forward is inside the backward of the stage, of whichever runtime."""

    def normed() -> nn.Sequential:
        torch.manual_seed(5)
        norm = Recomputing(nn.BatchNorm1d(6), reentrant=reentrant)
        return nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6)).double()

    plain = normed()
    pipe = Pipe(
        normed(),
        [2, 1],
        devices=2,
        checkpoint="never",
        deferred_batch_norm=True,
        chunks=4,
        schedule="1f1b" if loss else "gpipe",
        loss=loss,
    )
    for _ in range(2):
        x, y = batch(16)
        plain(x)
        (pipe(x, y) if loss else functional.mse_loss(pipe(x), y)).backward()
    torch.testing.assert_close(pipe[1].layer.running_mean, plain[1].layer.running_mean)
    torch.testing.assert_close(pipe[1].layer.running_var, plain[1].layer.running_var)


class Passes(nn.Module):
    """Notes which pass it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[bool, bool]] = []

    def forward(self, x):
        """Note it."""
        self.notes.append((is_checkpointing(), is_recomputing()))
        return x


@pytest.mark.parametrize("threads", [False, True])
def test_layers_are_told_of_first_and_second_forwards(threads):
    """As the peers tell them."""
    layers = nn.Sequential(nn.Linear(6, 6).double(), Passes())
    pipe = make_pipe(threads, layers, balance=[1, 1], checkpoint="except_last", chunks=2)
    layers[1].notes.clear()
    pipe(*batch(4)).backward()
    assert layers[1].notes == [(True, False), (False, True), (False, False)]
    assert not is_checkpointing()
    assert not is_recomputing()


def test_what_belongs_to_the_callers_thread_keeps_everything_in_it():
    """Hooks on saved tensors are thread-local."""

    class Noting(nn.Module):
        """Notes its thread."""

        def forward(self, x):
            """Note it."""
            names.add(threading.current_thread().name)
            return x

    names: set[str] = set()
    layers = nn.Sequential(nn.Linear(6, 6).double(), Noting())
    pipe = make_pipe(True, layers, balance=[1, 1])
    pipe(*batch(8))
    assert names == {"penstock-pipe-1"}
    names.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        pipe(*batch(8))
    assert names == {threading.current_thread().name}


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_autocast_of_the_caller_holds_in_all_threads(mode, threads):
    """Forward, recompute and loss."""
    plain, pipe = make_layers().float(), make_pipe(threads, make_layers().float(), checkpoint=mode)
    x, y = (part.float() for part in batch(8))
    with torch.autocast("cpu", torch.bfloat16):
        expected, loss = functional.mse_loss(plain(x), y.bfloat16()), pipe(x, y.bfloat16())
    expected.backward()
    loss.backward()
    torch.testing.assert_close(grads_of(pipe), grads_of(plain), rtol=0.1, atol=3e-3)
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(SettingError, match=r"torch\.bfloat16"),
    ):
        pipe(x, y)


def test_changes_of_the_model_and_its_settings_hold_from_the_next_batch():
    """Layers may be replaced, and chunks and checkpoint set, as with the peers."""
    pipe, plain = make_pipe(None), make_layers()
    x, y = batch(8)
    pipe(x, y)
    for model in (pipe.partitions[1], plain):
        torch.manual_seed(11)
        model[2 if model is plain else 0] = nn.Linear(6, 6).double()
    pipe.chunks, pipe.checkpoint = 2, "always"
    pipe(x, y).backward()
    functional.mse_loss(plain(x), y).backward()
    torch.testing.assert_close(grads_of(pipe), grads_of(plain))


def test_a_hook_on_a_nested_container_is_run_though_it_came_later():
    """The layers of a container are run one by one only as long as it does no more than that."""
    calls: list[int] = []
    layers = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6)).double()
    pipe = make_pipe(None, layers, balance=[1, 1], checkpoint="never")
    pipe(*batch(8))
    layers[0].register_forward_hook(lambda *_: calls.append(1))
    pipe(*batch(8))
    assert len(calls) == 4


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies_run_for_themselves(clone):
    """A Pipe that has run can be copied and pickled."""
    pipe = make_pipe(None)
    pipe(*batch(8))
    other = clone(pipe)
    other(*batch(8)).backward()
    assert grads_of(pipe) == [None] * 8
    pipe(*batch(8)).backward()
    torch.testing.assert_close(grads_of(other), grads_of(pipe))


def test_the_loss_is_no_part_of_the_model():
    """Checkpoints stay those of the layers."""
    pipe = make_pipe(None, loss=nn.CrossEntropyLoss(weight=torch.ones(6)))
    assert list(pipe.state_dict()) == list(Pipe(make_layers(), [2, 2, 2, 2]).state_dict())


def test_what_needs_another_way_is_refused_by_name():
    """Before anything is run; the message has the way."""
    x, y = batch(8)

    def pipe(**options):
        return make_pipe(None, **options)

    with pytest.raises(SettingError, match=r"1f1b runs backwards before the last forward.*loss="):
        Pipe(make_layers(), [4, 4], chunks=4, schedule="1f1b")
    with pytest.raises(SettingError, match="pass loss="):
        Pipe(make_layers(), [4, 4], chunks=4)(x, y)
    with pytest.raises(ScheduleError, match=r"asynchronous.*ps\.Pipeline"):
        pipe(schedule="pipedream")
    with pytest.raises(ScheduleError, match="copies of stages"):
        pipe(schedule="chimera")
    with pytest.raises(SettingError, match="4 partitions and 8 chunks"):
        pipe(schedule=ps.schedule("1f1b", 4, 4), chunks=8)
    with pytest.raises(ps.errors.UnknownName, match="1f1b"):
        pipe(schedule="1f2b")
    with pytest.raises(SettingError, match="computes gradients of its parameters only"):
        pipe()(x.requires_grad_(), y)
    tied = make_layers()
    tied[6].weight = tied[0].weight
    with pytest.raises(SettingError, match=r"0\.weight is in partitions 0, 3"):
        pipe(layers=tied)
    head = nn.Linear(6, 6).double()
    with pytest.raises(SettingError, match="trainable weight"):
        pipe(loss=lambda output, target: functional.mse_loss(head(output), target))
