"""Forwards and backwards of a `Pipe` in threads and in one thread, and failures in them."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.pipe.layers import forced, forced_from_the_start, make_pipe, ticking_clock
from tests.time_limits import HANG_S
from torch import nn

from penstock.pipe import pipe_engine
from penstock.pipe.pipe import Pipe
from penstock.pipe.pipe_arguments import build_stages
from penstock.pipe.pipe_engine import AutocastState, Engine


class Noting(nn.Module):
    """Notes the thread that it runs in, forward and backward."""

    def __init__(self, notes: set[str]) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, x):
        """Note it."""
        self.notes.add(threading.current_thread().name)
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda _: self.notes.add(threading.current_thread().name))
        return x


def test_every_partition_has_a_thread_of_its_own_in_both_halves():
    """The peers' backward on a CPU is one thread's."""
    notes: list[set[str]] = [set(), set()]
    x = torch.rand(4, requires_grad=True)
    pipe = forced(
        Pipe(nn.Sequential(*map(Noting, notes)), [1, 1], devices=2, chunks=2, checkpoint="never"),
        x,
        threads=True,
    )
    for names in notes:
        names.clear()
    pipe(x).sum().backward()
    assert notes == [{"penstock-pipe-0"}, {"penstock-pipe-1"}]


def test_a_mode_of_the_callers_thread_keeps_everything_in_it():
    """Hooks on what autograd saves belong to a thread; layers in others would not come by them."""
    notes: set[str] = set()
    x = torch.rand(4, requires_grad=True)
    pipe = forced(
        Pipe(nn.Sequential(nn.Tanh(), Noting(notes)), [1, 1], devices=2, chunks=2), x, threads=True
    )
    notes.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        pipe(x).sum().backward()
    assert notes == {threading.current_thread().name}


class Odd(Exception):
    """An error of the user's own."""


class Failing(nn.Module):
    """Fails when it is told to, in its forward or its backward."""

    when: str | None = None

    def forward(self, x):
        """Fail, or pass on."""
        if self.when == "forward":
            raise Odd("as it was told")
        x = x * 1
        if x.requires_grad and self.when == "backward":
            x.register_hook(self.fail)
        return x

    def fail(self, _):
        """Fail."""
        raise Odd("as it was told")


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_a_layer_raises_reaches_the_caller_and_the_pipe_goes_on(place, when, threads):
    """The user's own `except` must work, and a batch that failed must not hang or spoil the next."""
    layers: list[nn.Module] = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)]
    failing = Failing()
    layers[place] = nn.Sequential(layers[place], failing)
    x = torch.rand(6, 2)
    pipe = forced(Pipe(nn.Sequential(*layers), [1, 1, 1], devices=3, chunks=3), x, threads)
    failing.when = when
    with pytest.raises(Odd, match="as it was told"):
        pipe(x).sum().backward()
    failing.when = None
    pipe.zero_grad()
    grads = torch.autograd.grad(pipe(x).sum(), list(pipe.parameters()))
    torch.testing.assert_close(
        grads, torch.autograd.grad(nn.Sequential(*layers)(x).sum(), list(pipe.parameters()))
    )


def test_partitions_before_one_that_failed_stop_soon():
    """Work whose result nobody will see is not done."""
    turns: list[int] = []
    failed = threading.Event()

    class Counting(nn.Module):
        # Layers that may draw random numbers run one at a time, so that one must not wait here.
        draws = False

        def forward(self, x):
            if turns:
                failed.wait(HANG_S)
            turns.append(len(x))
            return x

    class Last(nn.Module):
        draws = False

        def forward(self, x):
            try:
                raise Odd("at the first micro-batch")
            finally:
                failed.set()

    with pytest.raises(Odd, match="at the first"):
        forced_from_the_start(Pipe(nn.Sequential(Counting(), Last()), [1, 1], devices=2, chunks=8))(
            torch.rand(8)
        )
    assert len(turns) <= 3


