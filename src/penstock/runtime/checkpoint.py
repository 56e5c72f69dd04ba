"""Checkpoints that know nothing of the cut: every tensor under its parameter's name, so that any
other plan can go on.

A folder holds one safetensors file per stage that wrote it and `checkpoint.json`, which is written
last and names them with their checksums: without it the folder holds no checkpoint, and until it is
replaced the one before stays whole. Nothing is executed when one is read. All ranks write and rank
0 sees all files, or `save` refuses; all ranks verify what they read before any changes a weight, or
`load` refuses, on every rank with one message.
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

from penstock.errors import FileError, PenstockError, SettingError
from penstock.optim.schedulers import Schedulers
from penstock.optim.stage_weights import StageWeights
from penstock.runtime import checkpoint_fit as fit
from penstock.runtime import state
from penstock.runtime.checkpoint_files import (
    Checkpoint,
    FileSum,
    RuleFacts,
    is_visible,
    remove_others,
    write_file,
    write_index,
)
from penstock.runtime.consensus import Report, attempt, check_reports, exchange
from penstock.runtime.own_state import optimizer_state, rule_state
from penstock.runtime.stage import Stage
from penstock.runtime.state import Placed
from penstock.runtime.world import World
from penstock.runtime.writable import check_optimizer

#: What `load` can leave as it is. Without the optimizer's state none of the others is taken either.
PARTS = ("optimizer", "schedulers", "scaler", "weight_rule")


@dataclass(frozen=True)
class Progress:
    """How far a run has come, besides what its stages hold: batches, the scaler's state, and the
    schedulers' as JSON with the names of their classes.
    """

    step: int
    scaler: Mapping[str, float] | None = None
    schedulers: tuple[str, ...] = ()
    scheduler_kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Versioned:
    """A stage that is held here with what stands behind its weights.

    `copy` says which it is of the copies of the stage that have optimizers of their own, from 0.
    """

    rank: int
    stage: Stage
    weights: StageWeights
    copy: int = 0

    @property
    def prefix(self) -> str:
        """What the names of its own state begin with."""
        return f"copy-{self.copy}/" if self.copy else ""

    def own_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and facts of optimizer and weight rule."""
        for optimizer in self.weights.more_optimizers():
            check_optimizer(optimizer)
        tensors, facts = optimizer_state(self.stage, self.prefix)
        return tensors | rule_state(self.stage, self.weights, self.prefix), facts


@dataclass(frozen=True)
class Terms:
    """On what terms a checkpoint is written or read.

    Attributes:
        rule: the weight rule of an asynchronous run.
        copies: how many of each stage have optimizers of their own.
        nonfinite: whether parameters and optimizer state may be NaN.
        skip: which of `PARTS` are left as they are.
        schedulers: those that there are.
        scaler: whether there is a loss scaler.
    """

    rule: RuleFacts | None = None
    copies: int = 1
    nonfinite: bool = False
    skip: frozenset[str] = frozenset()
    schedulers: Sequence[Schedulers] = ()
    scaler: bool = False


