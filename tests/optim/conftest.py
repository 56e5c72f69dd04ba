"""A single stage in a stream: its ops in order, the versions they read, and two ways to run them.

`play` runs a module under a StageWeights, as a rank does. `literal` is an independent reference:
slow, with a new module for every micro-batch, explicit weights everywhere, and optimizers written
out as in their papers. Both return losses and the newest weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.optim.catalogue import stage_weights
from penstock.optim.stage_weights import Site
from penstock.optim.update import Update
from penstock.weights.catalogue import WeightRule
from penstock.weights.rule_types import Reads
from penstock.weights.weight_uses import Use


def ops_of(stage: int, stages: int, micro_batches: int, batches: int) -> list[tuple[str, int]]:
    """One stage's ops in 1F1B without a flush."""
    total, ahead = micro_batches * batches, stages - stage
    ops = [("F", n) for n in range(min(ahead, total))]
    for n in range(total):
        ops.append(("B", n))
        if (n + 1) % micro_batches == 0:
            ops.append(("U", (n + 1) // micro_batches))
        if ahead + n < total:
            ops.append(("F", ahead + n))
    return ops


def updates_before(ops, kind: str) -> dict[int, int]:
    """Return the number of updates before each op of a kind."""
    counts, updates = {}, 0
    for which, number in ops:
        updates += which == "U"
        if which == kind:
            counts[number] = updates
    return counts


@dataclass
class Line:
    """Position of a stage in its pipeline, and the rule.

    `read` returns what F and B of a micro-batch read, given the position.
    """

    stage: int
    stages: int
    micro_batches: int
    batches: int
    read: Callable[[SimpleNamespace], Reads]
    pipelines: int = 1
    ops: list[tuple[str, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.ops = ops_of(self.stage, self.stages, self.micro_batches, self.batches)
        # Long enough that micro-batches after the last have places, too.
        far = self.batches + self.stages + 2
        ops = ops_of(self.stage, self.stages, self.micro_batches, far)
        first = updates_before(ops_of(0, self.stages, self.micro_batches, far), "F")
        forward, backward = updates_before(ops, "F"), updates_before(ops, "B")
        m, n_copies = self.micro_batches, self.pipelines

        def updates_of_copy(batch: int, updates: int) -> int:
            """Return how many of the first updates were those of the batch's copy of the weights."""
            return len([b for b in range(updates) if b % n_copies == batch % n_copies])

        self._reads = []
        for n in range(m * far):
            b = n // m
            self._reads.append(
                self.read(
                    SimpleNamespace(
                        stage=self.stage,
                        stages=self.stages,
                        batch=b,
                        micro_batch=n % m,
                        micro_batches=m,
                        at_forward=updates_of_copy(b, forward[n]),
                        at_backward=updates_of_copy(b, backward[n]),
                        at_first_stage=updates_of_copy(b, first[n]),
                        batch_at_forward=updates_of_copy(b, forward[b * m]),
                        batch_at_backward=updates_of_copy(b, backward[b * m]),
                    )
                )
            )

    def use(self, number: int) -> Use:
        """Return the same as `uses(schedule, rule).at`."""
        m, batch = self.micro_batches, number // self.micro_batches
        after = number + 1 if (number + 1) % m else (batch + self.pipelines) * m
        if after >= len(self._reads):
            after = number
        return Use(
            batch,
            number % m,
            self._reads[number],
            self._reads[after].forward,
            number % m == 0,
            number % m == m - 1,
        )


RULES = {
    "none": lambda at: Reads(at.at_forward, at.at_backward),
    "stash": lambda at: Reads(at.at_forward, at.at_forward),
    "vertical-sync": lambda at: Reads(at.at_first_stage, at.at_first_stage),
    "double-buffer": lambda at: Reads(max(at.batch - 1, 0), max(at.batch - 1, 0)),
    "avgpipe": lambda at: Reads(at.at_forward, at.at_backward),
    "pipemare": lambda at: Reads(at.at_forward, at.at_backward),
    "hetpipe": lambda at: Reads(at.at_forward, at.at_forward),
    "spectrain": lambda at: Reads(
        at.at_forward, at.at_backward, at.stage // 2 + at.stages - at.stage - 1, at.stage // 2
    ),
    "xpipe": lambda at: Reads(
        at.batch_at_forward,
        at.batch_at_backward,
        round((at.stages + at.micro_batches - at.stage / 2 - 2) / at.micro_batches),
        round((at.micro_batches + at.stage // 2 - 1) / at.micro_batches),
    ),
    "pipeoptim": lambda at: Reads(
        at.at_forward,
        at.at_backward,
        max(0, math.ceil((at.stages - 1 - at.stage - at.micro_batch) / at.micro_batches)),
        0,
    ),
}
ARITHMETIC = {
    "none": "newest",
    "pipemare": "corrected",
    "avgpipe": "averaged",
    "hetpipe": "waves",
    **dict.fromkeys(("spectrain", "xpipe", "pipeoptim"), "predicted"),
}
EXTRA = {
    "spectrain": 1.0,
    "pipeoptim": 1.0,
    "xpipe": 3.0,
    "pipemare": 2.0,
    "avgpipe": 2.0,
    "hetpipe": 1.0,
}
OPTIMIZERS = {
    "spectrain": ("SGD",),
    "xpipe": ("Adam", "AdamW"),
    "pipeoptim": ("SGD", "Adam", "AdamW", "RMSprop"),
}
DEFAULTS = {"pipemare": {"decay": 0.135, "annealing": 100.0, "lockstep": 0.0}}


def rule_called(name: str, **facts) -> WeightRule:
    """Return a rule as the weights room defines it, written out: these tests do not use that room."""
    facts = {
        "arithmetic": ARITHMETIC.get(name, "versions"),
        "optimizers": OPTIMIZERS.get(name, ()),
        "extra": EXTRA.get(name, 0.0),
        "options": DEFAULTS.get(name, {}),
        "because": "its paper has no other",
        **facts,
    }
    return WeightRule(
        name,
        reads=lambda place: Reads(place.at_forward, place.at_backward),
        synchronous=False,
        source="a paper",
        **facts,
    )


def site_of(module: nn.Module, line: Line, name: str, factory, **facts) -> Site:
    """Return the argument of stage_weights."""
    rule = facts.pop("rule", None) or rule_called(name)
    options = {**rule.options, **facts.pop("options", {})}
    update = Update.make(list(dict.fromkeys(module.parameters())), factory)
    return Site(
        update,
        line.use,
        rule,
        options,
        stage=line.stage,
        pipelines=line.pipelines,
        stages=line.stages,
        **facts,
    )


def line_of(
    name: str, stage: int, stages: int, micro_batches: int, batches: int, pipelines: int = 1
) -> Line:
    """Return a stage under one of the rules above."""
    return Line(stage, stages, micro_batches, batches, RULES[name], pipelines)


def values_of(module: nn.Module) -> list[torch.Tensor]:
    """Return copies of the weights."""
    return [parameter.detach().clone() for parameter in module.parameters()]


def grads_of(module: nn.Module) -> list[torch.Tensor | None]:
    """Return copies of the gradients."""
    return [
        None if parameter.grad is None else parameter.grad.clone()
        for parameter in module.parameters()
    ]


def play(
    module: nn.Module, weights, ops, data, loss, on_backward=None, graphs=None
) -> list[torch.Tensor]:
    """Run ops as a rank does.

    `data(n)` are input and target; `on_backward(n, grads)` receives the gradients that each
    backward adds.
    """
    graphs, losses = {} if graphs is None else graphs, []
    for kind, number in ops:
        if kind == "F":
            weights.before_forward(number)
            inputs, targets = data(number)
            graphs[number] = loss(module(inputs), targets)
            losses.append(graphs[number].detach())
        elif kind == "B":
            weights.before_backward(number)
            if on_backward is not None:
                before = grads_of(module)
                for parameter in module.parameters():
                    parameter.grad = None
            graphs.pop(number).backward()
            weights.finished(number)
            if on_backward is not None:
                gradients = grads_of(module)
                on_backward(number, gradients)
                for parameter, new, old in zip(module.parameters(), gradients, before, strict=True):
                    parameter.grad = old if new is None else new if old is None else old + new
        else:
            weights.update(number)
            assert all(
                parameter.grad is None
                for parameter in module.parameters()
                if parameter.requires_grad
            )
    return losses


def gradient(module: nn.Module, forward, backward, inputs, targets, loss):
    """Return loss and gradients of a copy of the module.

    Its weights change in place between its forward and its backward.
    """
    alone = copy.deepcopy(module)
    for parameter, value in zip(alone.parameters(), forward, strict=True):
        parameter.data = value.clone()
        parameter.grad = None
    loss_value = loss(alone(inputs), targets)
    for parameter, value in zip(alone.parameters(), backward, strict=True):
        parameter.data.copy_(value)
    loss_value.backward()
    return loss_value.detach(), [parameter.grad for parameter in alone.parameters()]


class Sgd:
    """w ← w - lr v, v ← μ v + g, g with weight decay."""

    def __init__(self, lr, momentum=0.0, weight_decay=0.0):
        self.lr, self.momentum, self.weight_decay, self.v, self.g = (
            lr,
            momentum,
            weight_decay,
            None,
            None,
        )

    def step(self, weights, grads, scale=1.0):
        self.g = [g + self.weight_decay * w for w, g in zip(weights, grads, strict=True)]
        if self.momentum:
            self.v = (
                self.g
                if self.v is None
                else [self.momentum * v + g for v, g in zip(self.v, self.g, strict=True)]
            )
        return [w - self.lr * scale * v for w, v in zip(weights, self.v or self.g, strict=True)]

    def ahead(self, weights, updates):
        """W - lr s ΔW, ΔW = v or g."""
        way = self.v if self.momentum else self.g
        return (
            weights
            if way is None
            else [w - self.lr * updates * v for w, v in zip(weights, way, strict=True)]
        )


class Adam:
    """m ← β₁ m + (1-β₁) g, v ← β₂ v + (1-β₂) g², w ← w - lr m̂ / (√v̂ + ε); decoupled decay first:
    w ← (1 - lr λ) w.
    """

    def __init__(self, lr, betas=(0.9, 0.999), eps=1e-8, decoupled=0.0):
        self.lr, self.betas, self.eps, self.decoupled, self.t = lr, betas, eps, decoupled, 0
        self.m = self.v = None

    def step(self, weights, grads, scale=1.0):
        b1, b2 = self.betas
        self.t += 1
        self.m = [
            (1 - b1) * g if self.t == 1 else b1 * m + (1 - b1) * g
            for m, g in zip(self.m or grads, grads, strict=True)
        ]
        self.v = [
            (1 - b2) * g**2 if self.t == 1 else b2 * v + (1 - b2) * g**2
            for v, g in zip(self.v or grads, grads, strict=True)
        ]
        way = self._ratio(1 - b1**self.t, 1 - b2**self.t)
        lr = self.lr * scale
        return [w * (1 - lr * self.decoupled) - lr * d for w, d in zip(weights, way, strict=True)]

    def _ratio(self, c1, c2):
        return [
            (m / c1) / ((v / c2).sqrt() + self.eps) for m, v in zip(self.m, self.v, strict=True)
        ]

    def ahead(self, weights, updates):
        """ΔW = m̂ / (√v̂ + ε) of the last state."""
        if not self.t:
            return weights
        way = self._ratio(1 - self.betas[0] ** self.t, 1 - self.betas[1] ** self.t)
        return [w - self.lr * updates * d for w, d in zip(weights, way, strict=True)]

    def ahead_xpipe(self, weights, updates):
        """v̄ = v / (1-γ), q̄ = q / (1-λ)."""
        if not self.t:
            return weights
        way = self._ratio(1 - self.betas[0], 1 - self.betas[1])
        return [w - self.lr * updates * d for w, d in zip(weights, way, strict=True)]


class RmsProp:
    """E ← α E + (1-α) g², w ← w - lr g / (√E + ε)."""

    def __init__(self, lr, alpha=0.99, eps=1e-8):
        self.lr, self.alpha, self.eps, self.e, self.g = lr, alpha, eps, None, None

    def step(self, weights, grads, scale=1.0):
        self.g = grads
        before = self.e or [torch.zeros_like(g) for g in grads]
        self.e = [
            self.alpha * e + (1 - self.alpha) * g**2 for e, g in zip(before, grads, strict=True)
        ]
        return self.ahead(weights, scale)

    def ahead(self, weights, updates):
        """ΔW = g / (√E + ε)."""
        if self.e is None:
            return weights
        return [
            w - self.lr * updates * g / (e.sqrt() + self.eps)
            for w, g, e in zip(weights, self.g, self.e, strict=True)
        ]


#: By name, torch's optimizer and the same by its formula.
PAIRS = {
    "sgd": (lambda ps: torch.optim.SGD(ps, lr=0.05), lambda: Sgd(0.05)),
    "sgd with decay": (
        lambda ps: torch.optim.SGD(ps, lr=0.05, weight_decay=0.1),
        lambda: Sgd(0.05, weight_decay=0.1),
    ),
    "momentum": (lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.8), lambda: Sgd(0.02, 0.8)),
    "adam": (lambda ps: torch.optim.Adam(ps, lr=0.01), lambda: Adam(0.01)),
    "adamw": (
        lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.2),
        lambda: Adam(0.01, decoupled=0.2),
    ),
}


def literal(module, line: Line, data, loss, optimizer, forward=None, backward=None):
    """Run the stream with explicit weights.

    `forward(versions, number, optimizer)` returns the weights that an F reads, given all versions
    so far.
    """
    stored = [values_of(module)]
    as_read = lambda side: lambda versions, n, _: versions[getattr(line.use(n).reads, side)]  # noqa: E731
    forward, backward = forward or as_read("forward"), backward or as_read("backward")
    read, losses, summed = {}, [], None
    for kind, number in line.ops:
        if kind == "F":
            read[number] = [w.clone() for w in forward(stored, number, optimizer)]
            inputs, targets = data(number)
            losses.append(gradient(module, read[number], read[number], inputs, targets, loss)[0])
        elif kind == "B":
            inputs, targets = data(number)
            now = backward(stored, number, optimizer)
            grads = gradient(module, read.pop(number), now, inputs, targets, loss)[1]
            summed = (
                grads if summed is None else [a + b for a, b in zip(summed, grads, strict=True)]
            )
        else:
            stored.append(optimizer.step(stored[-1], summed))
            summed = None
    return losses, stored[-1]


def mlp(seed: int = 0) -> nn.Module:
    """Three linear layers in double precision."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)
    ).double()


def vectors(number: int):
    """Return input and target of a micro-batch for `mlp`."""
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64), torch.randn(
        4, 3, generator=generator, dtype=torch.float64
    )


def squares(output, target):
    """Return the squared error."""
    return (output - target).square().mean()


def close(actual, expected) -> bool:
    """Return whether values are equal up to rounding in double precision."""
    return all(
        torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(actual, expected, strict=True)
    )


@pytest.fixture(scope="session")
def lab() -> SimpleNamespace:
    """Return everything in this file, by name."""
    return SimpleNamespace(
        **{name: value for name, value in globals().items() if not name.startswith("_")},
        make=stage_weights,
    )
