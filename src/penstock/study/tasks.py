"""What a convergence study trains: models, data and learning rates that a laptop gets through in
seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from penstock.errors import UnknownName
from penstock.training.config import TrainConfig


@dataclass(frozen=True)
class Metric:
    """What runs are judged by, on the test part.

    Attributes:
        name: in words.
        unit: of a difference.
        higher: whether more is better.
        scale: the metric is written this many times as large: 100 for shares in percent.
        digits: behind the point.
        sign: behind a value, such as " %".
    """

    name: str
    unit: str
    higher: bool
    scale: float
    digits: int
    sign: str

    def text(self, value: float) -> str:
        """A value in words: `96.9 %`."""
        return f"{value * self.scale:.{self.digits}f}{self.sign}"

    def gain(self, before: float, after: float) -> float:
        """How much better `after` is; below 0 it is worse."""
        return after - before if self.higher else before - after

    def difference(self, before: float, after: float) -> str:
        """What has been added, with its sign: `-3.2 points`."""
        return f"{(after - before) * self.scale:+.{self.digits}f} {self.unit}".replace(
            "-", "\N{MINUS SIGN}"
        )


ACCURACY = Metric("test accuracy", "points", higher=True, scale=100.0, digits=1, sign=" %")
LOSS = Metric("test loss", "nats", higher=False, scale=1.0, digits=3, sign="")


@dataclass(frozen=True)
class StudyTask:
    """One model on one data set.

    Attributes:
        name: as it is asked for.
        settings: the run; its optimizer, learning rate and seed are the case's.
        epochs: times through the data, unless the question says otherwise; need not be whole.
        lr: per optimizer, the learning rate at which flush trains well: all rules get the same.
        metric: what runs are judged by.
    """

    name: str
    settings: TrainConfig
    epochs: float
    lr: Mapping[str, float]
    metric: Metric = field(default=ACCURACY)

    def config(self, optimizer: str, lr: float, seed: int) -> TrainConfig:
        """The run of one case."""
        return replace(self.settings, optimizer=optimizer, lr=lr, seed=seed)  # type: ignore[arg-type]  # a Literal


#: Learning rates: those with the best mean on the test part over three seeds of plain training, of
#: 0.01, 0.02, 0.04, 0.08 (digits,
#: sgd), 0.0005, 0.001, 0.002, 0.004 (digits, adam), 0.01, 0.03, 0.1 (gpt, sgd) and 0.001, 0.002,
#: 0.004 (gpt, adam). Dropout is 0: its
#: masks would differ with the number of micro-batches. VGG-11 without batch norm trains nearly as
#: well under flush, but hardly at all
#: under any rule with gradients 3 updates old, so that rules could not be told apart.
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
    """The task called `name`.

    Raises:
        UnknownName: there is none.
    """
    if name not in TASKS:
        raise UnknownName("study task", name, TASKS)
    return TASKS[name]
