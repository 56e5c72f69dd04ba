"""What a training run is asked to do: from a YAML file, from flags, or both."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from penstock.errors import FileError, SettingError
from penstock.measure.cards import DeviceRequest


@dataclass(frozen=True)
class TrainConfig:
    """A training run. Every field is a key of the YAML file and, with dashes, a flag of `penstock
    train`.

    Attributes:
        model, model_options: a model of the zoo and its options. Classes, vocabulary and shapes
        follow the data. data: "digits", "cifar100:PATH", "text", "text:PATH", "reversed" or
        "reversed:PATH". image, channels, tokens: the form that the data is brought into. batch,
        epochs, limit_steps: samples in a batch; times through the data; or fewer steps.
        target_accuracy: stop after the epoch that reaches this test accuracy. ranks: processes to
        start; by default as many as there are stages, or one per core; on CUDA one per card.
        stages, schedule, micro_batches, partition, recompute: leave any to the planner with None
        (recompute: "auto");
            stages may be "cores", as many as this machine has; on CUDA as many as it has cards.
        weights, weights_options: the weight rule, and numbers that it takes; by default the
        schedule's own. Where no schedule is
            named, an asynchronous rule brings the one that is made for it.
        asynchronous: let the planner choose among asynchronous schedules too.
        memory_limit: bytes per rank that the plan may use, such as "2 GiB".
        optimizer, lr, momentum, weight_decay: of the update.
        clip_grad_norm: how long the gradients of all stages may be together.
        autocast: mixed precision; float16 with dynamic loss scaling.
        accumulate: batches for each step.
        compile: torch.compile for every stage.
        device: what profile, plan, training, self-check and the plain training compared with run
        on: "cpu", "cuda", or "auto", which
            takes the visible CUDA cards if there are any. See `penstock.training.devices`.
        seed: of weights, dropout and the order of the data.
        out: the run's folder; by default a new one in runs/.
        resume: go on from the last checkpoint in `out`.
        checkpoint: when to write one.
        profile, profile_repeats: a profile to use instead of measuring; or how often each layer is
        timed. baseline_steps: steps of plain training in one process with one thread to compare
        with; 0 for none. deadline_s: seconds that a rank waits for another. self_check: hold the
        first batch of a new run against plain training, in micro-batches and undivided, and refuse
        to train
            where they differ. Costs about four steps of plain training in one process, and rank 0
            holds the whole model meanwhile.
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
        for name, least in (
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
            number = getattr(self, name)
            if isinstance(number, int) and number < least:
                raise SettingError(f"{name} is {number}; it must be {least} or more")
        for name in ("lr", "deadline_s", "clip_grad_norm"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise SettingError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.resume and self.out is None:
            raise SettingError("resume needs out: the folder of the run to go on with")

    def stage_count(self) -> int | None:
        """Number of stages, or None where it is the planner's choice."""
        cut = self.lengths()
        if self.stages == "cores":
            return len(os.sched_getaffinity(0))
        return len(cut) if self.stages is None and isinstance(cut, list) else self.stages

    def lengths(self) -> str | list[int]:
        """The cut as `plan` takes it: a method's name, or layers per stage written `5,6,4`."""
        words = self.partition.split(",")
        if all(word.strip().isdigit() for word in words):
            return [int(word) for word in words]
        return self.partition

    def as_yaml(self) -> str:
        """The file that `load` reads back."""
        return str(yaml.safe_dump(asdict(self), sort_keys=False))


def load(path: str | Path | None, changes: dict[str, Any]) -> TrainConfig:
    """The configuration in a YAML file, or the defaults, with some fields changed.

    Raises:
        FileError: the file is missing, is no YAML mapping, or has a key or value that a run does
        not know. SettingError: a change makes no sense.
    """
    found = {} if path is None else read_settings(path)
    return validate_settings(
        {**found, **changes}, str(path) if path is not None else "the settings"
    )


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file, by name, as they are written there.

    Raises:
        FileError: the file is missing, is no YAML mapping, or has a key that a run does not know.
    """
    try:
        found: Any = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"cannot read the configuration {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    except yaml.YAMLError as error:
        raise FileError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except (ValueError, RecursionError, OverflowError) as error:
        raise FileError(f"{path} has a value that cannot be read: {str(error)[:200]}") from error
    if found is None:
        found = {}
    if not isinstance(found, dict):
        raise FileError(
            f"{path} must be a mapping of settings, such as 'model: vgg11_bn', not a {type(found).__name__}"
        )
    known = [each.name for each in fields(TrainConfig)]
    strange = [str(key) for key in found if key not in known]
    if strange:
        raise FileError(
            f"{path} has unknown settings: {', '.join(strange)}. Known: {', '.join(known)}"
        )
    return found


def validate_settings(values: dict[str, Any], where: str) -> TrainConfig:
    """Settings by name as a configuration.

    Args:
        values: of some fields; the others have their defaults.
        where: where they are from, for messages.

    Raises:
        SettingError: a value makes no sense.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(TrainConfig).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = (
            str(first["loc"][0]) if first["loc"] else "a setting"
        )  # what follows says which type of several was tried
        given = f", not {first['input']!r}" if first["type"] != "value_error" else ""
        raise SettingError(
            f"{where}: {name}: {first['msg'].removeprefix('Value error, ')}{given}"
        ) from error