def test_two_pipes_work_side_by_side_in_threads_of_the_callers():
    """Nothing belongs to the process."""
    x = torch.rand(8, 4)
    pipes = [
        forced(
            Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], devices=2, chunks=4),
            x,
            True,
        )
        for _ in range(2)
    ]
    grads: dict[int, list[torch.Tensor]] = {}

    def train(place: int) -> None:
        for _ in range(5):
            pipes[place](x).square().sum().backward()
        grads[place] = [p.grad for p in pipes[place].parameters()]

    threads = [threading.Thread(target=train, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, pipe in enumerate(pipes):
        expected = torch.autograd.grad(
            nn.Sequential(*pipe)(x).square().sum(), list(pipe.parameters())
        )
        torch.testing.assert_close(grads[place], [5 * grad for grad in expected])


class Recording(nn.Module):
    """Records its name and the first number of each micro-batch, in forward and backward."""

    def __init__(self, name: str, ops: list[str]) -> None:
        super().__init__()
        self.name, self.ops = name, ops

    def forward(self, x):
        """Record, and return the input."""
        number = int(x.detach()[0, 0])
        self.ops.append(f"F{self.name}{number}")
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda _: self.ops.append(f"B{self.name}{number}"))
        return x


def test_one_thread_runs_the_clock_ticks_of_gpipe():
    """In a tick each partition has another micro-batch; the backward takes both in reverse."""
    ops: list[str] = []
    layers = nn.Sequential(*(Recording(name, ops) for name in "abc"))
    pipe = Pipe(layers, [1, 1, 1], devices=3, chunks=4, checkpoint="never")
    x = torch.arange(4.0)[:, None].requires_grad_()
    forced(pipe, x, threads=False)
    ops.clear()
    pipe(x).sum().backward()
    forwards = "Fa0 Fa1 Fb0 Fa2 Fb1 Fc0 Fa3 Fb2 Fc1 Fb3 Fc2 Fc3"
    backwards = "Bc3 Bc2 Bb3 Bc1 Bb2 Ba3 Bc0 Bb1 Ba2 Bb0 Ba1 Ba0"
    assert ops == f"{forwards} {backwards}".split()


def test_threads_run_each_partition_in_the_order_of_the_micro_batches():
    """Every port is a queue: its writer and its reader need the same order."""
    ops: list[list[str]] = [[], []]
    pipe = Pipe(
        nn.Sequential(*(Recording("", row) for row in ops)),
        [1, 1],
        devices=2,
        chunks=3,
        checkpoint="never",
    )
    x = torch.arange(3.0)[:, None].requires_grad_()
    forced(pipe, x, threads=True)
    for row in ops:
        row.clear()
    pipe(x).sum().backward()
    assert ops == [["F0", "F1", "F2", "B2", "B1", "B0"]] * 2


def test_autocast_is_restored_as_it_was_when_the_state_was_captured():
    """Also where it was off and is on now: a backward may run inside the caller's autocast."""
    cpu = [torch.device("cpu")]
    with torch.autocast("cpu", torch.float16):
        half = AutocastState(cpu, caching=True)
    off = AutocastState(cpu, caching=True)
    with half.restored():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert torch.is_autocast_cache_enabled()
        with off.restored():
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_keeps_no_copies_of_weights_where_there_are_recomputes():
    """Nor where the caller has switched them off."""
    cpu = [torch.device("cpu")]
    with torch.autocast("cpu", torch.bfloat16):
        for caching in (True, False):
            with AutocastState(cpu, caching=caching).restored():
                assert torch.is_autocast_cache_enabled() == caching
    with (
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        AutocastState(cpu, caching=True).restored(),
    ):
        assert not torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_mixed_precision_of_the_caller_holds_in_all_threads_and_in_the_recompute(mode, threads):
    """Weights' copies made without a graph must not serve a micro-batch with one: gradients would
    be lost.
    """
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(6, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.cat([model(part) for part in x.chunk(3)])
        expected_grads = torch.autograd.grad(
            expected.float().square().sum(), list(model.parameters())
        )
    pipe = Pipe(model, [1, 2], devices=2, chunks=3, checkpoint=mode)
    pipe(x)
    for choice in pipe._engine.choices.values():
        choice.forced = threads
    with torch.autocast("cpu", torch.bfloat16):
        output = pipe(x)
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(
        torch.autograd.grad(output.float().square().sum(), list(model.parameters())),
        expected_grads,
        rtol=0.02,
        atol=0.02,
    )


@pytest.mark.parametrize("threads", [False, True])
def test_the_time_of_an_op_is_the_cpu_time_of_all_threads_divided_by_the_number_of_ops(
    threads, monkeypatch
):
    """By it the choice between threads and one thread is made, separately for both halves."""
    monkeypatch.setattr(pipe_engine, "time", ticking_clock())
    pipe = make_pipe(devices=2, chunks=3)
    pipe._engine = Engine(build_stages(pipe.partitions, pipe.devices))
    for choice in pipe._engine.choices.values():
        choice.forced = threads
    output = pipe(torch.randn(6, 4))
    expected = 2 / 6 if threads else 1 / 6  # one second per thread, 6 ops
    assert pipe._engine.choices["forward"].seconds_per_op == pytest.approx(expected)
    assert pipe._engine.choices["backward"].seconds_per_op == float("inf")
    output.sum().backward()
    assert pipe._engine.choices["backward"].seconds_per_op == pytest.approx(expected)


@pytest.mark.parametrize(("layer", "shared"), [(Noting, False), (nn.Identity, True)])
def test_threads_inside_ops_are_shared_unless_layers_run_in_turn(layer, shared, monkeypatch):
    """Layers of the user hold a lock in observed forwards, of which this is the first."""
    calls = []
    pipe = Pipe(nn.Sequential(layer(set()), layer(set())), [1, 1], devices=2, chunks=2)
    pipe = forced_from_the_start(pipe)
    run = pipe._engine._threads.run

    def note(jobs, stop, *, in_turn):
        calls.append(in_turn)
        run(jobs, stop, in_turn=in_turn)

    monkeypatch.setattr(pipe._engine._threads, "run", note)
    pipe(torch.ones(4))
    assert calls == [not shared]
