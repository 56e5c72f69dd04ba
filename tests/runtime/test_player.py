"""The player: which programs it runs for a batch, in which order, and what it does on failure."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from tests.runtime.scripted import Recorder, replica_group
from torch import nn

import penstock as ps
from penstock.runtime import player as player_module
from penstock.runtime.player import AHEAD, AHEAD_ON_DEVICE, Mode, Player, make_stream
from penstock.schedule.lower import lower
from penstock.schedule.op import Kind, Op


class Run:
    """A player of two ranks whose parts record their calls in `log`."""

    def __init__(self, schedule="1f1b", micro_batches=4, *, steps=True, needed=False, device=False):
        self.log = log = []
        self.schedule = ps.schedule(schedule, 2, micro_batches)
        self.programs = {}

        def play(rank, program, batch, *, update):
            self.programs[rank] = program
            log.append(("play", rank, update))

        interpreters = {
            rank: SimpleNamespace(
                play=lambda *args, rank=rank, **options: play(rank, *args, **options),
                replicas={rank: replica_group(log, rank)} if rank else {},
                finite=Recorder(log, f"finite {rank}", reset=None) if rank else None,
                stages={rank: self.stage(rank)},
            )
            for rank in range(2)
        }
        for interpreter in interpreters.values():
            for group in interpreter.replicas.values():
                group.begin = lambda: log.append(("replicas.begin",))
        self.assembly = SimpleNamespace(
            setting=SimpleNamespace(schedule=self.schedule),
            world=SimpleNamespace(
                run=lambda job: {rank: job(rank) for rank in range(2)},
                receives_on_device=device,
                collectives=None,
                device=lambda rank: torch.device("cpu"),
            ),
            interpreters=interpreters,
            stages=[rank.stages[index] for index, rank in interpreters.items()],
            steps=steps,
        )
        self.global_step = Recorder(
            log, "global", begin=None, gather=None, send_tied_weights=None, record_step=None
        )
        self.global_step.needed = needed

        def step(rank):
            log.append(("global.step", rank))
            return ("norm", 0.0)

        self.global_step.step = step
        self.player = Player(self.assembly, self.global_step)

    def stage(self, index):
        """Return a stage that records its modes and checks."""
        log = self.log

        @contextlib.contextmanager
        def evaluation_mode():
            log.append(("evaluate", index))
            yield
            log.append(("train again", index))

        return SimpleNamespace(
            layers=[],
            evaluation_mode=evaluation_mode,
            update=Recorder(log, f"update {index}", zero=None),
            has_pending_checks=False,
            read_checks=lambda: log.append(("read", index)),
        )

    def play(self, mode, micro_batches=4, **options):
        """Play a batch, and return the calls."""
        self.log.clear()
        self.player.play(SimpleNamespace(micro_batches=micro_batches), mode, **options)
        return list(self.log)


def test_a_stage_updates_at_its_u_unless_the_step_needs_all_gradients():
    """Then all step after the program, and the result is recorded once."""
    calls = Run().play(Mode.TRAIN, steps=True, factor=0.5)
    assert calls == [
        ("global.begin", 0.5),
        ("play", 0, True),
        ("global.gather", 0),
        ("replicas.begin",),
        ("play", 1, True),
        ("global.gather", 1),
    ]
    calls = Run(needed=True).play(Mode.TRAIN, steps=True)
    assert [call for call in calls if call[0] in ("play", "global.step", "global.record_step")] == [
        ("play", 0, False),
        ("global.step", 0),
        ("play", 1, False),
        ("global.step", 1),
        ("global.record_step", {0: ("norm", 0.0), 1: ("norm", 0.0)}),
    ]
    assert Run().play(Mode.TRAIN)[0] == ("global.begin", 1.0)
    for needed in (False, True):
        names = [call[0] for call in Run(needed=needed).play(Mode.TRAIN, steps=False)]
        assert "global.step" not in names
        assert "global.record_step" not in names


@pytest.mark.parametrize("mode", Mode)
def test_every_mode_has_its_own_beginning_and_end(mode):
    """Only training sets the scale of the losses; evaluation has neither gradients nor modes that
    stay.
    """
    run = Run()
    names = [call[0] for call in run.play(mode)]
    evaluates = mode is Mode.EVALUATE
    assert ("global.begin" in names) == (mode is Mode.TRAIN)
    assert names.count("global.gather") == names.count("replicas.begin") * 2 == 2 * (not evaluates)
    kinds = {op.kind for program in run.programs.values() for op in program if isinstance(op, Op)}
    assert (kinds == {Kind.F}) == evaluates
    assert ("evaluate" in names) == evaluates
    if evaluates:
        assert names == [
            "evaluate", "evaluate", "play", "play", "train again", "train again",
        ]  # fmt: skip


def test_ranks_without_an_optimizer_exchange_tied_weights_before_every_batch():
    """The caller may have changed them since."""
    for steps in (False, True):
        for mode in Mode:
            calls = Run(steps=steps).play(mode)
            name = "global.send_tied_weights"
            sent = [call for call in calls if call[0] == name]
            assert sent == ([] if steps else [(name, rank) for rank in range(2)])
            if not steps:
                assert calls.index((name, 0)) < calls.index(("play", 0, False))


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("micro_batches", [4, 3, 1])
def test_a_small_batch_runs_the_program_of_its_micro_batches(micro_batches, device):
    """With receives posted as early as the links allow."""
    run = Run(device=device)
    run.play(Mode.TRAIN, micro_batches)
    schedule = run.schedule.first_micro_batches(micro_batches)
    expected = (
        lower(schedule, AHEAD_ON_DEVICE, after_dependencies=True)
        if device
        else lower(schedule, AHEAD)
    )
    assert tuple(run.programs.values()) == expected.programs
    programs = dict(run.programs)
    run.play(Mode.TRAIN, 2)
    run.play(Mode.TRAIN, micro_batches)
    assert all(run.programs[rank] is programs[rank] for rank in range(2)), "programs are cached"


def test_the_rows_of_a_timeline_are_those_of_the_last_batch():
    """None after a failure."""
    run = Run()
    assert run.player.rows() == {}
    run.play(Mode.TRAIN, 3)
    run.play(Mode.EVALUATE, 2)
    assert run.player.played == (2, Mode.EVALUATE)
    expected = [Op.parse(f"0F{m}") for m in range(2)]
    assert run.player.rows()[0] == [(op, op) for op in expected]
    assert list(run.player.rows()) == [0, 1]
    run.assembly.world.run = failing
    with pytest.raises(ValueError, match="planted"):
        run.play(Mode.EVALUATE)
    assert run.player.rows() == {}


def failing(job):
    """Fail in place of all ranks."""
    raise ValueError("planted")


def interrupted(job):
    """Be interrupted by the user, as in a notebook."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("fail", [failing, interrupted])
