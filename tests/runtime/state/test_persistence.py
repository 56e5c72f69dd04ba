"""What a checkpoint holds besides tensors, and in which order it is saved and loaded: with stand-ins
that record.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.checkpoint.checkpoint import Progress
from penstock.checkpoint.checkpoint_index import RuleFacts
from penstock.errors import SettingError
from penstock.runtime.state import persistence
from penstock.runtime.state.persistence import Persistence, SaveTarget


class Scheduler:
    """A scheduler that records."""

    def __init__(self, number, log):
        self.kind, self.number, self.log = f"Kind{number}", number, log

    def as_json(self):
        """Return its state."""
        return f"state {self.number}"

    def load_json(self, text):
        """Record that its state was loaded."""
        self.log.append(("scheduler", self.number, text))


class Averages:
    """Running averages that count their updates."""

    def __init__(self, count):
        self.n_averaged = count


def persistence_of(log, *, stream=None, scaler=None, parallelism=None, steps=True):
    """Return the persistence of a pipeline, whose parts record what they are asked."""

    def record(name, result=None):
        def call(*args):
            log.append((name, *args))
            return result(*args) if callable(result) else result

        return call

    @contextmanager
    def whole():
        log.append(("whole",))
        yield
        log.append(("divided",))

    assembly = SimpleNamespace(
        reset_gradient_hooks=record("reset hooks"),
        steps=steps,
        # The texts of another rank.
        broadcast_texts=record("texts", lambda texts: tuple(f"rank 0's {t}" for t in texts)),
        optimizer_replicas=3,
        world="the world",
        placed="placed",
        parallelism=parallelism,
        whole_optimizer_state=whole,
        drop_state_of_replicas=record("drop"),
        optimizers=lambda: ["an optimizer"],
        setting=SimpleNamespace(
            schedule=SimpleNamespace(
                stream=SimpleNamespace(pipelines=2) if stream is not None else None
            ),
            rule=SimpleNamespace(name="stash"),
        ),
    )
    global_step = SimpleNamespace(
        scaler=scaler, state=lambda: {"scale": 8.0}, restore=record("scaler")
    )
    return Persistence(assembly, global_step, stream)


@pytest.fixture
def log():
    """The calls in order."""
    return []


@pytest.fixture
def saving(monkeypatch, log):
    """Record what is written, and how."""

    def recording(name):
        def make(*args):
            log.append((name, *args))
            return name

        return make

    monkeypatch.setattr(persistence, "make_identity", lambda world: f"identity of {world}")
    monkeypatch.setattr(persistence, "CheckpointWriter", lambda *args: args)
    monkeypatch.setattr(persistence, "SaveJob", recording("job"))
    monkeypatch.setattr(persistence, "GatheredSave", recording("gathered"))
    monkeypatch.setattr(persistence, "find_disks", recording("disks"))


def target(folder="saved", **options):
    """Return where to save."""
    publication = SimpleNamespace(folder=Path(folder))
    return SaveTarget(Path(f"{folder}.partial"), publication, **options)


def test_a_checkpoint_holds_the_progress_of_the_run(saving, log):
    """Of schedulers and averages all, in the order of their construction; the state of rank 0."""
    saved = persistence_of(log)
    saved.schedulers = [Scheduler(0, log), Scheduler(1, log)]
    saved.averages = [Averages(5), Averages(7)]
    place = target(nonfinite=True, score=0.5)
    assert saved.begin_save(9, 0, place) == "job"
    names = [entry[0] for entry in log]
    assert names == ["reset hooks", "texts", "disks", "whole", "job", "divided"]
    _, writer, world, disks, publication = log[-2]
    folder, placed, progress, versions, options, identity = writer
    assert (folder, placed, versions) == (place.folder, "placed", [])
    assert (world, disks, publication) == ("the world", "disks", place.publication)
    assert identity == "identity of the world"
    assert progress == Progress(
        9,
        {"scale": 8.0},
        ("rank 0's state 0", "rank 0's state 1"),
        ("rank 0's Kind0", "rank 0's Kind1"),
        0.5,
        (5, 7),
    )
    assert (options.rule, options.copies, options.nonfinite) == (None, 3, True)
    assert options.averages is saved.averages


def test_schedulers_that_were_loaded_and_not_made_again_are_saved_as_they_were(saving, log):
    """A run that only evaluates, or fine-tunes, does not lose them."""
    saved = persistence_of(log)
    saved.progress = Progress(3, schedulers=("a", "b", "c"), scheduler_kinds=("A", "B", "C"))
    saved.schedulers = [Scheduler(0, log)]
    saved.begin_save(4, 0, target())
    progress = log[-2][1][2]
    assert progress.schedulers == ("rank 0's state 0", "b", "c")
    assert progress.scheduler_kinds == ("rank 0's Kind0", "B", "C")


def test_gradients_that_wait_are_refused_only_where_a_step_will_use_them(saving, log):
    """A pipeline without optimizers leaves its gradients to the caller."""
    saved = persistence_of(log)
    with pytest.raises(SettingError, match="the gradients of 1 batches wait for their step"):
        saved.begin_save(4, 1, target())
    assert "job" not in [entry[0] for entry in log]
    assert persistence_of(log, steps=False).begin_save(4, 2, target()) == "job"


def test_the_disks_of_a_folder_are_found_out_once(saving, log):
    """That takes messages; another folder may be on another disk."""
    saved = persistence_of(log)
    for folder in ("a", "b", "a"):
        saved.begin_save(1, 0, target(folder))
    assert [entry[2] for entry in log if entry[0] == "disks"] == [Path("a"), Path("b")]


@pytest.mark.parametrize("writes", [True, False])
def test_one_of_the_processes_that_share_layers_writes(saving, log, writes):
    """The others only take part in gathering."""
    saved = persistence_of(log, parallelism=SimpleNamespace(writes=writes))
    assert saved.begin_save(1, 0, target()) == ("job" if writes else "gathered")
    name, writer, world, *_ = log[-2]
    assert (name, world) == ("job" if writes else "gathered", "the world")
    assert writer[0] == target().folder


def scripted_stream(log):
    """Return a stream that records."""
    weights = SimpleNamespace(
        versions=lambda: log.append(("versions",)) or ["versions"],
        restart=lambda: log.append(("restart",)),
    )
    return SimpleNamespace(weights=weights, empty=lambda: log.append(("empty",)))


def test_a_stream_saves_its_weight_rule(saving, log):
    """Its name, its copies that take turns, and those with optimizers of their own."""
    saved = persistence_of(log, stream=scripted_stream(log))
    saved.begin_save(1, 0, target())
    writer = log[-2][1]
    assert writer[3] == ["versions"]
    assert writer[4].rule == RuleFacts("stash", 2, 3)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("scaler", [None, "a scaler"])
def test_loading_restores_all_parts_in_order(monkeypatch, log, streams, scaler):
    """What replicas divide is dropped after it was loaded whole; a stream begins anew, empty."""
    saved = persistence_of(log, stream=scripted_stream(log) if streams else None, scaler=scaler)
    saved.schedulers = [Scheduler(0, log), Scheduler(1, log)]
    saved.averages = [Averages(5)]
    loaded = Progress(6, {"scale": 2.0}, ("x", "y", "z"), ("X", "Y", "Z"))

    def load(folder, world, placed, versions, options, begin_anew):
        assert (folder, world, placed) == (Path("here"), "the world", "placed")
        assert versions == (["versions"] if streams else [])
        assert options.rule == (RuleFacts("stash", 2, 3) if streams else None)
        assert (options.copies, options.nonfinite) == (3, True)
        assert options.skip == {"scaler", "averages"}
        assert options.schedulers is saved.schedulers
        assert options.averages is saved.averages
        assert options.scaler == (scaler is not None)
        log.append(("load",))
        assert (begin_anew is not None) == streams
        if streams:
            log.clear()
            assert begin_anew() == ["versions"]
            assert log == [("empty",), ("restart",), ("versions",)]
            log[:] = [("reset hooks",), ("load",)]
        return loaded

    monkeypatch.setattr(persistence.checkpoint_load, "load", load)
    assert saved.load("here", skip=["scaler", "averages"], nonfinite=True) == 6
    assert [entry for entry in log if entry[0] != "versions"] == [
        ("reset hooks",),
        ("load",),
        ("drop",),
        ("scaler", {"scale": 2.0}),
        ("scheduler", 0, "x"),
        ("scheduler", 1, "y"),
    ]
    assert saved.progress is loaded


def test_an_unknown_part_is_refused_before_anything_is_read(log):
    """With the names that there are."""
    with pytest.raises(SettingError, match=r"skip is any of optimizer, .*, not 'weights'"):
        persistence_of(log).load("here", skip="weights")


def test_a_scheduler_gets_the_saved_state_of_its_number(monkeypatch, log):
    """One beyond those that were saved begins anew; old checkpoints do not have classes."""
    monkeypatch.setattr(persistence, "Schedulers", lambda *args: args)
    saved = persistence_of(log)
    saved.progress = Progress(3, schedulers=("a", "b"), scheduler_kinds=("A",))
    constructed = [saved.scheduler("make") for _ in range(3)]
    assert constructed == [
        ("make", ["an optimizer"], "a", "A"),
        ("make", ["an optimizer"], "b", None),
        ("make", ["an optimizer"], None, None),
    ]
    assert saved.schedulers == constructed


def test_training_with_fewer_schedulers_than_were_saved_is_refused(log):
    """The learning rate would stay; the message names those that are missing."""
    saved = persistence_of(log)
    saved.check_schedulers()
    saved.progress = Progress(3, schedulers=("a", "b", "c"), scheduler_kinds=("A", "B", "C"))
    saved.schedulers = [Scheduler(0, log)]
    with pytest.raises(
        SettingError,
        match=r"step 3 has the state of 3 learning-rate .* and 1 were made .* one \(B, C\) by",
    ):
        saved.check_schedulers()
    saved.progress = Progress(3, schedulers=("a", "b"))
    with pytest.raises(SettingError, match="Make the missing one by pipe"):
        saved.check_schedulers()
    saved.assembly.steps = False
    saved.check_schedulers()
    saved.assembly.steps = True
    saved.schedulers.append(Scheduler(1, log))
    saved.check_schedulers()


def test_an_average_is_not_begun_anew_beside_one_that_was_saved(log):
    """It would replace it without a word at the next save."""
    saved = persistence_of(log)
    saved.check_averages()
    saved.progress = Progress(3, averages=(4, 4))
    saved.averages = [Averages(1)]
    with pytest.raises(SettingError, match="checkpoint of step 3 has 2 running averages"):
        saved.check_averages()
    saved.averages.append(Averages(1))
    saved.check_averages()
