"""Loading of checkpoints: no weight changes before all ranks have verified what they need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.checkpoint import checkpoint_fit as fit
from penstock.checkpoint.checkpoint import Progress, VersionedStage
from penstock.checkpoint.checkpoint_files import Header, check_content, read_header, read_tensors
from penstock.checkpoint.checkpoint_index import Checkpoint, read_index
from penstock.checkpoint.checkpoint_options import CheckpointOptions
from penstock.checkpoint.fetch import fetch_missing
from penstock.checkpoint.optimizer_checkpoint import (
    Facts,
    names_of,
    restore_optimizer,
    restore_rule,
)
from penstock.checkpoint.optimizer_fit import OptimizerState, check_optimizer_state
from penstock.errors import CheckpointDamaged, FileError, SettingError
from penstock.ranks.processes.rank_reports import Report, attempt, check_reports, exchange
from penstock.ranks.world import World
from penstock.stage import stage_state as state
from penstock.stage.stage import Stage
from penstock.stage.stage_state import Placed

T = TypeVar("T")


def load(
    folder: Path,
    world: World,
    placed: Placed,
    versioned: Sequence[VersionedStage],
    options: CheckpointOptions,
    begin_anew: Callable[[], Sequence[VersionedStage]] | None = None,
) -> Progress:
    """Load a checkpoint into the stages of this process; gradients are dropped.

    Args:
        folder: a folder that `save` has written.
        world: the ranks.
        placed: the placement of the stages.
        versioned: for an asynchronous run, the stages of this process with their weight rules.
        options: see `CheckpointOptions`.
        begin_anew: for an asynchronous run, initialises the weight rules from the current
            parameters and returns the stages; called before and after the parameters are loaded.

    Returns:
        The progress of the run that was saved, without skipped parts.

    Raises:
        FileError: on every rank, if any rank has found a missing, damaged or unsuitable file. No
            rank has changed anything.
    """
    fetch_missing(folder, world)
    contents: list[_Content] = []

    def read() -> list[Any]:
        """Read and verify the checkpoint; return what identifies it to the other ranks."""
        contents.append(_read(folder, placed, versioned, options))
        index = contents[0].index
        return [index.identity or index.content_sha256(), index.step, str(folder.absolute())]

    # One read for all ranks of this process; its report stands for each of them.
    first, *others = world.local_ranks
    try:
        report = attempt(first, read)
    except Exception as error:
        # `attempt` reports errors of the checkpoint; of others the ranks that wait must hear too.
        _fail(world, error)
        raise
    reports = exchange(
        world, {first: report} | {rank: replace(report, rank=rank) for rank in others}
    )
    check_reports(reports, "nothing was loaded on any rank")
    _check_same(reports)
    _apply(contents[0], placed, options, begin_anew)
    index = contents[0].index
    skip_schedulers = "schedulers" in options.skip
    return Progress(
        index.step,
        None if "scaler" in options.skip else index.scaler,
        () if skip_schedulers else index.schedulers,
        () if skip_schedulers else index.scheduler_kinds,
        averages=() if "averages" in options.skip else index.averages,
    )


def _check_same(reports: Sequence[Report]) -> None:
    """Check that all ranks have read the same checkpoint.

    Raises:
        FileError: they have not; hosts may have different local disks under one path.
    """
    first, *others = reports
    for other in others:
        if other.value[0] != first.value[0]:
            _, step, folder = other.value
            raise FileError(
                f"rank {other.rank} on host {other.host} reads the checkpoint of step {step} in "
                f"{folder}, and rank 0 on host {first.host} that of step {first.value[1]} in "
                f"{first.value[2]}: load from one folder, on a disk that all hosts share (nothing "
                "was loaded on any rank)"
            )


def _fail(world: World, error: Exception) -> None:
    """Report an unexpected error to the ranks of other processes, which are waiting."""
    if len(world.local_ranks) < world.size:

        def fail(rank: int) -> None:
            """Raise the error as that of this rank."""
            del rank
            raise error

        world.run(fail)


@dataclass(frozen=True)
class _Content:
    """The parts of a checkpoint that this process has read and verified.

    Attributes:
        index: the index of the checkpoint.
        tensors: the tensors that this process needs, by name.
        facts: non-tensor optimizer state, by parameter name with the prefix of the stage's copy.
        files: by the same names, the file of the state.
        prefixes: the prefixes of the copies of this process, by the `id` of the stage.
    """

    index: Checkpoint
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Facts]
    files: Mapping[str, str]
    prefixes: Mapping[int, str]

    def of_optimizer(self, stage: Stage) -> OptimizerState:
        """Return the saved state of a stage's optimizer.

        It is that of the same copy of the stage; if fewer copies were saved, that of the first.
        """
        prefix = self.prefixes.get(id(stage), "")
        if not any(key.startswith(f"{prefix}optimizer/") for key in self.tensors):
            prefix = ""
        return OptimizerState(
            _below(f"{prefix}optimizer/", self.tensors),
            _below(prefix, self.facts),
            _below(prefix, self.files),
        )


def _read(
    folder: Path, placed: Placed, versioned: Sequence[VersionedStage], options: CheckpointOptions
) -> _Content:
    """Read what this process needs of a checkpoint, and check that it fits the pipeline.

    Raises:
        FileError: there is no checkpoint, a file is damaged, or something does not fit.
    """
    index = read_index(folder)
    headers = {name: read_header(folder, name, index) for name in index.files}
    _check_fingerprint(folder, index, headers.values(), placed)
    prefixes = {id(version.stage): version.prefix for version in versioned}
    needed = _needed_names(placed, prefixes.values()) | fit.average_tensors(placed, options).keys()
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Facts] = {}
    files: dict[str, str] = {}
    for name, header in headers.items():
        file_facts = _facts(folder, name, header)
        facts.update(file_facts)
        files.update(dict.fromkeys(file_facts, name))
        keys = [key for key in header.tensors if key in needed or key.rpartition("/")[0] in needed]
        if keys:
            # The weight rule's numbers, `weights/<key>`, belong to the whole stage.
            keys += [key for key in header.tensors if key.rpartition("/")[0].endswith("weights")]
            check_content(folder, name, index)
            tensors |= read_tensors(folder, name, set(keys))
    content = _Content(index, tensors, facts, files, prefixes)
    _check(folder, content, headers, placed, options)
    return content


def _check_fingerprint(
    folder: Path, index: Checkpoint, headers: Collection[Header], placed: Placed
) -> None:
    """Check that a checkpoint is of this model.

    Raises:
        FileError: it is not; the message has the first tensors that differ.
    """
    if index.fingerprint != placed.traced.fingerprint:
        raise FileError(
            f"{folder} is a checkpoint of another model: its layers and shapes have fingerprint "
            f"{index.fingerprint}, this model's have {placed.traced.fingerprint}"
            f"{fit.model_difference(headers, placed)}"
        )


def _facts(folder: Path, name: str, header: Header) -> dict[str, Facts]:
    """Return the non-tensor optimizer state of a file, by parameter.

    Raises:
        FileError: it is damaged.
    """
    try:
        return header.facts
    except ValueError as error:
        raise CheckpointDamaged(
            f"cannot read {name} of the checkpoint {folder}: {error}"
        ) from error


def _needed_names(placed: Placed, prefixes: Collection[str]) -> set[str]:
    """Return the names of the tensors that this process needs.

    For state of optimizers and weight rules these are the names without the last part, the key.
    """
    names = {name for stage in placed.local for name in state.stage_tensors(stage)}
    names |= {placed.traced.first_name(name) for name in names}
    needed = {f"model/{name}" for name in names}
    for stage in placed.local:
        for name in names_of(stage).values():
            # Without prefix too: the first copy's state serves where a copy has not been saved.
            for prefix in {"", *prefixes}:
                needed |= {f"{prefix}optimizer/{name}", f"{prefix}weights/{name}"}
    return needed


def _check(
    folder: Path,
    content: _Content,
    headers: Mapping[str, Header],
    placed: Placed,
    options: CheckpointOptions,
) -> None:
    """Check that a checkpoint fits the pipeline.

    Raises:
        FileError: it does not; one message has all mismatches.
    """
    findings = fit.Findings()
    model = _below("model/", content.tensors)
    fit.check_model(placed, model, findings, nonfinite=options.nonfinite)
    fit.check_names(headers.values(), placed, findings)
    if "optimizer" not in options.skip:
        _check_optimizers(content, placed, options, findings)
    if "schedulers" not in options.skip:
        fit.check_schedulers(content.index, options.schedulers, findings)
    if "scaler" not in options.skip:
        fit.check_scaler(content.index, options.scaler, findings)
    if "weight_rule" not in options.skip:
        fit.check_rule(content.index, options.rule, findings)
    if "averages" not in options.skip:
        fit.check_averages(content.index, content.tensors, placed, options, findings)
    if findings.rows:
        raise FileError(f"the checkpoint {folder} does not fit: {findings.text()}")


def _check_optimizers(
    content: _Content, placed: Placed, options: CheckpointOptions, findings: fit.Findings
) -> None:
    """Check the state of the optimizers and weight rules of this process."""
    for stage in placed.local:
        if stage.update.optimizer is not None:
            saved = content.of_optimizer(stage)
            check_optimizer_state(stage.update.optimizer, names_of(stage), saved, findings)
    if options.nonfinite:
        return
    not_model = {
        key: value for key, value in content.tensors.items() if not key.startswith("model/")
    }
    for name in fit.nan_names(not_model):
        findings.add(fit.NAN, name)


def _apply(
    content: _Content,
    placed: Placed,
    options: CheckpointOptions,
    begin_anew: Callable[[], Sequence[VersionedStage]] | None,
) -> None:
    """Copy a checked checkpoint into the stages, optimizers and weight rules of this process."""
    # Completes or drops batches in flight, whose graphs still read the parameters.
    if begin_anew is not None:
        begin_anew()
    try:
        state.copy_into_stages(placed, _below("model/", content.tensors))
    except SettingError as error:
        raise FileError(f"the checkpoint does not fit: {error}") from error
    for stage in placed.local:
        stage.update.zero()
        optimizer = stage.update.optimizer
        if optimizer is None:
            continue
        if "optimizer" in options.skip:
            optimizer.state.clear()
            continue
        saved = content.of_optimizer(stage)
        restore_optimizer(optimizer, names_of(stage), saved.tensors, saved.facts)
    _apply_averages(content, placed, options)
    if begin_anew is None:
        return
    # Again, since the weight rules must start from the loaded parameters.
    for version in begin_anew():
        if "weight_rule" not in options.skip:
            entries = _below(f"{version.prefix}weights/", content.tensors)
            restore_rule(version.stage, version.weights, entries)


def _apply_averages(content: _Content, placed: Placed, options: CheckpointOptions) -> None:
    """Copy the saved averages of the weights, or let the averages begin anew."""
    restore = bool(content.index.averages) and "averages" not in options.skip
    if restore:
        with torch.no_grad():
            for name, target in fit.average_tensors(placed, options).items():
                target.copy_(content.tensors[name])
    for number, average in enumerate(options.averages):
        average.restart(content.index.averages[number] if restore else 0)


def _below(prefix: str, values: Mapping[str, T]) -> dict[str, T]:
    """Return the entries whose keys begin with a prefix, by the rest of their keys."""
    return {
        key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)
    }
