"""Content of checkpoints that are independent of the cut into stages; `save_job` writes them.

Every tensor is saved under its parameter's name, so that any other plan can load the checkpoint. A
folder holds one safetensors file per stage, written by that stage's rank, and `checkpoint.json`,
which is written last and names the files with their checksums. Without `checkpoint.json` the folder
holds no checkpoint, and until it is replaced the previous checkpoint stays complete. Loading
executes no code from the files.

Checkpoints are all or nothing: a save fails unless all ranks have written; `load` refuses, with the
same message on every rank, unless all ranks have verified what they read, and no rank changes a
weight before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.checkpoint import checkpoint_fit as fit
from penstock.checkpoint.checkpoint_files import write_file
from penstock.checkpoint.checkpoint_index import Checkpoint, FileSum
from penstock.checkpoint.checkpoint_options import CheckpointOptions
from penstock.checkpoint.optimizer_check import check_optimizer
from penstock.checkpoint.optimizer_checkpoint import optimizer_state, rule_state
from penstock.errors import SettingError
from penstock.files.text import join_names
from penstock.optim.stage_weights import StageWeights
from penstock.stage import stage_state as state
from penstock.stage.stage import Stage
from penstock.stage.stage_state import Placed
from penstock.values.sharded import is_sharded


@dataclass(frozen=True)
class FileContent:
    """The content of one file, copied to host memory.

    Attributes:
        tensors: tensors on the CPU, by name.
        facts: the plain state of the optimizer, by parameter.
        checked: those tensors that may not contain NaN, by the names for messages.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    checked: dict[str, Tensor]


@dataclass(frozen=True)
class Progress:
    """The progress of a run, apart from the state of its stages.

    Attributes:
        step: number of trained batches.
        scaler: state of the loss scaler.
        schedulers: states of the learning-rate schedulers, as JSON.
        scheduler_kinds: their class names.
        score: how good the weights are, lower is better, if it is known.
        averages: number of updates of each running average of the weights.
    """

    step: int
    scaler: Mapping[str, float] | None = None
    schedulers: tuple[str, ...] = ()
    scheduler_kinds: tuple[str, ...] = ()
    score: float | None = None
    averages: tuple[int, ...] = ()


