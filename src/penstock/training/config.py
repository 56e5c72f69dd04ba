"""Configuration of a training run, from a YAML file, from flags, or both."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from penstock.errors import FileError, SettingError
from penstock.measure.card_choice import DeviceRequest


@dataclass(frozen=True)
class TrainConfig:
    """A training run. Every field is a key of the YAML file and, with dashes, a flag of `penstock
    train`.

    Attributes:
        model, model_options: a model of the zoo and its options. Classes, vocabulary and shapes are
            taken from the data.
        data: "digits", "cifar100:PATH", "text", "text:PATH", "reversed" or "reversed:PATH".
        image, channels, tokens: size and channels that images are converted to; length of
            sequences.
        batch, epochs, limit_steps: samples per batch; passes over the data; steps at most.
        target_accuracy: stop after the epoch that reaches this test accuracy.
        ranks: processes to start; by default one per stage, or one per core; on CUDA one per card.
        stages, schedule, micro_batches, partition, recompute: None (recompute: "auto") leaves the
            choice to the planner; stages may be "cores", the number of this machine's cores, or on
            CUDA of its cards.
        weights, weights_options: the weight rule, and its options; by default the schedule's own.
            Without a schedule, an asynchronous rule implies the schedule that is made for it.
        asynchronous: let the planner choose among asynchronous schedules too.
        memory_limit: bytes per rank that the plan may use, such as "2 GiB".
        optimizer, lr, momentum, weight_decay: of the update.
        clip_grad_norm: maximum global gradient norm.
        autocast: mixed precision; float16 with dynamic loss scaling.
        accumulate: batches per step.
        compile: use torch.compile for every stage.
        device: device of profile, training, self-check and the baseline of plain training: "cpu",
            "cuda", or "auto", which uses the visible CUDA cards if there are any. See
            `penstock.training.devices`.
        seed: of weights, dropout and the order of the data.
        out: the run's folder; by default a new one in runs/.
        resume: continue from the last checkpoint in `out`.
        checkpoint: when to write one.
        profile, profile_repeats: a profile to use instead of measuring; or how often each layer is
            timed.
        baseline_steps: steps of plain training in one process with one thread to compare with; 0
            for none.
        deadline_s: seconds that a rank waits for another.
        self_check: compare the first batch of a new run with plain training, in micro-batches and
            undivided, and refuse to train if the results differ. It costs about four steps of plain
            training in one process, and rank 0 holds the whole model meanwhile.
    """

    model: str = "vgg11_bn"
    model_options: dict[str, Any] = field(default_factory=dict)
    data: str = "digits"
    image: int = 32
    channels: int = 3
    tokens: int = 64
    batch: int = 64
    epochs: int = 5
    limit_steps: int | None = None
    target_accuracy: float | None = None
    ranks: int | None = None
    stages: int | Literal["cores"] | None = None
    schedule: str | None = None
    micro_batches: int | None = None
    partition: str = "bottleneck"
    recompute: Literal["auto", "never", "except_last", "always", "selective"] = "auto"
    weights: str | None = None
    weights_options: dict[str, float] = field(default_factory=dict)
    asynchronous: bool = False
    memory_limit: str | None = None
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip_grad_norm: float | None = None
    autocast: Literal["bfloat16", "float16"] | None = None
    accumulate: int = 1
    compile: bool = False
    device: DeviceRequest = "auto"
    seed: int = 0
    out: str | None = None
    resume: bool = False
    checkpoint: Literal["epoch", "end", "never"] = "epoch"
    profile: str | None = None
    profile_repeats: int = 5
    baseline_steps: int = 5
    deadline_s: float = 300.0
    self_check: bool = True

    def __post_init__(self) -> None:
        for name, minimum in (
            ("batch", 1),
            ("epochs", 1),
            ("limit_steps", 1),
            ("ranks", 1),
            ("stages", 1),
            ("image", 1),
            ("channels", 1),
            ("tokens", 1),
            ("accumulate", 1),
            ("profile_repeats", 1),
            ("baseline_steps", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, int) and value < minimum:
                raise SettingError(f"{name} is {value}; it must be {minimum} or more")
        for name in ("lr", "deadline_s", "clip_grad_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SettingError(f"{name} is {value}; it must be above 0")
        if self.resume and self.out is None:
            raise SettingError("resume needs out: the folder of the run to continue")

    def stage_count(self) -> int | None:
        """Return the number of stages, or None if the planner chooses it."""
        if self.stages == "cores":
            return len(os.sched_getaffinity(0))
        partition = self.lengths()
        if self.stages is None and isinstance(partition, list):
            return len(partition)
        return self.stages

    def lengths(self) -> str | list[int]:
        """Return the partition as `plan` takes it: a method's name, or layers per stage, written
        `5,6,4`.
        """
        words = self.partition.split(",")
        if all(word.strip().isdigit() for word in words):
            return [int(word) for word in words]
        return self.partition

    def as_yaml(self) -> str:
        """Return the configuration as YAML that `load` reads back."""
        return str(yaml.safe_dump(asdict(self), sort_keys=False))


def load(path: str | Path | None, changes: dict[str, Any]) -> TrainConfig:
    """Return the configuration in a YAML file, or the defaults, with some fields changed.

    Raises:
        FileError: the file is missing, is no YAML mapping, or has an unknown key or an invalid
            value.
        SettingError: a change is invalid.
    """
    settings = {} if path is None else read_settings(path)
    source = "the settings" if path is None else str(path)
    return validate_settings({**settings, **changes}, source)


def read_settings(path: str | Path) -> dict[str, Any]:
    """Return the settings in a YAML file, by name, without defaults.

    Raises:
        FileError: the file is missing, is no YAML mapping, or has an unknown key.
    """
    settings = _load_yaml(path)
    if settings is None:  # an empty file
        settings = {}
    if not isinstance(settings, dict):
        raise FileError(
            f"{path} must be a mapping of settings, such as 'model: vgg11_bn', not a "
            f"{type(settings).__name__}"
        )
    names = [field.name for field in fields(TrainConfig)]
    unknown = [str(key) for key in settings if key not in names]
    if unknown:
        raise FileError(
            f"{path} has unknown settings: {', '.join(unknown)}. Known: {', '.join(names)}"
        )
    return settings


def _load_yaml(path: str | Path) -> Any:
    """Return the contents of a YAML file. Raises FileError if it cannot be read."""
    try:
        return yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"cannot read the configuration {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    except yaml.YAMLError as error:
        raise FileError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except (ValueError, RecursionError, OverflowError) as error:
        raise FileError(f"{path} has a value that cannot be read: {str(error)[:200]}") from error


def validate_settings(values: dict[str, Any], where: str) -> TrainConfig:
    """Return a configuration with some values, and defaults for the others.

    Args:
        values: by the names of the fields.
        where: their source, for messages.

    Raises:
        SettingError: a value is invalid.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(TrainConfig).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        # The rest of the location says which of several types was tried.
        name = str(first["loc"][0]) if first["loc"] else "a setting"
        value = f", not {first['input']!r}" if first["type"] != "value_error" else ""
        raise SettingError(
            f"{where}: {name}: {first['msg'].removeprefix('Value error, ')}{value}"
        ) from error
