"""Configuration of a training run, from a YAML file, from flags, or both."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from penstock.checkpoint.interval import Interval, parse_interval
from penstock.cluster.device import DeviceRequest
from penstock.cluster.local import available_cores
from penstock.errors import FileError, SettingError
from penstock.files.read import read_yaml
from penstock.files.text import quote, shorten
from penstock.files.yaml_values import yaml_text
from penstock.option import MAX_DEADLINE_S, CommonOptions, check_limits, check_zero, option

#: The largest number of float32. torch multiplies weights by rates in their own type: a larger rate
#: raises in the first update of a rank, in words that name no option.
_MAX_RATE = 3.4028234663852886e38


@dataclass(frozen=True, kw_only=True)
class TrainConfig(CommonOptions):
    """A training run. Every field is a key of the YAML file and, with dashes, a flag of `penstock
    train`; fields that are not in the file and None leave the choice to the planner.
    """

    model: str = option(
        "vgg11_bn",
        "A model of the zoo (see `penstock list models`); package.module:factory, which is imported "
        "and called; or hf:config.json.",
        fixed=True,
    )
    model_options: dict[str, Any] = option(
        {}, "Option of the model, such as layers=6; repeatable.", fixed=True
    )
    data: str = option(
        "digits",
        "Data set: digits, cifar100:PATH, text[:PATH], reversed[:PATH] or package.module:factory.",
        fixed=True,
    )
    data_options: dict[str, Any] = option(
        {}, "Option of the data set, such as size=100; repeatable.", fixed=True
    )
    loss: str | None = option(
        None,
        "A loss of torch.nn.functional, or package.module:function; default: cross entropy for "
        "classes and tokens, mse_loss for numbers.",
        fixed=True,
    )
    image: int = option(32, "Side length of an image in pixels.", minimum=1, fixed=True)
    channels: int = option(3, "Channels of an image.", minimum=1, fixed=True)
    tokens: int = option(64, "Sequence length in tokens.", minimum=1, fixed=True)
    batch: int = option(64, "Samples per batch.", minimum=1, fixed=True)
    epochs: int = option(5, "Passes through the data.", minimum=1)
    limit_steps: int | None = option(None, "Stop after this many steps.", minimum=1)
    target_accuracy: float | None = option(
        None,
        "Stop after the epoch that reaches this test accuracy, from 0 to 1.",
        minimum=0,
        maximum=1,
    )
    ranks: int | None = option(
        None, "Number of processes; default: one per stage, or per core or card.", minimum=1
    )
    stages: int | Literal["cores"] | None = option(
        None, "Number of stages, or cores; default: the planner chooses.", minimum=1
    )
    schedule: str | None = option(
        None, "Name of a schedule, see `penstock schedules`; default: the planner chooses."
    )
    micro_batches: int | None = option(
        None, "Number of micro-batches per batch; default: the planner chooses.", minimum=1
    )
    partition: str = option(
        "bottleneck", "Partition method, type:REGEX, or the layers per stage: 5,6,4."
    )
    recompute: Literal["auto", "never", "except_last", "always", "selective"] = option(
        "auto", "Recompute policy: auto, never, except_last, always or selective."
    )
    weights: str | None = option(
        None, "Weight rule, such as stash or none; default: the schedule's own rule."
    )
    weights_options: dict[str, float] = option(
        {}, "Numeric option of the weight rule, such as decay=0.2; repeatable."
    )
    asynchronous: bool = option(False, "Let the planner choose schedules without a flush as well.")
    memory_limit: str | None = option(None, "Memory limit per rank, such as '2 GiB'.")
    optimizer: Literal["sgd", "adam", "adamw"] = option("sgd", "sgd, adam or adamw.", fixed=True)
    lr: float = option(0.05, "Learning rate.", above=0, maximum=_MAX_RATE)
    momentum: float = option(0.9, "Momentum of sgd.", minimum=0)
    weight_decay: float = option(0.0, "Weight decay.", minimum=0, maximum=_MAX_RATE)
    device: DeviceRequest = option(
        "auto", "auto, cpu or cuda. auto: CUDA if a GPU is visible, else the CPU."
    )
    seed: int = option(0, "Seed of weights, dropout and the order of the data.", fixed=True)
    out: str | None = option(None, "Folder of the run; default: a new one in runs/.")
    initial_weights: str | None = option(
        None,
        "Weights to start from: a checkpoint, safetensors, a folder of Hugging Face, or a "
        "state_dict of torch.save; default: random ones of --seed.",
    )
    resume: bool = option(
        False,
        "Resume the run in --out from its checkpoint, with its settings and the flags set here.",
    )
    checkpoint: Literal["epoch", "end", "never"] = option(
        "epoch",
        "When to write a checkpoint: epoch or end, besides --checkpoint-every and signals; or "
        "never.",
    )
    checkpoint_every: int | str | None = option(
        None, "Interval of further checkpoints: a number of steps, or a time such as 10min."
    )
    keep: int = option(
        3, "Number of newest checkpoints that stay; the best one stays too.", minimum=1
    )
    max_restarts: int = option(
        0,
        "Restart the ranks up to this many times after a failure, from the newest whole "
        "checkpoint, or from the copies of stages that other ranks have in memory.",
        minimum=0,
    )
    min_ranks: int | None = option(
        None,
        "With --max-restarts: if the process of a rank is killed, plan anew and go on without it, "
        "with this many ranks at least; default: replace it.",
        minimum=1,
    )
    plan: str | None = option(
        None, "Plan to run exactly as it is, from `penstock plan --out`, instead of planning."
    )
    callbacks: str | None = option(
        None,
        "package.module:attribute with methods on_step, on_evaluation or on_checkpoint, which "
        "rank 0 calls.",
    )
    wandb: str | None = option(
        None, "Project of Weights & Biases that gets every figure of the run; needs wandb."
    )
    profile: str | None = option(None, "Profile to use instead of measuring the model.")
    profile_repeats: int = option(5, "Timed runs of each layer.", minimum=1)
    baseline_steps: int = option(
        5, "Steps of plain training to time for comparison; 0: none.", minimum=0
    )
    deadline_s: float = option(
        300.0,
        "Longest time in seconds that a rank waits for another.",
        above=0,
        maximum=MAX_DEADLINE_S,
    )
    self_check: bool = option(
        True,
        "Compare the first batch of a new run with plain training, in micro-batches and undivided, "
        "and refuse to train if they differ; on by default. Takes about four steps of plain "
        "training in one process, and rank 0 holds the whole model meanwhile.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
        check_zero(self.zero)
        self._check_finite()
        if self.micro_batches is not None and self.micro_batches > self.batch:
            raise SettingError(
                f"a batch of {self.batch} cannot be cut into {self.micro_batches} micro-batches"
            )
        interval = parse_interval(self.checkpoint_every)
        if not self.writes_checkpoints and interval != Interval():
            raise SettingError("checkpoint is never, and checkpoint_every asks for checkpoints")
        if self.resume and self.out is None:
            raise SettingError("resume needs out: the folder of the run to continue")

    @property
    def writes_checkpoints(self) -> bool:
        """Whether the run writes checkpoints at all."""
        return self.checkpoint != "never"

    def _check_finite(self) -> None:
        """Refuse infinite numbers: the run's config.yaml could not be read again.

        Raises:
            SettingError: a number is infinite.
        """
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise SettingError(f"{entry.name} is {value}; it must be finite")

    def stage_count(self) -> int | None:
        """Return the number of stages, or None if the planner chooses it."""
        if self.stages == "cores":
            return available_cores()
        partition = self.lengths()
        if self.stages is None and isinstance(partition, list):
            return len(partition)
        return self.stages

    def lengths(self) -> str | list[int]:
        """Return the partition as `plan` takes it: a method's name, or layers per stage, written
        `5,6,4`.
        """
        words = self.partition.split(",")
        if all(word.strip().isdecimal() for word in words):
            return [int(word) for word in words]
        return self.partition

    def as_yaml(self) -> str:
        """Return the configuration as YAML that `load_settings` reads back."""
        return yaml_text(asdict(self))


def read_settings(path: str | Path) -> dict[str, Any]:
    """Return the settings in a YAML file, by name, without defaults.

    Raises:
        FileError: the file is missing, is no YAML mapping, or has an unknown or a duplicate key.
    """
    settings = read_yaml(path, object, kind="configuration")
    if not isinstance(settings, dict):
        raise FileError(
            f"{path} must be a mapping of settings, such as 'model: vgg11_bn', not a "
            f"{type(settings).__name__}"
        )
    names = [field.name for field in fields(TrainConfig)]
    unknown = [shorten(str(key)) for key in settings if key not in names]
    if unknown:
        raise FileError(
            f"{path} has unknown settings: {shorten(', '.join(unknown))}. Known: {', '.join(names)}"
        )
    return settings


def validate_settings(values: dict[str, Any], where: str) -> TrainConfig:
    """Return a configuration with some values, and defaults for the others.

    Args:
        values: by the names of the fields.
        where: their source, for messages.

    Raises:
        SettingError: a value is out of range or of another type than its field.
    """
    from pydantic import TypeAdapter, ValidationError

    types = get_type_hints(TrainConfig)
    for name, value in values.items():
        try:
            TypeAdapter(types[name]).validate_python(value, strict=True)
        except ValidationError as error:
            # A union has an error for each of its types.
            reasons = " or ".join(reason["msg"] for reason in error.errors())
            raise SettingError(f"{where}: {name}: {reasons}, not {quote(value)}") from error
    try:
        return TrainConfig(**values)
    except SettingError as error:
        raise SettingError(f"{where}: {error}") from error