@dataclass(frozen=True)
class VersionedStage:
    """A stage of this process with its weight rule, which may keep further weight versions.

    Attributes:
        rank: the rank that holds it.
        stage: the stage.
        weights: its weight rule.
        copy: its number, from 0, among the copies of the stage that have their own optimizers.
    """

    rank: int
    stage: Stage
    weights: StageWeights
    copy: int = 0

    @property
    def prefix(self) -> str:
        """The prefix of the names of this copy's state."""
        return f"copy-{self.copy}/" if self.copy else ""

    def state_entries(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and plain state of the optimizer and the weight rule, both by name.

        Raises:
            SettingError: an optimizer keeps state that a checkpoint cannot hold.
        """
        for optimizer in self.weights.more_optimizers():
            check_optimizer(optimizer)
        tensors, facts = optimizer_state(self.stage, self.prefix)
        return tensors | rule_state(self.stage, self.weights, self.prefix), facts


@dataclass(frozen=True)
class CheckpointWriter:
    """Captures and writes the files of one checkpoint.

    Attributes:
        folder: the folder to write.
        placed: the placement of the stages.
        progress: the progress of the run.
        versioned: for an asynchronous run, the stages of this process with their weight rules.
        options: see `CheckpointOptions`.
        identity: random text that all files of this checkpoint have.
    """

    folder: Path
    placed: Placed
    progress: Progress
    versioned: Sequence[VersionedStage]
    options: CheckpointOptions
    identity: str

    def name(self, stage: int, copy: int) -> str:
        """Return the name of a stage's file.

        Names are unique to a checkpoint, so that the files of an earlier checkpoint, or of another
        run, stay until the index is replaced.
        """
        suffix = f"-copy-{copy}" if copy else ""
        identity = self.identity[:16]
        return f"step-{self.progress.step:08d}-stage-{stage:04d}{suffix}-{identity}.safetensors"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all files, in the order of the stages."""
        return tuple(
            self.name(stage, copy)
            for stage in range(len(self.placed.lengths))
            for copy in range(self.options.copies)
        )

    def capture(self, rank: int) -> dict[str, FileContent]:
        """Copy what a rank has to write to host memory. Training may go on afterwards.

        Returns:
            The content of each file of the rank, by file name.

        Raises:
            SettingError: an optimizer's state cannot be saved.
        """
        versions = self._versions_of(rank)
        contents: dict[str, FileContent] = {}
        for stage in self.placed.at_home:
            if self.placed.home[stage.index] != rank:
                continue
            version = versions.pop((stage.index, 0), None)
            model = state.owned_tensors(self.placed, stage)
            contents[self.name(stage.index, 0)] = self.content(stage, model, version)
        for stage in self.placed.local:
            # The other processes that share a stage take part in gathering it.
            if not self.placed.is_home(stage) and any(map(is_sharded, stage.tensors())):
                self.content(stage, state.owned_tensors(self.placed, stage))
        # After a drain all copies of a stage have the weights of the first: of the others only the
        # state of optimizer and rule is written.
        for (index, copy), version in versions.items():
            if copy:
                tensors, facts = _optimizer_state(version.stage, version)
                contents[self.name(index, copy)] = FileContent(tensors, facts, tensors)
        return contents

    def content(
        self, stage: Stage, model: Mapping[str, Tensor], version: VersionedStage | None = None
    ) -> FileContent:
        """Copy the state of a stage to host memory.

        Args:
            stage: the stage.
            model: its parameters and buffers, by name.
            version: the stage with its weight rule, in an asynchronous run.

        Raises:
            SettingError: an optimizer's state cannot be saved.
        """
        tensors, facts = _optimizer_state(stage, version)
        saved = {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in model.items()
        }
        parameters = fit.parameter_names(stage)
        trained = {name: tensor for name, tensor in saved.items() if name in parameters}
        prefixed = {f"model/{name}": tensor for name, tensor in saved.items()}
        prefixed |= self._average_state(stage)
        return FileContent(prefixed | tensors, facts, trained | tensors)

    def write(self, contents: Mapping[str, FileContent]) -> dict[str, Any]:
        """Write the files of one rank, after all of their content has been checked.

        Args:
            contents: of `capture`.

        Returns:
            Under "files" the fields of `FileSum` by file name, under "keeps" whether a file has
            state of a weight rule.

        Raises:
            FileError: the folder cannot be written.
            SettingError: the state contains NaN, or a dtype that cannot be saved.
        """
        # All checks come before the first file: a refused save leaves nothing to clean up.
        self.check_values(contents)
        files = {}
        for name, content in contents.items():
            written = write_file(self.folder / name, content.tensors, self.metadata(content))
            files[name] = list(asdict(written).values())
        keeps = any("weights/" in key for content in contents.values() for key in content.tensors)
        return {"files": files, "keeps": keeps}

    def remove(self) -> None:
        """Delete the files that were written, after a failure."""
        # They are in no index, so that a file which cannot be deleted harms nothing.
        with suppress(OSError, ValueError):
            for name in self.names:
                (self.folder / name).unlink(missing_ok=True)

    def metadata(self, content: FileContent) -> dict[str, str]:
        """Return the texts that a file has beside its tensors."""
        # Identity and step are in every file, so that files of two checkpoints cannot be mixed.
        return {
            "optimizer": json.dumps(content.facts),
            "identity": self.identity,
            "step": str(self.progress.step),
        }

    def check_values(self, contents: Mapping[str, FileContent]) -> None:
        """Check that trained state has no NaN.

        Raises:
            SettingError: it has, and the options do not allow it.
        """
        if self.options.nonfinite:
            return
        nan_names: list[str] = []
        for content in contents.values():
            nan_names += fit.nan_names(content.checked)
        if nan_names:
            raise SettingError(
                f"there are NaN values in {join_names(nan_names)} at step "
                f"{self.progress.step}: this run has diverged, and its checkpoint is not written, "
                "to keep the previous one. Resume from an earlier checkpoint with a lower learning "
                "rate; to write these values nevertheless, pass allow_nonfinite=True"
            )

    def _versions_of(self, rank: int) -> dict[tuple[int, int], VersionedStage]:
        """Return a rank's stages with their weight rules, by stage and copy."""
        return {
            (version.stage.index, version.copy): version
            for version in self.versioned
            if version.rank == rank
        }

    def _average_state(self, stage: Stage) -> dict[str, Tensor]:
        """Copy the averaged weights of a stage to the CPU, by `average/<number>/<name>`."""
        return {
            f"average/{number}/{name}": tensor.detach().to("cpu", copy=True).contiguous()
            for number, average in enumerate(self.options.averages)
            for name, tensor in average.averaged(stage).items()
        }

    def index(
        self, sums: Mapping[str, FileSum], hosts: Mapping[str, str], *, keeps: bool
    ) -> Checkpoint:
        """Return the index that completes the checkpoint.

        Args:
            sums: sizes and checksums by file name.
            hosts: if every host wrote to its own disk, the host by file name; else empty.
            keeps: whether any file has state of a weight rule.
        """
        scaler = self.progress.scaler
        rule = self.options.rule
        return Checkpoint(
            self.progress.step,
            self.placed.traced.fingerprint,
            self.names,
            None if scaler is None else {name: float(value) for name, value in scaler.items()},
            self.progress.schedulers,
            identity=self.identity,
            sums=dict(sums),
            scheduler_kinds=self.progress.scheduler_kinds,
            rule=None if rule is None else replace(rule, keeps=keeps or rule.copies > 1),
            hosts=dict(hosts),
            score=_finite(self.progress.score),
            averages=self.progress.averages,
            aliases={
                name: saved_name
                for name, saved_name in self.placed.traced.aliases.items()
                if name != saved_name
            },
        )


def _finite(score: float | None) -> float | None:
    """Return a score; None if it is no number that can be compared."""
    return score if score is not None and math.isfinite(score) else None


def _optimizer_state(
    stage: Stage, version: VersionedStage | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and plain state of a stage's optimizer and, if any, of its weight rule."""
    if stage.update.optimizer is not None:
        check_optimizer(stage.update.optimizer)
    return optimizer_state(stage, "") if version is None else version.state_entries()
