"""Going on with a run: from its own configuration, with the settings that may change; its folder
changes when all is accepted.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from penstock.errors import FileError, PlanError, SettingError
from penstock.runtime.checkpoint_files import INDEX, Checkpoint, read_index
from penstock.runtime.pipeline import Pipeline
from penstock.training.config import TrainConfig, read_settings, validate_settings
from penstock.training.optimizer import an_optimizer

CHECKPOINT = "checkpoint"

#: What makes a run this run and no other: its model, its data and their order, and what its
#: optimizer keeps.
FIXED = (
    "model",
    "model_options",
    "data",
    "image",
    "channels",
    "tokens",
    "batch",
    "seed",
    "optimizer",
    "autocast",
)
#: Options that lie in the optimizer's parameter groups, and so in the checkpoint.
_OF_GROUPS = ("lr", "momentum", "weight_decay")
#: Which folder is meant, and that it is meant.
_WHERE = ("out", "resume")
#: Where the files of a resumed run lie until it is accepted, in its folder.
_STAGING = ".resume"


def resume_settings(
    path: str | Path | None, changes: Mapping[str, Any]
) -> tuple[TrainConfig, list[str]]:
    """The configuration of a run that is to go on.

    Args:
        path: the run's folder; or a YAML file, whose settings count as said by the caller.
        changes: what else the caller said, by the names of the fields. Everything else is as the
        run's own `config.yaml` says.

    Returns:
        The configuration, and a line for every setting that is not what it was, such as "lr: 0.05
        -> 0.01".

    Raises:
        FileError: the folder holds no run, or no checkpoint.
        SettingError: a setting would make another run of it, or makes no sense.
    """
    folder, explicit = _explicit(path, changes)
    own = folder / "config.yaml"
    if not own.exists():
        raise FileError(
            f"{folder} holds no run to go on with: there is no config.yaml. Name the folder of one by --out, or start a run without "
            "--resume"
        )
    checkpoint = folder / CHECKPOINT
    if not (checkpoint / INDEX).exists():
        raise FileError(
            f"{folder} holds no checkpoint to go on from: there is no {CHECKPOINT}/{INDEX}. A run writes one at the end of an epoch, "
            "unless it was told --checkpoint end or never: start it anew, in another folder"
        )
    values = read_settings(own)
    before = validate_settings({**values, "out": str(folder), "resume": True}, str(own))
    after = validate_settings(
        {**values, **explicit, "out": str(folder), "resume": True}, "the settings"
    )
    limit = before.limit_steps
    if "limit_steps" not in explicit and limit is not None and read_index(checkpoint).step >= limit:
        explicit = {**explicit, "limit_steps": None}  # it has done what it had to
        after = validate_settings(
            {**values, **explicit, "out": str(folder), "resume": True}, str(own)
        )
    differing = {
        name: (getattr(before, name), getattr(after, name))
        for name in (entry.name for entry in fields(TrainConfig))
        if name in explicit and name not in _WHERE and getattr(before, name) != getattr(after, name)
    }
    _refuse_fixed(folder, differing)
    return after, [
        f"{name}: {_word(old)} -> {_word(new)}" for name, (old, new) in differing.items()
    ]


def _explicit(path: str | Path | None, changes: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The run's folder, and all that the caller said."""
    folder = None if path is None else _run_folder(Path(path))
    explicit = dict(changes)
    if path is not None and folder is None:
        explicit = {**read_settings(path), **changes}
    out = explicit.get("out")
    if folder is not None and out is not None and Path(out).resolve() != folder.resolve():
        raise SettingError(f"which run is to go on, that in {folder} or that in --out {out}?")
    if folder is None and out is None:
        raise SettingError(
            "resume needs the folder of the run to go on with: penstock train --resume runs/NAME, or --out runs/NAME"
        )
    return folder or Path(str(out)), explicit


def _run_folder(path: Path) -> Path | None:
    """The folder that a path means: itself, or that of a run's own configuration, which says
    nothing new.
    """
    if path.name == "config.yaml" and (path.parent / CHECKPOINT).is_dir():
        return path.parent
    return path if path.is_dir() else None


def _refuse_fixed(folder: Path, differing: Mapping[str, tuple[Any, Any]]) -> None:
    wrong = [
        f"{name} is {_word(old)}, not {_word(new)}"
        for name, (old, new) in differing.items()
        if name in FIXED
    ]
    if wrong:
        raise SettingError(
            f"the run in {folder} cannot go on as another one: its {'; its '.join(wrong)}. Leave that out to go on with it, or "
            "start a new run, in another folder, without --resume"
        )


def _word(value: object) -> str:
    return "none" if value is None else str(value)


# -- the folder
# ---------------------------------------------------------------------------------------------------------------


def check_checkpoint(config: TrainConfig, fingerprint: str, per_epoch: int) -> Checkpoint:
    """Before anything is measured: the checkpoint is there and of this model, and there is
    something left to train.

    Raises:
        FileError: it is damaged, or of another model.
        PlanError: the run is over.
    """
    folder = Path(str(config.out))
    index = read_index(folder / CHECKPOINT)
    if index.fingerprint != fingerprint:
        raise FileError(
            f"{folder / CHECKPOINT} is a checkpoint of another model: its layers and shapes have fingerprint {index.fingerprint}, "
            f"this run's have {fingerprint}"
        )
    last = last_step(config, per_epoch)
    if index.step >= last:
        raise PlanError(
            f"there is nothing left to train: the checkpoint in {folder} is at step {index.step}, and the run ends at step {last} "
            f"({config.epochs} epochs of {per_epoch} batches). For more, say --epochs or --limit-steps"
        )
    return index


def last_step(config: TrainConfig, per_epoch: int) -> int:
    """The step at which a run ends, if it does not reach its target before."""
    whole = config.epochs * per_epoch
    return whole if config.limit_steps is None else min(whole, config.limit_steps)


def staging_folder(folder: Path, config: TrainConfig) -> Path:
    """Where the files of a run go: into its folder, or, while a resumed one is not accepted, beside
    what is there.
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
    """On rank 0, when all ranks have loaded the checkpoint: the new files take their places. What
    configuration and plan were until then stays as `config-<step>.yaml` and `plan-<step>.json`, if
    it was another.

    Raises:
        FileError: the folder cannot be written.
    """
    staging = folder / _STAGING
    try:
        for file in sorted(staging.iterdir()) if staging.exists() else ():
            old = folder / file.name
            earlier = folder / f"{file.stem}-{step:08d}{file.suffix}"
            keep = file.name in ("config.yaml", "plan.json") and not earlier.exists()
            if keep and old.exists() and old.read_bytes() != file.read_bytes():
                old.replace(earlier)
            file.replace(old)
    except OSError as error:
        raise FileError(f"cannot write into the run's folder {folder}: {error.strerror}") from error
    remove_staging(folder)


def remove_staging(folder: Path) -> None:
    """Remove what was not accepted."""
    shutil.rmtree(folder / _STAGING, ignore_errors=True)


def set_options(pipe: Pipeline, config: TrainConfig) -> None:
    """After a load, which brings back the options that the optimizers had: let them have those of
    the configuration.
    """
    fresh = an_optimizer(config).param_groups[0]
    for optimizer in pipe._made.optimizers():
        for group in optimizer.param_groups:
            group.update({name: fresh[name] for name in _OF_GROUPS if name in group})
