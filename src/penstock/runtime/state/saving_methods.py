"""Methods of `Pipeline` that save and load checkpoints."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from penstock.checkpoint.fetch import unseen_files
from penstock.checkpoint.save_job import GatheredSave, SaveJob, in_place
from penstock.errors import FileError
from penstock.ranks.world import World
from penstock.runtime.state.persistence import Persistence, SaveTarget


class Saving:
    """Checkpoints of a pipeline in folders."""

    _persistence: Persistence
    _world: World
    _step: int
    _accumulated: int

    def _enter(self, call: str) -> None:
        """Begin a call that all ranks must make; see `Pipeline`."""
        raise NotImplementedError

    def _mark_stale(self) -> None:
        """Note that the layers of the user's model change; see `ModelState`."""
        raise NotImplementedError

    def save(self, folder: str | Path, *, allow_nonfinite: bool = False) -> None:
        """Write weights, optimizers, schedulers, scaler, averages and step to `folder`.

        There is one file per stage, which can be loaded under any other plan. The folder holds one
        checkpoint: the previous one is replaced when the new one is complete. See `Checkpoints` for
        a series, written while training goes on.

        Args:
            folder: the folder. If every host has a disk of its own under that name, each has the
                files of its ranks, and `load` fetches what is missing from other hosts.
            allow_nonfinite: allow NaN values in parameters and optimizer state.

        Raises:
            FileError: the folder cannot be written. A previous checkpoint there remains complete.
            SettingError: there are accumulated gradients or NaN values, or the state of an
                optimizer cannot be written.
        """
        path = Path(folder)
        job = self._begin_save(SaveTarget(path, in_place(path), allow_nonfinite))
        parallelism = self._persistence.assembly.parallelism
        if parallelism is None:
            job.wait()
            return
        success = False
        try:
            job.wait()
            success = True
        finally:
            # After an error too: the other processes wait for this answer.
            written = parallelism.all_agree(success=success)
        if not written:
            raise FileError(
                f"the checkpoint {path} was not written: the processes that write it, of "
                "coordinate 0 in the dimension 'tp' of the mesh, have the reason"
            )
        if not parallelism.all_agree(
            success=parallelism.writes or not unseen_files(path, self._world)
        ):
            raise FileError(
                f"the checkpoint {path} cannot be loaded here: processes of the dimension 'tp' of "
                "the mesh are on hosts that do not see its files. Save on a disk that all hosts "
                "share, or place all processes of a coordinate of 'pp' on one host"
            )

    def _begin_save(self, target: SaveTarget) -> SaveJob | GatheredSave:
        """Copy the state to host memory and begin to write it. All ranks call it.

        Raises:
            FileError, SettingError: see `save`.
        """
        self._enter("save")
        return self._persistence.begin_save(self._step, self._accumulated, target)

    def load(
        self, folder: str | Path, *, skip: str | Collection[str] = (), allow_nonfinite: bool = False
    ) -> None:
        """Load a checkpoint of `save`, under this or any other plan for the same model.

        Args:
            folder: the folder of the checkpoint.
            skip: parts not to load: any of "optimizer" (its state and options, and all others),
                "schedulers", "scaler", "weight_rule" and "averages". A skipped optimizer is reset.
            allow_nonfinite: allow NaN values in parameters and optimizer state.

        Raises:
            FileError: the checkpoint is incomplete, a file is damaged or belongs to another
                checkpoint, or the model, the classes of optimizer or schedulers, or the parameter
                groups differ from this pipeline's. It is then raised on every rank, and no rank
                has changed.
        """
        self._world.calls.enter("load")
        self._mark_stale()
        self._step = self._persistence.load(folder, skip=skip, nonfinite=allow_nonfinite)
        self._accumulated = 0
