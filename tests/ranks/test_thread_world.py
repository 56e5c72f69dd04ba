"""Ranks as threads: what fails in one stops all, is named, and leaves the pipeline fit to go on."""

from __future__ import annotations

import gc
import re
import threading
import weakref

import pytest
import torch
from tests.conformance.models import CASES, made
from tests.conformance.reference import differences, gradients
from tests.runtime.failing import Trap
from tests.time_limits import HANG_S
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import DeadlineExceeded, PeerFailed, RunError, SettingError, StageFailed
from penstock.ranks import thread_world as threads
from penstock.ranks.thread_world import ThreadWorld
from penstock.schedule.lower import Message
from penstock.schedule.op import Kind

X, Y = torch.linspace(-1, 1, 8 * 16).reshape(8, 16), torch.arange(8) % 4


def with_trap(stage, trap, optimizer=None, stages=3, **options):
    """Stages of two layers each, with the trap in front of one of them."""
    torch.manual_seed(0)
    layers = [layer for _ in range(stages) for layer in (nn.Linear(16, 16), nn.Tanh())]
    layers.insert(2 * stage, trap)
    lengths = [3 if index == stage else 2 for index in range(stages)]
    options = {"micro_batches": 4, "executor": "threads", **options}
    return ps.Pipeline(
        nn.Sequential(*layers),
        loss=functional.cross_entropy,
        balance=lengths,
        optimizer=optimizer,
        **options,
    )


