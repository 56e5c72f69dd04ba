"""Writing of checkpoints that are independent of the cut into stages.

Every tensor is saved under its parameter's name, so that any other plan can load the checkpoint. A
folder holds one safetensors file per stage, written by that stage's rank, and `checkpoint.json`,
which is written last and names the files with their checksums. Without `checkpoint.json` the folder
holds no checkpoint, and until it is replaced the previous checkpoint stays complete. Loading
executes no code from the files.

Checkpoints are all or nothing: `save` refuses unless all ranks have written and rank 0 sees all
files; `load` refuses, with the same message on every rank, unless all ranks have verified what they
read, and no rank changes a weight before.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.checkpoint import checkpoint_fit as fit
from penstock.checkpoint.checkpoint_files import (
    Checkpoint,
    FileSum,
    RuleFacts,
    is_visible,
    remove_others,
    write_file,
    write_index,
)
from penstock.checkpoint.optimizer_check import check_optimizer
from penstock.checkpoint.optimizer_checkpoint import optimizer_state, rule_state
from penstock.errors import FileError, PenstockError, SettingError
from penstock.optim.schedulers import Schedulers
from penstock.optim.stage_weights import StageWeights
from penstock.ranks.rank_reports import Report, attempt, check_reports, exchange
from penstock.ranks.world import World
from penstock.stage import stage_state as state
from penstock.stage.stage import Stage
from penstock.stage.stage_state import Placed

#: The parts of a checkpoint that `load` can skip. Skipping the optimizer skips all others too.
PARTS = ("optimizer", "schedulers", "scaler", "weight_rule")

#: The content of one file: tensors by name, and the plain state of the optimizer by parameter.
_FileContent = tuple[dict[str, Tensor], dict[str, Any]]


@dataclass(frozen=True)
class Progress:
    """The progress of a run, apart from the state of its stages.

    Attributes:
        step: number of trained batches.
        scaler: state of the loss scaler.
        schedulers: states of the learning-rate schedulers, as JSON.
        scheduler_kinds: their class names.
    """

    step: int
    scaler: Mapping[str, float] | None = None
    schedulers: tuple[str, ...] = ()
    scheduler_kinds: tuple[str, ...] = ()


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

    def own_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and plain state of the optimizer and the weight rule, both by name.

        Raises:
            SettingError: an optimizer keeps state that a checkpoint cannot hold.
        """
        for optimizer in self.weights.more_optimizers():
            check_optimizer(optimizer)
        tensors, facts = optimizer_state(self.stage, self.prefix)
        return tensors | rule_state(self.stage, self.weights, self.prefix), facts


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of `save` and `load`.

    Attributes:
        rule: the weight rule of an asynchronous run.
        copies: the number of copies of each stage that have their own optimizers.
        nonfinite: whether NaN is allowed in parameters and optimizer state.
        skip: the `PARTS` that `load` leaves unchanged.
        schedulers: the learning-rate schedulers of the pipeline that loads.
        scaler: whether that pipeline has a loss scaler.
    """

    rule: RuleFacts | None = None
    copies: int = 1
    nonfinite: bool = False
    skip: frozenset[str] = frozenset()
    schedulers: Sequence[Schedulers] = ()
    scaler: bool = False


def parse_skip(skip: str | Collection[str]) -> frozenset[str]:
    """Return the parts of a checkpoint that the user's `skip=` names.

    Raises:
        SettingError: a name is not one of `PARTS`.
    """
    names = {skip} if isinstance(skip, str) and skip else set(skip)
    for name in names:
        if name not in PARTS:
            raise SettingError(f"skip is any of {', '.join(PARTS)}, not {name!r}")
    return frozenset(PARTS if "optimizer" in names else names)


def save(
    folder: Path,
    world: World,
    placed: Placed,
    progress: Progress,
    versioned: Sequence[VersionedStage] = (),
    options: CheckpointOptions = CheckpointOptions(),
) -> None:
    """Write a checkpoint; every rank writes its own stages.

    Rank 0 completes the checkpoint once it sees all files; then the previous one is removed.

    Args:
        folder: the folder to write; the same one, on a shared disk, for all ranks.
        world: the ranks.
        placed: the placement of the stages.
        progress: the progress of the run.
        versioned: for an asynchronous run, the stages of this process with their weight rules.
        options: see `CheckpointOptions`.

    Raises:
        FileError: the folder cannot be written, or is not the same folder for all ranks.
        SettingError: an optimizer keeps state that a checkpoint cannot hold, or the state to be
            written contains NaN.
    """
    identity = world.broadcast([secrets.token_hex(16)], 0)[0]
    writer = _Writer(folder, placed, progress, versioned, options, identity)
    reports = exchange(world, world.run(lambda rank: attempt(rank, lambda: writer.write(rank))))
    sums: dict[str, FileSum] = {}
    for report in reports:
        if report.value is not None:
            sums |= {name: FileSum(*row) for name, row in report.value["files"].items()}
    try:
        check_reports(reports, f"the previous checkpoint in {folder} is unchanged")
        text = None
        if 0 in world.local_ranks:
            text = [_complete(writer, reports, sums)]
        refusal = world.broadcast(text, 0)[0]
        if refusal:
            raise FileError(refusal)
    except PenstockError:
        writer.remove()
        raise
    # One rank of each host cleans up: a host may have files of earlier checkpoints on its own disk.
    hosts = {report.host: report.rank for report in reversed(reports)}
    if set(hosts.values()) & set(world.local_ranks):
        remove_others(folder, sums)
    world.barrier()


@dataclass(frozen=True)
class _Writer:
    """Writes the files of one checkpoint; see `save` for the fields."""

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

    def write(self, rank: int) -> dict[str, Any]:
        """Write the files of one rank, after all of their content has been checked.

        Returns:
            Under "files" the fields of `FileSum` by file name, under "keeps" whether a file has
            state of a weight rule.

        Raises:
            FileError: the folder cannot be written.
            SettingError: as for `save`.
        """
        # All checks come before the first file: a refused save leaves nothing to clean up.
        contents = self._contents(rank)
        files = {}
        for name, (tensors, facts) in contents.items():
            # Identity and step are in every file, so that files of two checkpoints cannot be mixed.
            metadata = {
                "optimizer": json.dumps(facts),
                "identity": self.identity,
                "step": str(self.progress.step),
            }
            files[name] = list(asdict(write_file(self.folder / name, tensors, metadata)).values())
        keeps = any("weights/" in key for tensors, _ in contents.values() for key in tensors)
        return {"files": files, "keeps": keeps}

    def remove(self) -> None:
        """Delete the files that were written, after a failure."""
        with suppress(OSError, ValueError):
            for name in self.names:
                (self.folder / name).unlink(missing_ok=True)

    def _contents(self, rank: int) -> dict[str, _FileContent]:
        """Return the content of each file of a rank, by file name.

        Raises:
            SettingError: the state contains NaN, or an optimizer's state cannot be saved.
        """
        versions = self._versions_of(rank)
        contents: dict[str, _FileContent] = {}
        nan_names: list[str] = []
        for stage in self.placed.at_home:
            if self.placed.home[stage.index] != rank:
                continue
            version = versions.pop((stage.index, 0), None)
            tensors, facts = _optimizer_state(stage, version)
            model = self._model_state(stage)
            parameters = fit.parameter_names(stage)
            trained = {name: tensor for name, tensor in model.items() if name in parameters}
            nan_names += fit.nan_names(trained | tensors)
            prefixed = {f"model/{name}": tensor for name, tensor in model.items()}
            contents[self.name(stage.index, 0)] = prefixed | tensors, facts
        for (index, copy), version in versions.items():
            if copy:
                tensors, facts = _optimizer_state(version.stage, version)
                nan_names += fit.nan_names(tensors)
                contents[self.name(index, copy)] = tensors, facts
        if nan_names and not self.options.nonfinite:
            raise SettingError(
                f"there are NaN values in {fit.join_names(nan_names)} at step "
                f"{self.progress.step}: this run has diverged, and its checkpoint is not written, "
                "to keep the previous one. Resume from an earlier checkpoint with a lower learning "
                "rate; to write these values nevertheless, pass allow_nonfinite=True"
            )
        return contents

    def _versions_of(self, rank: int) -> dict[tuple[int, int], VersionedStage]:
        """Return a rank's stages with their weight rules, by stage and copy."""
        return {
            (version.stage.index, version.copy): version
            for version in self.versioned
            if version.rank == rank
        }

    def _model_state(self, stage: Stage) -> dict[str, Tensor]:
        """Copy the parameters and buffers that a stage saves to the CPU."""
        return {
            name: tensor.detach().cpu().contiguous().clone()
            for name, tensor in state.owned_tensors(self.placed, stage).items()
        }

    def index(self, sums: Mapping[str, FileSum], *, keeps: bool) -> Checkpoint:
        """Return the index that completes the checkpoint.

        Args:
            sums: sizes and checksums by file name.
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
        )


def _optimizer_state(stage: Stage, version: VersionedStage | None) -> _FileContent:
    """Return tensors and plain state of a stage's optimizer and, if any, of its weight rule."""
    if stage.update.optimizer is not None:
        check_optimizer(stage.update.optimizer)
    return optimizer_state(stage, "") if version is None else version.own_state()


def _complete(writer: _Writer, reports: Sequence[Report], sums: Mapping[str, FileSum]) -> str:
    """Write the index on rank 0 if it sees all files.

    Returns:
        Why the checkpoint cannot be completed; empty on success.
    """
    for report in reports:
        missing = [
            name
            for name in report.value["files"]
            if not is_visible(writer.folder, name, sums[name])
        ]
        if missing:
            return (
                f"rank {report.rank} on host {report.host} wrote {missing[0]} into "
                f"{writer.folder.absolute()}, which rank 0 on host {reports[0].host} does not see: "
                "no rank could load this checkpoint. Save into one folder, on a disk that all "
                "hosts share"
            )
    try:
        keeps = any(report.value["keeps"] for report in reports)
        write_index(writer.folder, writer.index(sums, keeps=keeps))
    except FileError as error:
        return str(error)
    return ""
