"""Saving and loading of a `Pipeline`'s checkpoints and learning-rate schedulers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.checkpoint import checkpoint_load
from penstock.checkpoint.checkpoint import CheckpointWriter, Progress, VersionedStage
from penstock.checkpoint.checkpoint_fit import saved_kind
from penstock.checkpoint.checkpoint_index import RuleFacts
from penstock.checkpoint.checkpoint_options import CheckpointOptions, WeightAverage, parse_skip
from penstock.checkpoint.disks import Disks, find_disks
from penstock.checkpoint.save_job import GatheredSave, Publication, SaveJob, make_identity
from penstock.errors import SettingError
from penstock.optim.schedulers import SchedulerFactory, Schedulers
from penstock.runtime.assembly import Assembly
from penstock.runtime.global_step import GlobalStep
from penstock.runtime.streaming import Streaming


@dataclass(frozen=True)
class SaveTarget:
    """Where a checkpoint is written, and under which conditions.

    Attributes:
        folder: the folder to write.
        publication: what completes it.
        nonfinite: whether NaN values may be written.
        score: how good the weights are, lower is better, if it is known.
    """

    folder: Path
    publication: Publication
    nonfinite: bool = False
    score: float | None = None


@dataclass
class Persistence:
    """Checkpoints of one pipeline.

    Attributes:
        assembly: the ranks of this process.
        global_step: the global step, which has the loss scaler.
        stream: the stream of an asynchronous schedule; None for other schedules.
        schedulers: the learning-rate schedulers, in the order of their construction.
        averages: the running averages of the weights, in the order of their construction.
        progress: the progress of the checkpoint that was loaded last.
    """

    assembly: Assembly
    global_step: GlobalStep
    stream: Streaming | None = None
    schedulers: list[Schedulers] = field(default_factory=list)
    averages: list[WeightAverage] = field(default_factory=list)
    progress: Progress = field(default_factory=lambda: Progress(0))
    _disks: dict[Path, Disks] = field(default_factory=dict)

    def scheduler(self, make: SchedulerFactory) -> Schedulers:
        """Construct a learning-rate scheduler, with the saved state if there is one.

        See `Pipeline.scheduler`.
        """
        number = len(self.schedulers)
        saved = self.progress.schedulers[number] if number < len(self.progress.schedulers) else None
        kind = saved_kind(self.progress.scheduler_kinds, number)
        self.schedulers.append(Schedulers(make, self.assembly.optimizers(), saved, kind))
        return self.schedulers[-1]

    def check_schedulers(self) -> None:
        """Check before training that every scheduler of the loaded checkpoint exists again.

        Raises:
            SettingError: one does not, and the learning rate would stay at its saved value.
        """
        missing = self.progress.schedulers[len(self.schedulers) :]
        if missing and self.assembly.steps:
            kinds = self.progress.scheduler_kinds[len(self.schedulers) :]
            classes = f" ({', '.join(kinds)})" if kinds else ""
            raise SettingError(
                f"the checkpoint of step {self.progress.step} has the state of "
                f"{len(self.progress.schedulers)} learning-rate schedulers, and "
                f"{len(self.schedulers)} were made here: the learning rate would stay constant. "
                f"Make the missing one{classes} by pipe.scheduler(...) before training, or load "
                "with skip='schedulers'"
            )

    def check_averages(self) -> None:
        """Check before an average is made that the loaded checkpoint has none that it would lose.

        Raises:
            SettingError: it has.
        """
        if len(self.progress.averages) > len(self.averages):
            raise SettingError(
                f"the checkpoint of step {self.progress.step} has "
                f"{len(self.progress.averages)} running averages of the weights, and a new one "
                "would begin from the current weights: call ema() before load(), or load with "
                "skip='averages'"
            )

    def begin_save(
        self,
        step: int,
        waiting: int,
        target: SaveTarget,
    ) -> SaveJob | GatheredSave:
        """Copy the state to host memory and begin to write it as a checkpoint.

        Args:
            step: number of trained batches.
            waiting: number of batches whose gradients no step has used yet.
            target: where it is written.

        Raises:
            SettingError: gradients wait for a step, or a scheduler's state cannot be saved.
            FileError: the folder cannot be written.
        """
        self.assembly.reset_gradient_hooks()
        if waiting and self.assembly.steps:
            raise SettingError(
                f"the gradients of {waiting} batches wait for their step, and a checkpoint does "
                "not hold gradients: training would resume without them. Save after the step, or "
                "call update() or zero_grad() before save()"
            )
        count = len(self.schedulers)
        states = [scheduler.as_json() for scheduler in self.schedulers]
        kinds = [scheduler.kind for scheduler in self.schedulers]
        texts = self.assembly.broadcast_texts([*states, *kinds])
        # Schedulers that were loaded but not constructed again are saved as they were loaded.
        progress = Progress(
            step,
            self.global_step.state(),
            texts[:count] + self.progress.schedulers[count:],
            texts[count:] + self.progress.scheduler_kinds[count:],
            target.score,
            tuple(average.n_averaged for average in self.averages),
        )
        options = CheckpointOptions(
            self._rule(), self.assembly.optimizer_replicas, target.nonfinite, averages=self.averages
        )
        world = self.assembly.world
        writer = CheckpointWriter(
            target.folder,
            self.assembly.placed,
            progress,
            self._versions(),
            options,
            make_identity(world),
        )
        disks = self._disks_of(target)
        parallelism = self.assembly.parallelism
        with self.assembly.whole_optimizer_state():  # both copy the state in their constructors
            if parallelism is not None and not parallelism.writes:
                return GatheredSave(writer, world)
            return SaveJob(writer, world, disks, target.publication)

    def _disks_of(self, target: SaveTarget) -> Disks:
        """Return which ranks share the disk of a folder; it is found out once."""
        folder = target.publication.folder
        if folder not in self._disks:
            self._disks[folder] = find_disks(self.assembly.world, folder)
        return self._disks[folder]

    def load(
        self, folder: str | Path, *, skip: str | Collection[str] = (), nonfinite: bool = False
    ) -> int:
        """Load a checkpoint, see `Pipeline.load`.

        Returns:
            The number of trained batches.

        Raises:
            FileError: as for `checkpoint_load.load`.
            SettingError: `skip` has an unknown name.
        """
        self.assembly.reset_gradient_hooks()
        parts = parse_skip(skip)
        options = CheckpointOptions(
            self._rule(),
            self.assembly.optimizer_replicas,
            nonfinite,
            parts,
            self.schedulers,
            self.global_step.scaler is not None,
            self.averages,
        )
        self.progress = checkpoint_load.load(
            Path(folder),
            self.assembly.world,
            self.assembly.placed,
            self._versions(),
            options,
            None if self.stream is None else self._restart_stream,
        )
        self.assembly.drop_state_of_replicas()
        self.global_step.restore(self.progress.scaler)
        # Fewer schedulers may exist than were saved: `check_schedulers` looks before training.
        for scheduler, text in zip(self.schedulers, self.progress.schedulers, strict=False):
            scheduler.load_json(text)
        return self.progress.step

    def _versions(self) -> Sequence[VersionedStage]:
        """Return the local stages with weight rules; none for a synchronous schedule."""
        return [] if self.stream is None else self.stream.weights.versions()

    def _restart_stream(self) -> Sequence[VersionedStage]:
        """Empty the stream, and start the weight rules from the current parameters."""
        assert self.stream is not None
        self.stream.empty()
        self.stream.weights.restart()
        return self.stream.weights.versions()

    def _rule(self) -> RuleFacts | None:
        """Describe the weight rule of an asynchronous schedule; None for other schedules."""
        stream = self.assembly.setting.schedule.stream
        if stream is None:
            return None
        return RuleFacts(
            self.assembly.setting.rule.name, stream.pipelines, self.assembly.optimizer_replicas
        )