def rank_threads():
    """The threads of all pipelines in this process."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("penstock-rank")]


def end(pipe, trap, others):
    """Let a stuck layer go on, and wait for the ranks' threads to end; `others` are not theirs.

    A thread that goes on later puts torch's generator back to what it was, in the middle of the
    next test.
    """
    trap.release.set()
    pipe.close()
    for thread in set(rank_threads()) - others:
        thread.join(HANG_S)


def left_in(pipe):
    """Everything that stages keep between a forward and its backward."""
    return [
        state
        for stage in pipe._assembly.stages
        for state in (stage._saved, stage._pending)
        if state
    ]


FAILURES = [  # stages, stage, kind, at, recompute, the op that fails
    (3, 0, "F", 2, "never", "0F2"), (3, 1, "F", 2, "never", "1F2"), (3, 2, "F", 2, "never", "2F2"),
    (3, 1, "B", 1, "never", "1B1"), (3, 2, "B", 1, "never", "2B1"), (1, 0, "F", 2, "never", "0F2"),
    (3, 1, "F", 2, "always", "1B0"), (3, 2, "F", 1, "always", "2B0"), (3, 1, "B", 1, "always", "1B1"),
    (1, 0, "F", 1, "always", "0B0"),
]  # fmt: skip


@pytest.mark.parametrize(("stages", "stage", "kind", "at", "recompute", "op"), FAILURES)
def test_an_op_that_raises_is_named_with_rank_stage_step_and_cause(
    stages, stage, kind, at, recompute, op
):
    """Where it failed is the whole diagnosis; the layer's own error is chained. A forward that runs
    again does so in a backward.
    """
    pipe = with_trap(stage, Trap("raise", kind, at), recompute=recompute, stages=stages)
    message = (
        rf"^rank {stage} \(stage {stage}\) failed in {op} of step 0: ValueError: a planted failure$"
    )
    with pytest.raises(StageFailed, match=message) as error:
        pipe.train_batch(X, Y)
    assert (error.value.rank, error.value.stage, error.value.op, error.value.step) == (
        stage,
        stage,
        op,
        0,
    )
    assert isinstance(error.value.__cause__, ValueError)


@pytest.mark.parametrize(
    "optimizer", [None, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)]
)
@pytest.mark.parametrize("what", ["raise", "exit"])
@pytest.mark.parametrize(("kind", "stages"), [("F", 1), ("F", 3), ("B", 3)])
def test_after_a_failed_batch_nothing_is_kept_and_the_next_is_exact(kind, stages, what, optimizer):
    """In a notebook one mends the layer and goes on: half a batch's gradients must not be in the
    next update.
    """
    trap = Trap(what, kind, at=2)
    stage = stages - 1
    pipe = with_trap(stage, trap, optimizer, stages)
    fresh = with_trap(stage, Trap(kind="never"), optimizer, stages)
    with pytest.raises(
        SystemExit if what == "exit" else StageFailed,
        match="3" if what == "exit" else "a planted failure",
    ):
        pipe.train_batch(X, Y)
    assert left_in(pipe) == []
    assert pipe.step == 0
    assert all(
        not stage.update.parameters or stage.update.parameters[0].grad is None
        for stage in pipe._assembly.stages
    )
    with pytest.raises(RunError, match="there is no timeline yet"):
        pipe.timeline()
    trap.armed = False
    assert torch.equal(pipe.train_batch(X, Y), fresh.train_batch(X, Y))
    assert left_in(pipe) == []
    losses, expected = (
        {k: p.grad for p, k in zip(s.update.parameters, "wb", strict=True)}
        for s in (pipe._assembly.stages[-1], fresh._assembly.stages[-1])
    )
    assert differences(losses, expected) == []
    assert len(pipe.timeline().compute) == stages * 9


def test_two_failures_at_once_are_told_by_the_first(monkeypatch):
    """What the second rank met is often only what the first left behind."""
    world = ThreadWorld(2, torch.device("cpu"), deadline_s=30)
    first_is_out = threading.Event()
    stop = world._stop

    def told(reason):
        stop(reason)
        first_is_out.set()

    monkeypatch.setattr(world, "_stop", told)

    def job(rank):
        if rank == 0:
            first_is_out.wait()
            raise ValueError("the second")
        raise KeyError("the first")

    with pytest.raises(KeyError, match="the first"):
        world.run(job)
    assert world.run(lambda rank: rank) == {0: 0, 1: 1}


def test_a_rank_that_waits_for_a_failed_one_learns_its_rank_and_error():
    """Errors of layers do not name the rank by themselves."""
    world, reasons = ThreadWorld(2, torch.device("cpu"), deadline_s=HANG_S), []

    def job(rank):
        if rank == 1:
            raise ValueError("no such token")
        try:
            world.transport(0).post(1, Message(Kind.F, 0, 0), "").wait()
        finally:
            reasons.append(world.board(0).failure())

    with pytest.raises(ValueError, match="no such token"):
        world.run(job)
    assert reasons == ["rank 1: ValueError: no such token"]


def test_every_rank_makes_its_device_the_current_one_of_its_thread():
    """CUDA's current device is of a thread: without this, a rank on cuda:1 would launch what has no
    device on cuda:0.
    """
    entered = []

    def enter(device):
        entered.append((threading.current_thread().name, device))

    world = ThreadWorld(2, torch.device("cuda:1"), 30, enter)
    world.run(lambda rank: entered.append((threading.current_thread().name, rank)))
    for rank in range(2):
        name = f"penstock-rank-{rank}"
        calls = [value for thread, value in entered if thread == name]
        assert calls == [torch.device("cuda:1"), rank]


def test_a_device_that_cannot_be_entered_fails_its_rank():
    """A thread that died of it would leave the caller waiting until the deadline."""

    def enter(device):
        raise RuntimeError(f"{device} is out of memory")

    world = ThreadWorld(2, torch.device("cuda:1"), 30, enter)
    with pytest.raises(RuntimeError, match="cuda:1 is out of memory"):
        world.run(lambda rank: rank)


def test_a_card_that_is_not_visible_is_refused_before_anything_starts():
    """torch's own error would come from the first layer that is moved."""
    index = torch.accelerator.device_count() if torch.cuda.is_available() else 0
    with pytest.raises(SettingError, match=rf"device='cuda:{index}' is requested"):
        ps.Pipeline(
            nn.Sequential(nn.Linear(16, 4)),
            loss=functional.cross_entropy,
            balance=[1],
            executor="threads",
            device=f"cuda:{index}",
        )


