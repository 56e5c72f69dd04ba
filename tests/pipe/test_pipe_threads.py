"""Who plays the partitions of a `Pipe`: threads, or one; failures; and random numbers, the same
with both.
"""

from __future__ import annotations

import threading

import pytest
import torch
from tests.time_limits import HANG_S
from torch import nn
from torch.nn import functional

from penstock.pipe.pipe import Pipe
from penstock.pipe.pipe_threads import MIN_THREADED_OP_S, ThreadChoice


class Dropping(nn.Module):
    """Drops numbers by torch's function, of which no module knows."""

    def __init__(self, share: float = 0.3) -> None:
        super().__init__()
        self.share = share

    def forward(self, x):
        """Drop some."""
        return functional.dropout(x, self.share, self.training)


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


def forced(pipe: Pipe, x, threads: bool | None) -> Pipe:
    """The same pipe, which from now on uses threads, or none."""
    with torch.no_grad():
        pipe(x)
    for choice in pipe._engine.choices.values():
        choice.forced = threads
    return pipe


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


def test_threads_are_used_where_ops_are_long_and_not_where_they_are_short():
    """Below some hundred microseconds, two threads only pass the interpreter back and forth."""
    choice = ThreadChoice()
    choice._cores = 2
    assert choice.use_threads()
    choice.seconds_per_op = 2 * MIN_THREADED_OP_S
    assert choice.use_threads()
    choice.seconds_per_op = MIN_THREADED_OP_S / 2
    assert not choice.use_threads()
    choice.seconds_per_op, choice._cores = 2 * MIN_THREADED_OP_S, 1
    assert not choice.use_threads()


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


def forced_from_the_start(pipe: Pipe) -> Pipe:
    """Threads at the first forward already."""
    from penstock.pipe.pipe_arguments import build_stages
    from penstock.pipe.pipe_engine import Engine

    pipe._engine = Engine(build_stages(pipe.partitions, pipe.devices))
    for choice in pipe._engine.choices.values():
        choice.forced = True
    return pipe


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


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("make", [lambda: nn.Dropout(0.3), Dropping])
def test_dropout_is_the_same_by_seed_with_threads_or_none_and_at_the_recompute(make, mode):
    """`x.grad` is non-zero exactly where the output is: forward and recompute have dropped the
    same.
    """
    results = []
    for threads in (None, True, False):
        x = torch.ones(6, 50, requires_grad=True)
        pipe = forced(
            Pipe(
                nn.Sequential(make(), make(), make()), [1, 2], devices=2, chunks=3, checkpoint=mode
            ),
            x,
            threads,
        )
        torch.manual_seed(7)
        output = pipe(x)
        torch.manual_seed(8)
        output.sum().backward()
        torch.testing.assert_close(x.grad, output.detach())
        results.append(output.detach())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert 0 < int(results[0].count_nonzero()) < results[0].numel()


def test_dropout_does_not_depend_on_the_balance_and_differs_from_forward_to_forward():
    """It depends on the layer and the micro-batch, never on the cut; and two forwards are two
    draws.
    """
    outputs = []
    for balance in ([3], [1, 2], [2, 1]):
        pipe = Pipe(
            nn.Sequential(Dropping(), nn.Dropout(0.2), Dropping()), balance, devices=2, chunks=3
        )
        torch.manual_seed(7)
        outputs.append((pipe(torch.ones(6, 20)), pipe(torch.ones(6, 20))))
    assert all(
        torch.equal(one, outputs[0][0]) and torch.equal(other, outputs[0][1])
        for one, other in outputs
    )
    assert not torch.equal(*outputs[0])
    assert not torch.equal(outputs[0][0][:2], outputs[0][0][2:4])


def test_a_model_that_draws_nothing_leaves_the_callers_generator_alone():
    """As the plain model does."""
    pipe, before = (
        Pipe(nn.Sequential(Dropping(0.0), nn.Linear(2, 2)), [1, 1], devices=2, chunks=2),
        torch.get_rng_state(),
    )
    pipe(torch.rand(1).expand(4, 2)).sum().backward()
    torch.set_rng_state(before)
    pipe(torch.ones(4, 2)).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


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


def test_threads_inside_an_op_are_shared_and_the_callers_number_stays():
    """Two partitions that each use all cores inside their ops would fight for them; those of an
    observed forward (1, 2, 4, 8 and so on) hold a lock in turn.
    """
    thread_counts: list[int] = []

    class Asking(nn.Module):
        def forward(self, x):
            thread_counts.append(torch.get_num_threads())
            return x

    pipe = Pipe(nn.Sequential(Asking(), Asking()), [1, 1], devices=2)
    caller_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        forced_from_the_start(pipe)
        for _ in range(3):
            pipe(torch.rand(2))
            assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(caller_threads)
    assert thread_counts == [4, 4, 4, 4, 2, 2]