@pytest.mark.parametrize("mode", Mode)
def test_a_failed_batch_leaves_no_gradients_if_it_trained(mode, fail):
    """Those of a part of a batch must not enter the next update; other modes keep what is there."""
    run = Run()
    run.assembly.world.run = fail
    with pytest.raises((ValueError, KeyboardInterrupt)):
        run.play(mode)
    zeroed = [
        call[0]
        for call in run.log
        if call[0] in ("finite 1.reset", "update 0.zero", "update 1.zero")
    ]
    trained = mode is Mode.TRAIN
    assert zeroed == (["finite 1.reset", "update 0.zero", "update 1.zero"] if trained else [])


@pytest.mark.parametrize("fail", [failing, interrupted])
def test_a_step_by_itself_runs_on_all_ranks_and_is_recorded(fail):
    """A failed one leaves no gradients."""
    run = Run()
    run.player.step()
    assert run.log == [
        ("global.step", 0),
        ("global.step", 1),
        ("global.record_step", {0: ("norm", 0.0), 1: ("norm", 0.0)}),
    ]
    run.log.clear()
    run.assembly.world.run = fail
    with pytest.raises((ValueError, KeyboardInterrupt)):
        run.player.step()
    assert [call[0] for call in run.log] == ["finite 1.reset", "update 0.zero", "update 1.zero"]


def test_checks_are_read_on_all_ranks_if_any_stage_has_one():
    """A stage may have had none yet, on another rank."""
    run = Run()
    run.player.read_checks()
    assert run.log == []
    run.assembly.stages[1].has_pending_checks = True
    run.player.read_checks()
    assert run.log == [("read", 0), ("read", 1)]