def test_a_rank_that_waits_too_long_says_for_what_and_what_the_others_are_at(monkeypatch):
    """A stuck op cannot be stopped in a thread; the caller is told within the deadline and may go
    on without this pipeline.
    """
    monkeypatch.setattr(threads, "_GRACE_S", 0.2)
    monkeypatch.setattr("penstock.stage.stage_random.may_draw", lambda module: False)
    others = set(rank_threads())
    trap = Trap("hang", "F", at=1)
    pipe = with_trap(1, trap, deadline_s=1.0, schedule="naive")
    with pytest.raises(
        DeadlineExceeded, match=r"rank \d has waited \d+ s for \d[FB]\d, past its deadline"
    ) as error:
        pipe.train_batch(X, Y)
    assert re.search(r"rank 1 is at 1F1 since \d+ s", str(error.value))
    with pytest.raises(
        RunError,
        match=r"cannot go on after a batch that failed: rank 1 is at 1F1 since \d+ s. Make a new Pipeline",
    ):
        pipe.train_batch(X, Y)
    end(pipe, trap, others)


def test_layers_that_wait_for_each_others_random_numbers_are_let_go_too(monkeypatch):
    """A layer that may draw holds the random generators: while it hangs, the others stand still
    inside their own ops.
    """
    monkeypatch.setattr(threads, "_GRACE_S", 0.2)
    others = set(rank_threads())
    trap = Trap("hang", "F", at=1)
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 4), trap)
    pipe = ps.Pipeline(
        model,
        loss=functional.cross_entropy,
        balance=[2, 1],
        micro_batches=4,
        schedule="gpipe",
        deadline_s=1.0,
        executor="threads",
    )
    with pytest.raises(
        DeadlineExceeded, match=r"rank \d has waited \d+ s for .*, past its deadline"
    ) as error:
        pipe.train_batch(X, Y)
    assert "rank 1 is at 1F1" in str(error.value) or "an end to where it is at 1F1" in str(
        error.value
    )
    end(pipe, trap, others)


