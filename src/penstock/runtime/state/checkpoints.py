"""A series of checkpoints that is written while training goes on, and from which it resumes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch

from penstock.checkpoint.folder_lock import FolderLock
from penstock.checkpoint.interval import parse_interval
from penstock.checkpoint.save_job import GatheredSave, SaveJob
from penstock.checkpoint.series import (
    partial_folder,
    publication,
    set_aside,
    step_folder,
    step_folders,
    whole_checkpoints,
)
from penstock.errors import CheckpointDamaged, SettingError
from penstock.ranks.processes.rank_reports import attempt, check_reports, exchange
from penstock.ranks.world import World
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.state.persistence import SaveTarget
from penstock.runtime.stop_signals import StopSignals
from penstock.transport.payload import TensorForm
from penstock.transport.process_group import heartbeats

#: Seconds between two agreements of the ranks: the longest time for which a signal waits, besides
#: a step. An agreement takes a fraction of a millisecond.
_AGREE_EVERY_S = 0.5

#: Most steps between two agreements.
_MOST_STEPS = 1000

_LOGGER = logging.getLogger("penstock")


@dataclass(frozen=True)
class SeriesContext:
    """What belongs to a series of checkpoints in a program that trains.

    Attributes:
        earlier: folders of single checkpoints, as `Pipeline.save` writes them, from which
            `resume` may continue as well.
        logs: files that are put on the disk before a checkpoint counts, so that they have what led
            to it after a loss of power.
        stop_when: another reason to end the run, asked every half second on every rank.
        on_saved: called with the step and the folder of a checkpoint when it is complete.
        memory: folder of a checkpoint in memory, from which `resume` may continue as well. It does
            not count as saved.
    """

    earlier: Sequence[Path] = ()
    logs: Sequence[Path] = ()
    stop_when: Callable[[], bool] = bool  # bool() is False
    on_saved: Callable[[int, Path], None] | None = None
    memory: Path | None = None


class Checkpoints:
    """Checkpoints of a run: when they are written, which of them stay, and where training resumes.

    A step pays for a copy of the state to host memory; a thread of every rank writes it. Within
    the `with` block SIGTERM and SIGUSR1 are noted; a signal to any rank counts for all. Every rank
    makes the same calls.

    Args:
        folder: the folder of the series; every checkpoint is a folder `step-000123` in it.
        every: number of steps, or a time such as "10min"; None writes at signals and at the end.
        keep: number of newest checkpoints that stay, at least 1. The one with the best score stays
            too.
        context: see `SeriesContext`.
        say: receives messages on rank 0, such as that a damaged checkpoint is skipped; by default
            they are warnings of the logger `penstock`.

    Attributes:
        ended: whether SIGTERM, or `context.stop_when`, has asked the run to end; the same on every
            rank.
        saved_step: step of the newest checkpoint that is complete; None before there is one.

    Raises:
        SettingError: `every` or `keep` is invalid.

    Examples:
        ```python
        with ps.Checkpoints("runs/a/checkpoints", every="10min", keep=3) as checkpoints:
            checkpoints.resume(pipe)
            for x, y in islice(loader, pipe.step, None):
                loss = pipe.train_batch(x, y)
                if checkpoints.step(pipe):
                    break  # SIGTERM: the checkpoint has been written
            checkpoints.finish(pipe)
        ```
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every: int | str | None = None,
        keep: int = 3,
        context: SeriesContext = SeriesContext(),
        say: Callable[[str], None] = _LOGGER.warning,
    ) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise SettingError(f"keep is a number of checkpoints, 1 or more, not {keep!r}")
        self.folder = Path(folder)
        self._interval, self._keep = parse_interval(every), keep
        self._context, self._say = context, say
        self._signals = StopSignals()
        self._entered = False
        self._lock: FolderLock | None = None
        self.ended = False
        self.saved_step: int | None = None
        self._job: SaveJob | GatheredSave | None = None
        self._begun_step: int | None = None
        self._due = False
        self._seen_step: int | None = None
        self._steps_between = self._countdown = 1
        self._agreed_s = self._saved_s = time.monotonic()

    def __enter__(self) -> Self:
        self._signals.__enter__()
        self._entered = True
        return self

    def __exit__(self, *details: object) -> None:
        self._signals.__exit__(*details)
        self._entered = False
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def memory(self) -> Path | None:
        """Folder of a checkpoint in memory, from which `resume` may continue."""
        return self._context.memory

    # -- resuming

    def resume(self, pipe: Pipeline) -> int | None:
        """Load the newest whole checkpoint into a pipeline. All ranks call it.

        Damaged and incomplete ones are skipped with a message; those of later steps than the one
        that is loaded are renamed to `damaged-…`.

        Within the `with` block, `resume` also locks the folder until the end of the block.

        Returns:
            Its step; None if there is no checkpoint.

        Raises:
            FileError: another run has locked the folder; or there are checkpoints, and none of them
                is whole, or the newest whole one does not fit the pipeline.
        """
        _check_writers(pipe)
        candidates, problems = self._agreed_candidates(pipe._world)
        has_rank_0 = 0 in pipe._world.local_ranks
        for place, (_, folder) in enumerate(candidates):
            try:
                pipe.load(folder)
            except CheckpointDamaged as error:
                problems.append(str(error))
                if has_rank_0:
                    self._say(f"skipping the checkpoint {folder}: {error}")
                continue
            self._seen_step = pipe.step
            # A checkpoint in memory does not count as saved: the newest one on the disk does. Those
            # before the loaded one are damaged, and have to be written again.
            on_disk = (step for step, other in candidates[place:] if other != self._context.memory)
            self._begun_step = next(on_disk, None)
            if self._begun_step is not None:
                self._note_saved(self._begun_step)
            if has_rank_0:
                set_aside(self.folder, pipe.step)
            return pipe.step
        if problems:
            raise CheckpointDamaged(f"{self.folder} has no whole checkpoint: {problems[0]}")
        return None

    def _agreed_candidates(self, world: World) -> tuple[list[tuple[int, Path]], list[str]]:
        """Find the whole checkpoints that any rank sees.

        Returns:
            Their steps and folders, newest first; and why others are not whole, as this process
            sees it.
        """
        problems: list[str] = []
        first, *_ = world.local_ranks

        def survey() -> list[list[str | int]]:
            """Return step and folder of the whole checkpoints that this process sees."""
            if first == 0:
                self._lock_folder()
            others = [*self._context.earlier]
            if self._context.memory is not None:
                others.append(self._context.memory)
            candidates = [*step_folders(self.folder), *filter(Path.exists, others)]
            whole = whole_checkpoints(candidates, problems.append)
            return [[saved.step, str(saved.folder)] for saved in whole]

        report = attempt(first, survey)
        rows = [report]
        if len(world.local_ranks) < world.size:
            rows = exchange(world, {first: report})
        check_reports(rows, "nothing was loaded on any rank")
        if first == 0:
            for problem in problems:
                self._say(problem)
        step_of_folder = {folder: step for row in rows for step, folder in row.value}
        # Within a step by name, so that all ranks try folders in one order.
        newest_first = sorted(step_of_folder.items(), key=lambda item: (-item[1], item[0]))
        return [(step, Path(folder)) for folder, step in newest_first], problems

    def _lock_folder(self) -> None:
        """Keep other runs out of the folder until the end of the `with` block.

        Raises:
            FileError: another run writes into it.
        """
        if self._entered and self._lock is None:
            with suppress(OSError):  # the first checkpoint reports it
                self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.folder)

    # -- saving

    def step(self, pipe: Pipeline) -> bool:
        """Save if that is due, and complete what is being saved. Call it after every step.

        Returns:
            Whether the run has to end, because of SIGTERM. The checkpoint is then complete.

        Raises:
            FileError: a checkpoint cannot be written. Older ones are unchanged.
            SettingError: the state has NaN, or cannot be saved.
        """
        # A checkpoint does not hold gradients: what is due waits for the step that uses them.
        if self.poll(pipe) and not pipe._accumulated:
            self.save(pipe)
        if self.ended and not pipe._accumulated:
            self.finish(pipe)
            return True
        return False

    def poll(self, pipe: Pipeline) -> bool:
        """Agree with the other ranks on what is due; complete what is being saved.

        Returns:
            Whether a checkpoint is due: of its interval, or because of a signal.

        Raises:
            FileError, SettingError: see `step`.
        """
        step = pipe.step
        # At the first call of a run that did not resume, only the last step is new.
        before = step - 1 if self._seen_step is None else self._seen_step
        self._seen_step = step
        self._due = self._due or self._interval.passes(before, step)
        self._countdown -= 1
        if self._countdown <= 0:
            self._agree(pipe)
        return self._due

    def save(self, pipe: Pipeline, *, score: float | None = None, wait: bool = False) -> None:
        """Begin to write a checkpoint, after the previous one is complete. All ranks call it.

        Args:
            pipe: the pipeline. An asynchronous schedule is drained.
            score: how good the weights are, lower is better, such as the loss on a test set.
            wait: return when the checkpoint is complete.

        Raises:
            FileError, SettingError: see `step`.
        """
        _check_writers(pipe)
        self._complete()
        self._due, self._saved_s = False, time.monotonic()
        if self._begun_step != pipe.step or score is not None:
            target = SaveTarget(
                partial_folder(self.folder, pipe.step),
                publication(self.folder, pipe.step, self._keep, self._context.logs),
                score=score,
            )
            self._job = pipe._begin_save(target)
            self._begun_step = pipe.step
        if wait:
            self._complete()

    def finish(self, pipe: Pipeline) -> None:
        """Write the checkpoint of the last step, unless there is one, and wait for it.

        Raises:
            FileError, SettingError: see `step`.
        """
        self.save(pipe, wait=True)

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return step_folder(self.folder, step)

    def _complete(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        if self._job is not None:
            job, self._job = self._job, None
            job.wait()
            self._notify_saved(job)

    def _notify_saved(self, job: SaveJob | GatheredSave) -> None:
        """Note that a checkpoint is complete, and tell the program."""
        self._note_saved(job.step)
        if self._context.on_saved is not None:
            self._context.on_saved(job.step, self.path(job.step))

    def _note_saved(self, step: int) -> None:
        """Note the step of the newest whole checkpoint, also for the message on a lost rank."""
        self.saved_step = step
        watch = heartbeats()
        if watch is not None:
            watch.checkpoint_step = step

    def _agree(self, pipe: Pipeline) -> None:
        """Exchange signals and the state of the save between all ranks.

        This costs a message and is therefore done every `_AGREE_EVERY_S` only, by the clock of
        rank 0: by its own clock, a rank would come to it at another step than the others.
        """
        now = time.monotonic()
        world = pipe._world
        world.calls.enter("Checkpoints.step")
        save, self._signals.save = self._signals.save, False
        end = self._signals.end or self._context.stop_when()
        ready = self._job is None or self._job.ready
        seconds = self._interval.seconds
        due = seconds is not None and now - self._saved_s >= seconds
        step_s = (now - self._agreed_s) / self._steps_between
        steps = round(_AGREE_EVERY_S / max(step_s, 1e-6))
        agreed = _combine(world, _Report(end, save, ready, due, min(max(steps, 1), _MOST_STEPS)))
        self.ended = self.ended or agreed.end
        self._due = self._due or agreed.save or agreed.due
        self._steps_between = self._countdown = agreed.steps
        self._agreed_s = time.monotonic()
        if self._job is not None and agreed.ready and self._job.advance():
            job, self._job = self._job, None
            self._notify_saved(job)


class _Report(NamedTuple):
    """What a process knows when the ranks agree, or what they have agreed on.

    Attributes:
        end: whether the run has to end; one rank that says so is enough.
        save: whether a signal has asked for a checkpoint; one rank that says so is enough.
        ready: whether what is being saved can go on to its next part; all ranks must say so.
        due: whether a checkpoint is due by its interval in seconds; rank 0 decides.
        steps: number of steps until the ranks agree again; rank 0 decides.
    """

    end: bool
    save: bool
    ready: bool
    due: bool
    steps: int


def _combine(world: World, report: _Report) -> _Report:
    """Return on every rank what the reports of all ranks amount to."""
    form = TensorForm((len(report),), "int64", wants_grad=False)
    row = torch.tensor(report, dtype=torch.int64)
    gathered = world.gather(
        {rank: [row] for rank in world.local_ranks}, {rank: [form] for rank in range(world.size)}
    )
    result = None
    if gathered:
        reports = [_Report(*tensor.tolist()) for (tensor,) in gathered.values()]
        end = any(other.end for other in reports)
        save = any(other.save for other in reports)
        ready = all(other.ready for other in reports)
        result = torch.tensor([end, save, ready, report.due, report.steps], dtype=torch.int64)
    end, save, ready, due, steps = world.broadcast(result, 0, form).tolist()
    return _Report(bool(end), bool(save), bool(ready), bool(due), steps)


def _check_writers(pipe: Pipeline) -> None:
    """Reject a series of a pipeline whose layers processes share over the dimension "tp".

    Raises:
        SettingError: it is such a pipeline.
    """
    parallelism = pipe._assembly.parallelism
    if parallelism is not None and parallelism.mesh.width > 1:
        raise SettingError(
            "ps.Checkpoints does not agree on signals and folders between the processes of the "
            "dimension 'tp' of a mesh: call pipe.save and pipe.load, which all of them support"
        )
