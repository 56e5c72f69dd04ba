"""A `Pipe` with `loss=` under every synchronous schedule, in threads and in one thread."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from tests.pipe.layers import ticking_clock
from tests.pipe.scheduled import MODES, batch, force, grads_of, make_layers, make_pipe
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import ScheduleError, SettingError
from penstock.modules.recomputing import is_checkpointing, is_recomputing
from penstock.pipe import scheduled_run
from penstock.pipe.pipe import Pipe
from penstock.schedule.catalogue import schedules

#: Synchronous schedules of one copy of each stage whose micro-batches are not cut.
SCHEDULES = sorted(
    name
    for name, facts in schedules().items()
    if facts.synchronous
    and not facts.causal
    and name not in ("chimera", "dualpipe", "gems")  # copies of stages
)


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
    """What was in `.grad` is there again, and activations and messages of the batch are dropped."""
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
    for interpreter in pipe._scheduled_run(pipe.loss)._interpreters:
        assert interpreter.activation_meter.now == 0
        assert not interpreter._values
        assert not interpreter._arrivals
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


@pytest.mark.filterwarnings("ignore:whether the losses of micro-batches add up")
def test_a_loss_that_draws_has_new_numbers_in_each_batch():
    """Also where no layer draws; by the caller's seed they are the same again, though the form of
    the loss is examined in some batches only.
    """
    pipe = make_pipe(None, loss=lambda output, target: (output - target).mul(torch.rand(())).sum())
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results.append([pipe(*batch(8)).item() for _ in range(3)])
    assert results[0] == results[1]
    assert len(set(results[0])) == 3


def test_a_model_that_draws_nothing_leaves_the_generator_alone():
    """As without loss=."""
    pipe = make_pipe(None)
    before = torch.get_rng_state()
    pipe(*batch(8)).backward()
    assert torch.equal(before, torch.get_rng_state())


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
    with pytest.raises(SettingError, match="with loss= all partitions of a Pipe are on one device"):
        Pipe(make_layers(), [4, 4], devices=["cpu", "meta"], loss=functional.mse_loss)
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


@pytest.mark.parametrize("threads", [False, True])
def test_sequences_may_be_cut_into_slices(threads):
    """Under the schedule of TeraPipe; the layers process each token for itself."""
    plain = make_layers()
    schedule = ps.schedule("terapipe", 4, 2, slices=3)
    pipe = make_pipe(threads, schedule=schedule, chunks=2)
    source = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, 9, 6, generator=source, dtype=torch.float64) for _ in range(2))
    expected, loss = functional.mse_loss(plain(x), y), pipe(x, y)
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(grads_of(pipe), grads_of(plain))


def test_a_batch_without_samples_is_refused():
    """There is nothing to divide into micro-batches."""
    x, y = batch(2)
    with pytest.raises(SettingError, match="the same number of samples, at least 1"):
        make_pipe(None)(x[:0], y[:0])


@pytest.mark.parametrize(("threads", "seconds"), [(False, 1.0), (True, 4.0)])
def test_the_time_of_an_op_is_that_of_all_ranks_divided_by_forwards_and_backwards(
    threads, seconds, monkeypatch
):
    """By it the choice between threads and one thread is made; updates do not count."""
    monkeypatch.setattr(scheduled_run, "time", ticking_clock())
    pipe = make_pipe(threads)
    pipe(*batch(8))
    choice = pipe._scheduled_run(pipe.loss).choice
    assert choice.seconds_per_op == seconds / (2 * 4 * 4)  # halves, stages, micro-batches