def test_an_interrupt_stops_the_ranks_and_the_pipeline_can_go_on(monkeypatch):
    """Ctrl-C in a notebook, in the middle of a batch: the ranks' threads must not go on behind the
    caller's back.
    """
    pipe = with_trap(0, Trap(kind="never"))
    waited = threads.wait
    calls = []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return waited(*args)

    monkeypatch.setattr(threads, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipe.train_batch(X, Y)
    monkeypatch.undo()
    assert left_in(pipe) == []
    fresh = with_trap(0, Trap(kind="never"))
    assert torch.equal(pipe.train_batch(X, Y), fresh.train_batch(X, Y))


def test_a_pipeline_that_is_dropped_ends_its_threads_and_frees_its_stages():
    """Notebooks make pipelines by the dozen, and nobody calls close()."""
    gc.collect()
    before = set(rank_threads())
    pipe = with_trap(0, Trap(kind="never"))
    pipe.train_batch(X, Y)
    ours = set(rank_threads()) - before
    assert len(ours) == 3
    stage = weakref.ref(pipe._assembly.stages[0])
    del pipe
    gc.collect()
    for thread in ours:
        thread.join(HANG_S)
    assert not any(thread.is_alive() for thread in ours)
    assert stage() is None


def test_a_closed_pipeline_runs_again_when_it_is_asked_to():
    """close() lets go of threads, no more."""
    before = set(rank_threads())
    pipe = with_trap(0, Trap(kind="never"))
    loss = pipe.eval_batch(X, Y)
    ours = set(rank_threads()) - before
    assert len(ours) == 3
    pipe.close()
    for thread in ours:
        thread.join(HANG_S)
    assert not any(thread.is_alive() for thread in ours)
    assert torch.equal(pipe.eval_batch(X, Y), loss)
    pipe.close()
    pipe.close()


def test_a_batch_and_its_outputs_are_freed_when_it_is_done():
    """Activations of a step that is over are the next step's memory."""
    case = CASES["mlp"]
    model, x, y = made(case)
    pipe = ps.Pipeline(model, loss=case.loss, balance=[3, 4], micro_batches=2, executor="threads")
    references = []
    model[3].register_forward_hook(
        lambda module, given, output: references.append(weakref.ref(output))
    )
    pipe.train_batch(x, y)
    pipe.forward(x)
    gc.collect()
    assert len(references) == 4
    assert [reference for reference in references if reference() is not None] == []
    assert pipe._world._exchange._payloads == {}


def test_there_is_no_timeline_of_a_batch_that_failed():
    """The times of the batch before would be taken for it."""
    trap = Trap("raise", "F", at=5)
    pipe = with_trap(1, trap)
    pipe.train_batch(X, Y)
    assert pipe.timeline().events
    with pytest.raises(StageFailed, match="1F1"):
        pipe.train_batch(X, Y)
    with pytest.raises(RunError, match="there is no timeline yet"):
        pipe.timeline()


def test_messages_of_a_failed_batch_do_not_reach_the_next():
    """A payload left behind under the same name would be taken for the new one."""
    trap = Trap("raise", "F", at=0)
    pipe = with_trap(2, trap, schedule="gpipe")
    with pytest.raises(StageFailed, match="2F0"):
        pipe.train_batch(X, Y)
    trap.armed = False
    fresh = with_trap(2, Trap(kind="never"), schedule="gpipe")
    assert torch.equal(pipe.train_batch(-X, Y), fresh.train_batch(-X, Y))


def test_what_cannot_cross_a_boundary_is_named():
    """A tensor inside a set would pass with the graph of another stage: its gradient would be lost."""

    class Strange(nn.Module):
        def forward(self, x):
            return {"x": x, "set": {x}}

    class Back(nn.Module):
        def forward(self, value):
            return value["x"]

    pipe = ps.Pipeline(
        nn.Sequential(nn.Linear(16, 4), Strange(), Back()),
        loss=functional.cross_entropy,
        balance=[2, 1],
        micro_batches=2,
        executor="threads",
    )
    with pytest.raises(
        RunError,
        match=r"^rank 0 \(stage 0\) failed in 0F0 of step 0: Unflattenable: a set cannot cross a stage boundary",
    ):
        pipe.train_batch(X, Y)


def test_peers_of_a_failed_rank_tell_its_reason():
    """Whoever is let go repeats why, in case its message is the only one that is seen."""
    world = ThreadWorld(2, torch.device("cpu"), deadline_s=30)
    reasons = []

    def job(rank):
        if rank == 0:
            raise StageFailed(0, 0, "0F0", 7, "ValueError: x")
        try:
            world.transport(1).post(0, ("F", 0, 0), "").wait()
        except Exception as error:
            reasons.append((world.board(1).failure(), str(error)))
            raise PeerFailed(1, "0F0", str(error)) from error

    with pytest.raises(
        StageFailed, match=r"rank 0 \(stage 0\) failed in 0F0 of step 7: ValueError: x"
    ):
        world.run(job)
    assert reasons == [("rank 0 (stage 0) failed in 0F0 of step 7: ValueError: x",) * 2]


def test_gradients_of_a_failed_batch_are_dropped_on_stages_that_had_finished():
    """The last stage ends its program before the first: without an optimizer its gradients would
    stay, and be added to.
    """
    model = nn.Sequential(nn.Linear(16, 16), Trap("raise", "B", at=3), nn.Linear(16, 4))
    pipe = ps.Pipeline(
        model, loss=functional.cross_entropy, balance=[2, 1], micro_batches=4, executor="threads"
    )
    with pytest.raises(StageFailed, match="0B3"):
        pipe.train_batch(X, Y)
    for stage in pipe._assembly.stages:
        assert all(parameter.grad is None for parameter in stage.update.parameters)
    assert gradients(model) == {}