def parse_skip(skip: str | Collection[str]) -> frozenset[str]:
    """Which of `PARTS` a caller wants to leave as they are.

    Raises:
        SettingError: there is no such part.
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
    versioned: Sequence[Versioned] = (),
    terms: Terms = Terms(),
) -> None:
    """Write the stages held here; rank 0 completes the checkpoint when it sees all files, and the
    one before is removed.

    Args:
        folder: where to; the same, on one disk, for all ranks.
        world: the ranks.
        placed: which holds what.
        progress: how far the run has come.
        versioned: of a stream, the stages held here.
        terms: see there.

    Raises:
        FileError: the folder cannot be written, or is not one folder for all ranks.
        SettingError: an optimizer keeps something that a checkpoint cannot hold, or there is a NaN
        in what would be written.
    """
    identity = world.broadcast([secrets.token_hex(16)], 0)[0]
    writer = _Writer(folder, placed, progress, versioned, terms, identity)
    reports = exchange(world, world.run(lambda rank: attempt(rank, lambda: writer.write(rank))))
    sums = {
        name: FileSum(*row)
        for report in reports
        for name, row in (report.value or {"files": {}})["files"].items()
    }
    try:
        check_reports(reports, f"the checkpoint that {folder} had before is still there")
        text = None
        if 0 in world.local_ranks:
            text = [_complete(writer, reports, sums)]
        refusal = world.broadcast(text, 0)[0]
        if refusal:
            raise FileError(refusal)
    except PenstockError:
        writer.remove()
        raise
    # One rank of each host, which also removes what earlier checkpoints have left on a disk of its
    # own.
    hosts = {report.host: report.rank for report in reversed(reports)}
    if set(hosts.values()) & set(world.local_ranks):
        remove_others(folder, sums)
    world.barrier()


@dataclass(frozen=True)
class _Writer:
    """One checkpoint while it is written."""

    folder: Path
    placed: Placed
    progress: Progress
    versioned: Sequence[Versioned]
    terms: Terms
    identity: str

    def name(self, stage: int, copy: int) -> str:
        """Names are new each time: files of an earlier checkpoint, or of another run, stay until
        the index is replaced.
        """
        which = f"-copy-{copy}" if copy else ""
        return f"step-{self.progress.step:08d}-stage-{stage:04d}{which}-{self.identity[:16]}.safetensors"

    @property
    def names(self) -> tuple[str, ...]:
        """All files, in the order of the stages."""
        return tuple(
            self.name(stage, copy)
            for stage in range(len(self.placed.lengths))
            for copy in range(self.terms.copies)
        )

    def write(self, rank: int) -> dict[str, Any]:
        """The files of a rank: their sums, and whether they hold anything of a weight rule. Nothing
        is written before all is checked.
        """
        contents = self._contents(rank)
        files = {}
        for name, (tensors, facts) in contents.items():
            metadata = {
                "optimizer": json.dumps(facts),
                "identity": self.identity,
                "step": str(self.progress.step),
            }
            files[name] = list(asdict(write_file(self.folder / name, tensors, metadata)).values())
        keeps = any("weights/" in key for tensors, _ in contents.values() for key in tensors)
        return {"files": files, "keeps": keeps}

    def remove(self) -> None:
        """Take back what has been written."""
        with suppress(OSError, ValueError):
            for name in self.names:
                (self.folder / name).unlink(missing_ok=True)

    def _contents(self, rank: int) -> dict[str, tuple[dict[str, Tensor], dict[str, Any]]]:
        of_rank = {(v.stage.index, v.copy): v for v in self.versioned if v.rank == rank}
        contents: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {}
        broken: list[str] = []
        for stage in self.placed.at_home:
            if self.placed.home[stage.index] != rank:
                continue
            versioned = of_rank.pop((stage.index, 0), None)
            tensors, facts = _own_state(stage, versioned)
            model = {
                name: tensor.detach().cpu().contiguous().clone()
                for name, tensor in state.counted(self.placed, stage).items()
            }
            parameters = fit.parameter_names(stage)
            trained = {name: tensor for name, tensor in model.items() if name in parameters}
            broken += fit.nan_names(trained | tensors)
            named = {f"model/{name}": tensor for name, tensor in model.items()}
            contents[self.name(stage.index, 0)] = named | tensors, facts
        for (index, copy), versioned in of_rank.items():
            if copy:
                tensors, facts = _own_state(versioned.stage, versioned)
                broken += fit.nan_names(tensors)
                contents[self.name(index, copy)] = tensors, facts
        if broken and not self.terms.nonfinite:
            raise SettingError(
                f"there are NaN values in {fit.join_names(broken)} at step {self.progress.step}: this run has diverged, and its "
                "checkpoint is not written in the place of a good one. Go on from an earlier checkpoint with a lower learning "
                "rate; to write these values nevertheless, say allow_nonfinite=True"
            )
        return contents

    def index(self, sums: Mapping[str, FileSum], *, keeps: bool) -> Checkpoint:
        """What completes the checkpoint."""
        scaler = self.progress.scaler
        rule = self.terms.rule
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


def _own_state(
    stage: Stage, versioned: Versioned | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if stage.update.optimizer is not None:
        check_optimizer(stage.update.optimizer)
    return optimizer_state(stage, "") if versioned is None else versioned.own_state()


def _complete(writer: _Writer, reports: Sequence[Report], sums: Mapping[str, FileSum]) -> str:
    """On rank 0: write the index, if all files are seen from here. Returns why not, or nothing."""
    for report in reports:
        missing = [
            name
            for name in report.value["files"]
            if not is_visible(writer.folder, name, sums[name])
        ]
        if missing:
            where = writer.folder.absolute()
            return (
                f"rank {report.rank} on host {report.host} wrote {missing[0]} into {where}, which rank 0 on host "
                f"{reports[0].host} does not see: no rank could load this checkpoint. Save into one folder, on a disk that all "
                "hosts share"
            )
    try:
        keeps = any(report.value["keeps"] for report in reports)
        write_index(writer.folder, writer.index(sums, keeps=keeps))
    except FileError as error:
        return str(error)
    return ""
