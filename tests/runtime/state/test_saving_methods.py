"""`save` and `load` of a pipeline, with stand-ins: what all processes agree on, and what changes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.errors import FileError
from penstock.runtime.state import saving_methods
from penstock.runtime.state.saving_methods import Saving


class Pipe(Saving):
    """A pipeline that records.

    Args:
        parallelism: how processes share layers.
        error: raised when the save is waited for.
    """

    def __init__(self, parallelism=None, error=None):
        self.log, self._step, self._accumulated, self._world = [], 4, 2, None
        self._world = SimpleNamespace(calls=SimpleNamespace(enter=self._enter))
        self._persistence = SimpleNamespace(
            assembly=SimpleNamespace(parallelism=parallelism),
            begin_save=self._begin,
            load=self._load,
        )
        self.error = error

    def _enter(self, call):
        self.log.append(("enter", call))

    def _mark_stale(self):
        self.log.append(("stale",))

    def _begin(self, step, waiting, target):
        self.log.append(("begin", step, waiting, target))
        return SimpleNamespace(wait=self._wait)

    def _wait(self):
        self.log.append(("wait",))
        if self.error is not None:
            raise self.error

    def _load(self, folder, *, skip, nonfinite):
        self.log.append(("load", folder, skip, nonfinite))
        if self.error is not None:
            raise self.error
        return 7


class Answers:
    """Processes that share layers, of which others give these answers."""

    def __init__(self, *others, writes=True):
        self.others, self.writes, self.asked = list(others), writes, []

    def all_agree(self, *, success):
        """Return whether this process and the others agree."""
        self.asked.append(success)
        return success and self.others.pop(0)


def test_a_save_is_waited_for():
    """With the step, and the batches that wait; the folder is completed in place."""
    pipe = Pipe()
    pipe.save("here", allow_nonfinite=True)
    enter, begin, wait = pipe.log
    assert (enter, wait) == (("enter", "save"), ("wait",))
    assert begin[1:3] == (4, 2)
    target = begin[3]
    assert (target.folder, target.nonfinite, target.score) == (Path("here"), True, None)
    assert target.publication.folder == Path("here")
    pipe.save(Path("here"))
    assert not pipe.log[4][3].nonfinite


@pytest.mark.parametrize("unseen", [[], ["a file"]])
@pytest.mark.parametrize("writes", [False, True])
def test_processes_that_share_layers_agree_that_it_was_written_and_is_seen(
    monkeypatch, unseen, writes
):
    """The one that writes need not look; others must see all of its files."""
    searches = []

    def unseen_files(folder, world):
        searches.append((folder, world))
        return unseen

    monkeypatch.setattr(saving_methods, "unseen_files", unseen_files)
    answers = Answers(True, True, writes=writes)
    pipe = Pipe(answers)
    if writes or not unseen:
        pipe.save("here")
    else:
        with pytest.raises(FileError, match=r"^the checkpoint here cannot be loaded here"):
            pipe.save("here")
    assert answers.asked == [True, writes or not unseen]
    assert searches == [] if writes else [(Path("here"), pipe._world)]


def test_a_failure_of_another_process_is_one_of_all(monkeypatch):
    """Of writing and of seeing."""
    monkeypatch.setattr(saving_methods, "unseen_files", lambda folder, world: [])
    answers = Answers(False)
    with pytest.raises(FileError, match=r"^the checkpoint here was not written"):
        Pipe(answers).save("here")
    assert answers.asked == [True]
    with pytest.raises(FileError, match=r"^the checkpoint here cannot be loaded here"):
        Pipe(Answers(True, False)).save("here")


def test_after_an_error_the_others_get_an_answer():
    """They wait for it; the error is that of the writing."""
    answers, error = Answers(True, True), FileError("full")
    with pytest.raises(FileError, match=r"^full$"):
        Pipe(answers, error).save("here")
    assert answers.asked == [False]


def test_loading_changes_step_and_gradients_only_if_it_succeeds():
    """The layers of the user's model are stale in any case: weights may have been loaded."""
    pipe = Pipe()
    pipe.load("here", skip="scaler", allow_nonfinite=True)
    assert pipe.log == [("enter", "load"), ("stale",), ("load", "here", "scaler", True)]
    assert (pipe._step, pipe._accumulated) == (7, 0)
    pipe.load("here")
    assert pipe.log[-1] == ("load", "here", (), False)
    failing = Pipe(error=FileError("damaged"))
    with pytest.raises(FileError):
        failing.load("here")
    assert (failing._step, failing._accumulated) == (4, 2)


@pytest.mark.parametrize("method", ["_enter", "_mark_stale"])
def test_the_pipeline_has_the_methods_that_the_mixin_needs(method):
    """A mixin alone saves nothing."""
    with pytest.raises(NotImplementedError):
        getattr(Saving(), method)(*["save"][: method == "_enter"])
