"""How a checkpoint is read: every rank verifies what it needs, all agree, and only then weights
change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from penstock.errors import FileError, SettingError
from penstock.runtime import checkpoint_fit as fit
from penstock.runtime import state
from penstock.runtime.checkpoint import Progress, Terms, Versioned
from penstock.runtime.checkpoint_files import (
    Checkpoint,
    Header,
    check_content,
    read_header,
    read_index,
    read_tensors,
)
from penstock.runtime.consensus import Report, attempt, check_reports, exchange
from penstock.runtime.own_state import Facts, names_of, restore_optimizer, restore_rule
from penstock.runtime.stage import Stage
from penstock.runtime.state import Placed
from penstock.runtime.world import World

T = TypeVar("T")


def load(
    folder: Path,
    world: World,
    placed: Placed,
    versioned: Sequence[Versioned],
    terms: Terms,
    begin_anew: Callable[[], Sequence[Versioned]] | None = None,
) -> Progress:
    """Fill the stages held here and return how far the run had come when the checkpoint was taken.
    Gradients are dropped.

    Args:
        folder: where `save` wrote.
        world: the ranks.
        placed: which holds what.
        versioned: of a stream, the stages held here.
        terms: see there.
        begin_anew: of a stream, lets the stages begin anew from the parameters as they are, and
        returns them; called before they are
            filled and after.

    Raises:
        FileError: on every rank, if on any rank a file is missing or damaged, or does not fit.
        Nothing has changed anywhere then.
    """
    contents: list[_Content] = []

    def read() -> list[Any]:
        contents.append(_read(folder, placed, versioned, terms))
        index = contents[0].index
        return [index.identity or index.sum(), index.step, str(folder.absolute())]

    first, *others = world.local_ranks
    try:
        report = attempt(first, read)
    except Exception as error:
        _fail(world, error)
        raise
    reports = exchange(
        world, {first: report} | {rank: replace(report, rank=rank) for rank in others}
    )
    check_reports(reports, "nothing was loaded on any rank")
    _check_same(reports)
    _apply(contents[0], placed, terms, begin_anew)
    index = contents[0].index
    skip_schedulers = "schedulers" in terms.skip
    return Progress(
        index.step,
        None if "scaler" in terms.skip else index.scaler,
        () if skip_schedulers else index.schedulers,
        () if skip_schedulers else index.scheduler_kinds,
    )


def _check_same(reports: Sequence[Report]) -> None:
    """Refuse if ranks have read different checkpoints: hosts may each have a disk of their own
    under that name.
    """
    first, *others = reports
    for other in others:
        if other.value[0] != first.value[0]:
            _, step, folder = other.value
            raise FileError(
                f"rank {other.rank} on host {other.host} reads the checkpoint of step {step} in {folder}, and rank 0 on host "
                f"{first.host} that of step {first.value[1]} in {first.value[2]}: load from one folder, on a disk that all "
                "hosts share (nothing was loaded on any rank)"
            )


def _fail(world: World, error: Exception) -> None:
    """Let the ranks of other processes know of an error that nobody has foreseen."""
    if len(world.local_ranks) < world.size:

        def fail(rank: int) -> None:
            del rank
            raise error

        world.run(fail)


@dataclass(frozen=True)
class _Content:
    """What this process has read and verified.

    Attributes:
        index: of the checkpoint.
        tensors: those that are needed here, by name.
        facts: by parameter, after the prefix of its copy.
        files: by parameter, likewise, the file that it is in.
        prefixes: of the stages held here, by id.
    """

    index: Checkpoint
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Facts]
    files: Mapping[str, str]
    prefixes: Mapping[int, str]

    def of_optimizer(self, stage: Stage) -> fit.OptimizerState:
        """The state of a stage's optimizer: its copy's own, or, where there was no such copy, the
        first one's.
        """
        prefix = self.prefixes.get(id(stage), "")
        if not any(key.startswith(f"{prefix}optimizer/") for key in self.tensors):
            prefix = ""
        return fit.OptimizerState(
            _below(f"{prefix}optimizer/", self.tensors),
            _below(prefix, self.facts),
            _below(prefix, self.files),
        )


def _read(folder: Path, placed: Placed, versioned: Sequence[Versioned], terms: Terms) -> _Content:
    """All that is needed here, verified and held against the pipeline.

    Raises:
        FileError: there is no checkpoint, a file is damaged, or something does not fit.
    """
    index = read_index(folder)
    headers = {name: read_header(folder, name, index) for name in index.files}
    if index.fingerprint != placed.traced.fingerprint:
        raise FileError(
            f"{folder} is a checkpoint of another model: its layers and shapes have fingerprint {index.fingerprint}, this "
            f"model's have {placed.traced.fingerprint}{fit.model_difference(headers.values(), placed)}"
        )
    prefixes = {id(version.stage): version.prefix for version in versioned}
    parts = _parts(placed, prefixes.values())
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Facts] = {}
    files: dict[str, str] = {}
    for name, header in headers.items():
        own = _facts(folder, name, header)
        facts.update(own)
        files.update(dict.fromkeys(own, name))
        keys = [key for key in header.tensors if key in parts or key.rpartition("/")[0] in parts]
        if keys:
            keys += [key for key in header.tensors if key.rpartition("/")[0].endswith("weights")]
            check_content(folder, name, index)
            tensors |= read_tensors(folder, name, set(keys))
    content = _Content(index, tensors, facts, files, prefixes)
    _check(folder, content, headers, placed, terms)
    return content


def _facts(folder: Path, name: str, header: Header) -> dict[str, Facts]:
    try:
        return header.facts
    except ValueError as error:
        raise FileError(f"cannot read {name} of the checkpoint {folder}: {error}") from error


def _parts(placed: Placed, prefixes: Collection[str]) -> set[str]:
    """Names of tensors that are needed here, or of what stands before their last part."""
    names = {name for stage in placed.local for name in state.own(stage)}
    model = {
        f"model/{name}"
        for name in names | {placed.traced.aliases.get(name, name) for name in names}
    }
    trained = {name for stage in placed.local for name in names_of(stage).values()}
    return model | {
        f"{prefix}{kind}/{name}"
        for prefix in {"", *prefixes}
        for kind in ("optimizer", "weights")
        for name in trained
    }


def _check(
    folder: Path,
    content: _Content,
    headers: Mapping[str, Header],
    placed: Placed,
    terms: Terms,
) -> None:
    """Refuse what does not fit, all of it in one message."""
    findings = fit.Findings()
    fit.check_model(placed, _below("model/", content.tensors), findings, nonfinite=terms.nonfinite)
    fit.check_names(headers.values(), placed, findings)
    if "optimizer" not in terms.skip:
        for stage in placed.local:
            if stage.update.optimizer is not None:
                saved = content.of_optimizer(stage)
                fit.check_optimizer_state(stage.update.optimizer, names_of(stage), saved, findings)
        own_state = {
            key: value for key, value in content.tensors.items() if not key.startswith("model/")
        }
        for name in () if terms.nonfinite else fit.nan_names(own_state):
            findings.add(fit.NAN, name)
    if "schedulers" not in terms.skip:
        fit.check_schedulers(content.index, terms.schedulers, findings)
    if "scaler" not in terms.skip:
        fit.check_scaler(content.index, terms.scaler, findings)
    if "weight_rule" not in terms.skip:
        fit.check_rule(content.index, terms.rule, findings)
    if findings.rows:
        raise FileError(f"the checkpoint {folder} does not fit: {findings.text()}")


def _apply(
    content: _Content,
    placed: Placed,
    terms: Terms,
    begin_anew: Callable[[], Sequence[Versioned]] | None,
) -> None:
    """Change everything that is held here. All has been checked: nothing may fail any more."""
    if begin_anew is not None:
        begin_anew()
    try:
        state.put(placed, _below("model/", content.tensors))
    except SettingError as error:
        raise FileError(f"the checkpoint does not fit: {error}") from error
    for stage in placed.local:
        stage.update.zero()
        optimizer = stage.update.optimizer
        if optimizer is None:
            continue
        if "optimizer" in terms.skip:
            optimizer.state.clear()
            continue
        saved = content.of_optimizer(stage)
        restore_optimizer(optimizer, names_of(stage), saved.tensors, saved.facts)
    for each in () if begin_anew is None else begin_anew():
        if "weight_rule" not in terms.skip:
            entries = _below(f"{each.prefix}weights/", content.tensors)
            restore_rule(each.stage, each.weights, entries)


def _below(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    return {
        key.removeprefix(prefix): value for key, value in named.items() if key.startswith(prefix)
    }