def test_only_an_asynchronous_schedule_has_a_stream():
    """And one batch of it is played as a schedule without one."""
    run = Run()
    assert make_stream(run.assembly) is None
    assert run.player.one_batch is run.schedule
    stream = Run("pipedream")
    assert stream.player.one_batch.batches == 1
    stream.play(Mode.TRAIN)
    assert tuple(stream.programs.values()) == lower(stream.player.one_batch, AHEAD).programs


@pytest.mark.parametrize("micro_batches", [4, 3])
def test_deferred_batch_norms_learn_how_many_forwards_their_stage_runs(micro_batches):
    """On every rank its own count; 1 where there is none, and nothing in evaluation."""
    run, begun = Run(), []
    for rank, index in ((0, 0), (1, 1), (0, 1)):
        norm = SimpleNamespace(begin=lambda count, key=(rank, index): begun.append((key, count)))
        run.player._deferred_norms[rank, index] = [norm]
    run.play(Mode.TRAIN, micro_batches)
    assert begun == [((0, 0), micro_batches), ((1, 1), micro_batches), ((0, 1), 1)]
    begun.clear()
    run.play(Mode.COMPARE, micro_batches)
    assert len(begun) == 3
    begun.clear()
    run.play(Mode.EVALUATE)
    assert begun == []


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("device", [False, True])
def test_a_stream_posts_receives_as_early_as_the_links_allow(device, steps, monkeypatch):
    """On a device a posted receive is a kernel, which may only wait for what is under way. There is
    a stream without optimizers, too.
    """
    calls = []
    monkeypatch.setattr(
        player_module, "StreamIncrements", lambda *args, **options: calls.append((args, options))
    )
    monkeypatch.setattr(player_module, "Streaming", lambda assembly, increments: assembly)
    run = Run("pipedream", device=device, steps=steps)
    assert make_stream(run.assembly) is run.assembly
    expected = (
        ((run.schedule, AHEAD_ON_DEVICE), {"after_dependencies": True})
        if device
        else ((run.schedule, AHEAD), {})
    )
    assert calls == [expected]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_losses_on_devices_are_averaged_and_compared_there(schedule):
    """Checks of the batches that have been deferred are read with those of the stages. The losses
    of a stream's batch are those of one batch.
    """
    run = Run(schedule)
    log = run.log
    run.player._device_losses = Recorder(log, "losses", mean="the mean", verify=None)
    batch = SimpleNamespace(micro_batches=3, numbers=range(3), inputs=[None] * 3)
    assert run.player.mean_loss(batch) == "the mean"
    ((name, argument, last),) = log
    assert (name, argument) == ("losses.mean", batch)
    assert last == player_module.last_micro_batches(run.player.one_batch, batch)
    log.clear()
    run.player.read_checks()
    assert log == [("losses.verify",)]
    run.assembly.stages[0].has_pending_checks = True
    log.clear()
    run.player.read_checks()
    assert log == [("losses.verify",), ("read", 0), ("read", 1)]


@pytest.mark.parametrize("samples", [8, 3])
def test_deferred_statistics_are_those_of_the_whole_batch(samples):
    """Of all layers of all stages of a rank, and of a batch with fewer micro-batches."""
    torch.manual_seed(0)
    first_stage = [nn.Identity(), nn.BatchNorm1d(3), nn.BatchNorm1d(3)]
    layers = [*first_stage, nn.Identity(), nn.BatchNorm1d(3), nn.BatchNorm1d(3)]
    pipe = ps.Pipeline(
        layers,
        loss=nn.functional.mse_loss,
        balance=[3, 1, 1, 1],
        schedule=ps.schedule("interleaved", 4, 4, chunks=2),
        deferred_batch_norm=True,
        executor="threads",
    )
    plain = nn.BatchNorm1d(3)
    for number in range(2):
        x = torch.randn(samples, 3, 5) * 2 + number
        pipe.train_batch(x, x)
        plain(x)
    state = pipe.state_dict()
    for index in (1, 2, 4, 5):
        assert int(state[f"{index}.num_batches_tracked"]) == 2
    torch.testing.assert_close(state["1.running_mean"], plain.running_mean)
    torch.testing.assert_close(state["1.running_var"], plain.running_var)


def test_gradients_are_dropped_on_all_ranks_that_check_them():
    """A rank without a check has none to reset."""
    run = Run()
    run.player.zero()
    names = [call[0] for call in run.log]
    assert names == ["finite 1.reset", "update 0.zero", "update 1.zero"]
