"""Continue a run from its own configuration, with changes to settings that may change. The run's
folder changes only once the new configuration has been accepted.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from penstock.errors import FileError, PlanError, SettingError
from penstock.files.json_values import json_value
from penstock.option import options_of
from penstock.runtime.pipeline import Pipeline
from penstock.store import write_file
from penstock.training.config import TrainConfig, read_settings, validate_settings
from penstock.training.optimizer import sample_optimizer
from penstock.training.plan_file import check_beside_plan
from penstock.training.run_checkpoints import checkpoint_folders, newest_checkpoint

#: Settings that select the run; they are not compared.
_SELECTING = ("out", "resume")
#: Folder in the run's folder for new files until the resumed run is accepted.
_STAGING = ".resume"


def resume_settings(
    path: str | Path | None, changes: Mapping[str, Any]
) -> tuple[TrainConfig, list[str]]:
    """Return the configuration of a run that is to be continued.

    Args:
        path: the run's folder; or a YAML file, whose settings count as explicit changes.
        changes: further explicit changes, by the names of the fields. All other settings are those
            of the run's own `config.yaml`.

    Returns:
        The configuration, and a line for every setting that has changed, such as "lr: 0.05 ->
        0.01".

    Raises:
        FileError: the folder holds no run, or no checkpoint.
        SettingError: a setting may not change, or is invalid.
    """
    folder, explicit = _explicit_settings(path, changes)
    config_file = folder / "config.yaml"
    step = _check_run_folder(folder)
    folder_settings = {"out": str(folder), "resume": True}
    run_settings = read_settings(config_file)
    before = validate_settings({**run_settings, **folder_settings}, str(config_file))
    after = validate_settings({**run_settings, **explicit, **folder_settings}, "the settings")
    limit = before.limit_steps
    if "limit_steps" not in explicit and limit is not None and step >= limit:
        # The run has reached its limit, so to continue it means to lift the limit.
        explicit = {**explicit, "limit_steps": None}
        after = validate_settings({**run_settings, **explicit, **folder_settings}, str(config_file))
    if after.plan is not None:
        check_beside_plan(after.plan, explicit)
    differences = _differences(before, after, explicit)
    _refuse_fixed(folder, differences)
    lines = [f"{name}: {_text(old)} -> {_text(new)}" for name, (old, new) in differences.items()]
    return after, lines


def _check_run_folder(folder: Path) -> int:
    """Return the step of the checkpoint from which a run continues.

    Raises:
        FileError: the folder has no run, or no whole checkpoint.
    """
    if not (folder / "config.yaml").exists():
        raise FileError(
            f"{folder} holds no run to continue: there is no config.yaml. Name the folder of one "
            "by --out, or start a run without --resume"
        )
    return newest_checkpoint(folder).step


def _differences(
    before: TrainConfig, after: TrainConfig, explicit: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return old and new value of the explicit settings that have changed, by name."""
    differences = {}
    for field in fields(TrainConfig):
        if field.name not in explicit or field.name in _SELECTING:
            continue
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old != new:
            differences[field.name] = old, new
    return differences


