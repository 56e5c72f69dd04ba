"""What asynchronous pipelines are tried with: models, optimizers, batches, and one run of each case
by pipeline and by reference.

Loaded by name in the ranks of `ps.launch`, too: nothing heavy here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tests.conformance.asynchronous import simulate
from tests.runtime.jobs import Plain
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.zoo.catalogue import model as zoo_model
from penstock.zoo.gpt import gpt_loss

SAMPLES = 8


def mlp() -> nn.Sequential:
    """Nested, with tanh and layer norm: 9 layers."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8)),
        nn.Linear(8, 7),
        nn.Tanh(),
        nn.Linear(7, 8, bias=False),
        nn.Sequential(nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4)),
    )


def conv() -> nn.Sequential:
    """Batch norm in training mode, and ReLUs in place: 9 layers."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 5, 3, stride=2, bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(20, 4),
    )


def gpt() -> nn.Sequential:
    """Two blocks: 5 layers."""
    return zoo_model("gpt", layers=2, width=8, heads=2, tokens=5, vocabulary=7)


def frozen() -> nn.Sequential:
    """The MLP with a frozen first map and a frozen bias in the middle."""
    model = mlp()
    model[0][0].requires_grad_(requires_grad=False)
    model[1].bias.requires_grad_(requires_grad=False)
    return model


def vectors(samples: int) -> tuple[Tensor, Tensor]:
    """6 numbers, 4 classes that a linear map of them tells apart."""
    x = torch.randn(samples, 6)
    return x, x[:, :4].argmax(1)


def images(samples: int) -> tuple[Tensor, Tensor]:
    """6 x 6 pixels of 2 channels, 4 classes."""
    x = torch.randn(samples, 2, 6, 6)
    return x, x[:, 0, :2, :2].flatten(1).argmax(1)


def text(samples: int) -> tuple[Tensor, Tensor]:
    """Each token is the one before plus a step of its sequence."""
    tokens = (
        torch.randint(0, 7, (samples, 1)) + torch.randint(1, 3, (samples, 1)) * torch.arange(6)
    ) % 7
    return tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True)
class Learning:
    """A model, its data and its loss, and its cuts by number of stages."""

    make: Callable[[], nn.Sequential]
    data: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Any, Any], Tensor]
    cuts: dict[int, list[int]]


CUTS = {
    1: [9],
    2: [3, 6],
    3: [4, 2, 3],
    4: [2, 3, 1, 3],
    6: [1, 2, 1, 2, 1, 2],
    8: [1, 1, 1, 1, 1, 1, 1, 2],
}
LEARNING = {
    "mlp": Learning(mlp, vectors, functional.cross_entropy, CUTS),
    "frozen": Learning(frozen, vectors, functional.cross_entropy, CUTS),
    "conv": Learning(conv, images, functional.cross_entropy, CUTS),
    "gpt": Learning(gpt, text, gpt_loss, {1: [5], 2: [2, 3], 3: [1, 3, 1], 4: [1, 2, 1, 1]}),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(
        parameters, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1
    ),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.005),
    "adamw, two groups": lambda parameters: torch.optim.AdamW(
        [
            {"params": [w for w in parameters if w.dim() > 1], "betas": (0.8, 0.9)},
            {"params": [w for w in parameters if w.dim() < 2], "lr": 0.02, "eps": 1e-4},
        ],
        lr=0.01,
    ),
    "momentum, plain": Plain,
}


@dataclass(frozen=True, eq=False)
class Case:
    """One rule with all that it is run with. `ranks` in one pipeline; `schedule` is made with
    `making`; `options` are the rule's.

    `reference` is what the reference takes besides, where it has other words.
    """

    rule: str
    ranks: int
    m: int
    optimizer: str
    model: str = "mlp"
    schedule: str = "pipedream"
    making: dict[str, Any] = field(default_factory=dict)
    options: dict[str, float] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)
    recompute: str = "never"
    dtype: torch.dtype = torch.float64
    updates: int = 16

    def __str__(self) -> str:
        options_text = "".join(
            f"-{key}{value}" for key, value in (self.making | self.options).items()
        )
        rest = f"{'' if self.recompute == 'never' else '-recomputed'}{'' if self.dtype == torch.float64 else '-float32'}"
        return f"{self.rule}-{self.schedule}-S{self.ranks}-m{self.m}-{self.optimizer}-{self.model}{options_text}{rest}"

    @property
    def stages(self) -> int:
        """How many stages the ranks of one pipeline hold."""
        return self.ranks * (2 if self.rule == "wpipe" else 1)

    @property
    def lengths(self) -> list[int]:
        """Layers of each stage."""
        return LEARNING[self.model].cuts[self.stages]

    def build_model(self) -> nn.Sequential:
        """The model, always with the same weights; torch's own random state is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return LEARNING[self.model].make().to(self.dtype)

    def batches(self, sizes: Sequence[int] | None = None) -> list[tuple[Tensor, Tensor]]:
        """Always the same; `sizes`: samples of each."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            batches = [
                LEARNING[self.model].data(size) for size in sizes or [SAMPLES] * self.updates
            ]
        return [(x.to(self.dtype) if x.is_floating_point() else x, y) for x, y in batches]

    def pipeline(self, executor: str | None = "threads", **options: Any) -> ps.Pipeline:
        """What is tested."""
        schedule = ps.schedule(self.schedule, self.stages, self.m, **self.making)
        return ps.Pipeline(
            self.build_model(),
            loss=LEARNING[self.model].loss,
            balance=self.lengths,
            schedule=schedule,
            weights=self.rule,
            weights_options=self.options,
            optimizer=OPTIMIZERS[self.optimizer],
            executor=executor,
            **{"recompute": self.recompute, "deadline_s": 20, **options},
        )

    def run(self, executor: str | None = "threads") -> tuple[list[Tensor], dict[str, Tensor]]:
        """Losses of all batches, and the state in the end (on rank 0), by the pipeline."""
        pipe = self.pipeline(executor)
        try:
            return list(pipe.train(self.batches())), pipe.state_dict()
        finally:
            pipe.close()

    def expected(
        self, batches: Sequence[tuple[Tensor, Tensor]] | None = None, drains: Sequence[int] = ()
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The same by the rule's reference."""
        options = {
            "recompute": self.recompute != "never",
            **self.options,
            **self.reference,
            "drains": drains,
        }
        return self._simulated(self.rule, batches or self.batches(), options)

    def synchronous(self, updates: int | None = None) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The same, or its beginning, with a flush after every batch."""
        return self._simulated("flush", self.batches()[:updates], {})

    def _simulated(
        self, rule: str, batches: Any, options: dict[str, Any]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        return simulate(
            rule,
            self.build_model(),
            self.lengths,
            OPTIMIZERS[self.optimizer],
            LEARNING[self.model].loss,
            batches,
            self.m,
            **options,
        )


def assert_same(actual: Any, expected: Any, case: Case) -> None:
    """Every loss and every number of the state, buffers of batch norm included, to float tolerance."""
    # The gradient of an attention's key bias is rounding alone, and Adam divides it by its own size:
    # 1.1e-11 was seen where two sums had another order (Intel Xeon, torch 2.13).
    divides_rounding = case.model == "gpt" and case.optimizer.startswith("adam")
    tolerance = (
        {"rtol": 1e-9, "atol": 1e-10 if divides_rounding else 1e-11}
        if case.dtype == torch.float64
        else {"rtol": 2e-4, "atol": 2e-5}
    )
    (losses, state), (expected_losses, expected_state) = actual, expected
    losses, expected_losses = (
        torch.stack(list(values)).double() for values in (losses, expected_losses)
    )
    # The pipeline hands losses out in single precision.
    torch.testing.assert_close(
        losses,
        expected_losses,
        rtol=max(tolerance["rtol"], 2e-7),
        atol=0,
        msg=lambda m: f"losses of {case}: {m}",
    )
    assert set(state) == set(expected_state)
    for name, tensor in expected_state.items():
        torch.testing.assert_close(
            state[name], tensor, **tolerance, msg=lambda m, n=name: f"{n} of {case}: {m}"
        )


def run_all(cases: Sequence[Case]) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """In a rank: every case in turn."""
    results = []
    for case in cases:
        try:
            results.append(case.run(None))
        except Exception as error:
            error.add_note(f"in {case}")
            raise
    return results


def save_half_way(cases: Sequence[Case], folders: Sequence[Path]) -> list[tuple[Any, ...]]:
    """In a rank: every case, saved when five losses are there: at which batch, losses and state in
    the end; and then the later losses and the state once more, by a pipeline that has loaded in
    mid-stream what was saved.
    """
    results = []
    for case, folder in zip(cases, folders, strict=True):
        pipe, losses, fed = case.pipeline(None), [], 0
        for loss in pipe.train(case.batches()):
            losses.append(loss)
            if len(losses) == 5:
                pipe.save(folder)
                fed = pipe.step
        state = pipe.state_dict()
        list(islice(pipe.train(iter(case.batches())), 3))
        pipe.load(folder)
        results.append(
            (
                fed,
                torch.stack(losses),
                state,
                list(pipe.train(case.batches()[fed:])),
                pipe.state_dict(),
            )
        )
        pipe.close()
    return results