def _explicit_settings(
    path: str | Path | None, changes: Mapping[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """Return the run's folder, and all settings that the caller has set.

    Raises:
        SettingError: there is no folder, or there are two.
    """
    folder = None if path is None else _run_folder(Path(path))
    explicit = dict(changes)
    if path is not None and folder is None:
        explicit = {**read_settings(path), **changes}
    out = explicit.get("out")
    if folder is not None and out is not None and Path(out).resolve() != folder.resolve():
        raise SettingError(
            f"two runs to continue: the one in {folder} and the one in --out {out}. Name one"
        )
    if folder is None and out is None:
        raise SettingError(
            "resume needs the folder of the run to continue: penstock train --resume runs/NAME, or "
            "--out runs/NAME"
        )
    return folder or Path(str(out)), explicit


def _run_folder(path: Path) -> Path | None:
    """Return the run's folder if the path is one, or is the configuration in one; else None."""
    if path.name == "config.yaml" and checkpoint_folders(path.parent):
        return path.parent
    return path if path.is_dir() else None


def _refuse_fixed(folder: Path, differences: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse changes of settings that may not change. Raises SettingError."""
    fixed = {field.name for field, facts in options_of(TrainConfig) if facts.fixed}
    refused = [
        f"{name} is {_text(old)}, not {_text(new)}"
        for name, (old, new) in differences.items()
        if name in fixed
    ]
    if refused:
        raise SettingError(
            f"the run in {folder} cannot continue with these settings: its "
            f"{'; its '.join(refused)}. Leave that out to continue it, or start a new run, in "
            "another folder, without --resume"
        )


def _text(value: object) -> str:
    """Return a setting's value as text."""
    return "none" if value is None else str(value)


def check_checkpoint(config: TrainConfig, fingerprint: str, per_epoch: int) -> None:
    """Check that training can continue from a run's checkpoint.

    Raises:
        FileError: the checkpoint is damaged, or of another model.
        PlanError: the run is over.
    """
    folder = Path(str(config.out))
    saved = newest_checkpoint(folder)
    index = saved.index
    if index.fingerprint != fingerprint:
        raise FileError(
            f"{saved.folder} is a checkpoint of another model: its layers and shapes have "
            f"fingerprint {index.fingerprint}, this run's have {fingerprint}"
        )
    last = last_step(config, per_epoch)
    if index.step >= last:
        raise PlanError(
            f"there is nothing left to train: the checkpoint in {folder} is at step {index.step}, "
            f"and the run ends at step {last} ({config.epochs} epochs of {per_epoch} batches). For "
            "more, set --epochs or --limit-steps"
        )


def last_step(config: TrainConfig, per_epoch: int) -> int:
    """Return the step at which a run ends, unless it reaches its target accuracy before."""
    all_steps = config.epochs * per_epoch
    return all_steps if config.limit_steps is None else min(all_steps, config.limit_steps)


def staging_folder(folder: Path, config: TrainConfig) -> Path:
    """Return the folder for the files of a run: its own, or that of a resumed run not yet accepted.

    Raises:
        FileError: it cannot be created.
    """
    if not config.resume:
        return folder
    staging = folder / _STAGING
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
    except OSError as error:
        raise FileError(f"cannot write into the run's folder {folder}: {error.strerror}") from error
    return staging


def accept_run(folder: Path, step: int) -> None:
    """Move the new files of a resumed run to their places, and drop what its metrics have of later
    steps; called on rank 0, when all ranks have loaded the checkpoint.

    Previous versions of configuration and plan stay as `config-<step>.yaml` and `plan-<step>.json`,
    if they differ.

    Raises:
        FileError: the folder cannot be written.
    """
    staging = folder / _STAGING
    try:
        for file in sorted(staging.iterdir()) if staging.exists() else ():
            target = folder / file.name
            backup = folder / f"{file.stem}-{step:08d}{file.suffix}"
            backs_up = file.name in ("config.yaml", "plan.json") and not backup.exists()
            if backs_up and target.exists() and target.read_bytes() != file.read_bytes():
                target.replace(backup)
            file.replace(target)
        drop_later_metrics(folder, step)
    except OSError as error:
        raise FileError(f"cannot write into the run's folder {folder}: {error.strerror}") from error
    remove_staging(folder)


def drop_later_metrics(folder: Path, step: int) -> None:
    """Drop the lines of steps after `step` from a run's metrics, which are trained again.

    Raises:
        OSError: the file cannot be read or written.
    """
    path = folder / "metrics.jsonl"
    if not path.exists():
        return
    lines = []
    # A line that is no UTF-8, after a loss of power, is no JSON either.
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    for line in text.splitlines(keepends=True):
        try:
            values = json_value(line, str(path), finite=False)
        except FileError:  # the last line, which a killed process has not completed
            continue
        line_step = values.get("step") if isinstance(values, dict) else None
        if isinstance(line_step, int | float) and line_step <= step and line.endswith("\n"):
            lines.append(line)
    # A loss of power leaves the old file or the new one, never a part.
    write_file(path, "".join(lines), durable=True)


def complete_metrics(folder: Path, step: int, lines: Sequence[str]) -> None:
    """Have the metrics of a run end with a step.

    Args:
        folder: of the run.
        step: the step; lines of later ones are dropped.
        lines: those of the step. Rank 0 may have been lost before it wrote them.

    Raises:
        OSError: the file cannot be read or written.
    """
    drop_later_metrics(folder, step)
    path = folder / "metrics.jsonl"
    present = path.read_text().splitlines() if path.exists() else []
    written = sum(json_value(line, str(path), finite=False)["step"] == step for line in present)
    with path.open("a") as log:
        log.writelines(f"{line}\n" for line in lines[written:])


def remove_staging(folder: Path) -> None:
    """Remove the files of a resumed run that was not accepted."""
    shutil.rmtree(folder / _STAGING, ignore_errors=True)


def set_options(pipe: Pipeline, config: TrainConfig) -> None:
    """Set the optimizers' options to those of the configuration, after a load has restored the old
    ones.
    """
    new_options = sample_optimizer(config).param_groups[0]
    settings = {field.name for field in fields(TrainConfig)}
    changeable = {name: value for name, value in new_options.items() if name in settings}
    for optimizer in pipe._assembly.optimizers():
        for group in optimizer.param_groups:
            group.update({name: value for name, value in changeable.items() if name in group})
