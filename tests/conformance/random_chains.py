"""Random chains of layers of many kinds: what users write, in orders that no zoo has.

A chain is a random walk over kinds of values. Every layer says which kind of value it takes and
which it returns; `random_chain` draws layers until the last value is a plain tensor of scores.

    kind      value
    tensor    float, (samples, WIDTH)
    aliased   the same tensor twice, and a view of it
    pair      named tuple of two tensors, one of which may be without gradient
    record    dataclass of a tensor, a mask, whole numbers and a plain constant
    mapping   `UserDict` of a tensor and an empty tensor
    spectrum  complex, (samples, WIDTH)

The plain loop that these chains are compared with is `PlainTraining`.
"""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock as ps

WIDTH = 6
CLASSES = 3


class Pair(NamedTuple):
    """Two tensors; `scale` may be without gradient."""

    hidden: Tensor
    scale: Tensor


@dataclass
class Record:
    """A tensor with what goes along with it."""

    hidden: Tensor
    mask: Tensor
    index: Tensor
    factor: float


class Lambda(nn.Module):
    """A layer without weights."""

    def __init__(self, name: str, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.name, self.function = name, function

    def forward(self, value: Any) -> Any:
        """Call the function."""
        return self.function(value)

    def extra_repr(self) -> str:
        """The function's name."""
        return self.name


class SquareWithFactor(torch.autograd.Function):
    """x * x, whose backward is twice the true one: a formula that autograd would not derive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Keep the input."""
        ctx.save_for_backward(x)
        return x * x * 0.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """2 x instead of x."""
        (x,) = ctx.saved_tensors
        return grad * x * 2.0


class Checkpointed(nn.Module):
    """Runs its inside again in the backward, dropout included."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        """Recompute with torch's own checkpointing."""
        return checkpoint(self.inside, x, use_reentrant=False)


class Experts(nn.Module):
    """Every sample goes to one of three experts, chosen by its values; some experts get none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Route by the largest of the first three features."""
        choice = x[:, :3].argmax(1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(1)
            if len(rows):
                result = result.index_add(0, rows, expert(x[rows]))
        return result


class Hooked(nn.Module):
    """A forward hook on its inside, and a hook on the gradient of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.inside.register_forward_hook(lambda module, args, output: output * 1.5)

    def forward(self, x: Tensor) -> Tensor:
        """Scale the gradient by a half on its way back."""
        y = self.inside(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 0.5)
        return y


class AddInPlace(nn.Module):
    """Changes what it is given, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Add to the input itself."""
        return x.add_(self.bias)


class ChangeRecord(nn.Module):
    """Changes the tensor inside a dataclass in place, and hands on the same object."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH) * 1.1)

    def forward(self, record: Record) -> Record:
        """Scale in place."""
        record.hidden.mul_(self.weight.detach())
        record.hidden = record.hidden * self.weight
        return record


class UseRecord(nn.Module):
    """Reads every field of a record."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH)

    def forward(self, record: Record) -> Tensor:
        """A tensor again."""
        hidden = record.hidden.masked_fill(record.mask, 0.1)
        return hidden * record.factor + self.table(record.index)


class SideLoss(nn.Module):
    """A penalty on activations beside the model's own loss."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean square counts."""
        ps.side_loss(x.square().mean() * 0.1)
        return x


def to_record(x: Tensor) -> Record:
    """A record, its mask and index computed from the values."""
    return Record(x, x.detach() > 1.0, x[:, :4].detach().argmax(1), 0.75)


def to_pair(x: Tensor) -> Pair:
    """A scale without gradient."""
    return Pair(x, x.detach().abs() + 0.5)


def spread(x: Tensor) -> Tensor:
    """An expanded tensor: one column, stride 0."""
    return x.mean(1, keepdim=True).expand(-1, WIDTH)


def swap_strides(x: Tensor) -> Tensor:
    """The same values, laid out column by column."""
    return x.t().contiguous().t()


def _function(name: str, function: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    return lambda: Lambda(name, function)


#: By kind of value, the layers that take it: a name, what makes one, and the kind that it returns.
#: A layer that works in place never follows one that saves its output for its own backward: plain
#: PyTorch refuses that. "fresh" is such a tensor, which only layers may change that follow it.
LAYERS: dict[str, list[tuple[str, Callable[[], nn.Module], str]]] = {
    "tensor": [
        ("linear", lambda: nn.Linear(WIDTH, WIDTH), "fresh"),
        ("tanh", nn.Tanh, "tensor"),
        ("norm", lambda: nn.LayerNorm(WIDTH), "tensor"),
        ("batch norm", lambda: nn.BatchNorm1d(WIDTH), "tensor"),
        ("dropout", lambda: nn.Dropout(0.3), "tensor"),
        ("gelu", nn.GELU, "tensor"),
        ("custom", _function("custom", SquareWithFactor.apply), "tensor"),
        ("checkpointed", Checkpointed, "tensor"),
        ("experts", Experts, "tensor"),
        ("hooked", Hooked, "tensor"),
        ("side loss", SideLoss, "tensor"),
        ("strides", _function("strides", swap_strides), "tensor"),
        ("expanded", _function("expanded", spread), "view"),
        ("view", _function("view", lambda x: torch.cat([x, x], 1)[:, 2 : 2 + WIDTH]), "view"),
        ("alias", _function("alias", lambda x: (x, x, x[:, 1:])), "aliased"),
        ("pair", _function("pair", to_pair), "pair"),
        ("record", _function("record", to_record), "record"),
        ("mapping", _function("mapping", lambda x: UserDict(x=x, none=x[:, :0])), "mapping"),
        ("fft", _function("fft", torch.fft.fft), "spectrum"),
    ],
    "fresh": [
        ("relu in place", lambda: nn.ReLU(inplace=True), "tensor"),
        ("silu in place", lambda: nn.SiLU(inplace=True), "tensor"),
        ("add in place", AddInPlace, "tensor"),
        ("fresh record", _function("fresh record", to_record), "fresh record"),
        ("tanh", nn.Tanh, "tensor"),
    ],
    "view": [
        ("linear", lambda: nn.Linear(WIDTH, WIDTH), "fresh"),
        ("tanh", nn.Tanh, "tensor"),
        ("norm", lambda: nn.LayerNorm(WIDTH), "tensor"),
    ],
    "aliased": [
        ("merge", _function("merge", lambda v: v[0] * 0.5 + v[1].tanh() + v[2].mean()), "tensor"),
    ],
    "pair": [
        ("scaled", _function("scaled", lambda p: p.hidden / p.scale), "tensor"),
        ("rescaled", _function("rescaled", lambda p: Pair(p.hidden * 0.9, p.scale)), "pair"),
    ],
    "record": [
        ("use record", UseRecord, "tensor"),
        ("same record", nn.Identity, "record"),
    ],
    "fresh record": [
        ("change record", ChangeRecord, "record"),
        ("use record", UseRecord, "tensor"),
    ],
    "mapping": [
        ("open", _function("open", lambda m: m["x"] + m["none"].sum()), "tensor"),
        ("same mapping", nn.Identity, "mapping"),
    ],
    "spectrum": [
        ("turn", _function("turn", lambda z: z * 1j), "spectrum"),
        ("conjugate", _function("conjugate", lambda z: z.conj()), "spectrum"),
        ("real", _function("real", lambda z: torch.fft.ifft(z).real * 1.0), "tensor"),
    ],
}


def random_chain(seed: int, layers: int) -> tuple[nn.Sequential, list[str]]:
    """A chain of at least `layers` layers, and their names; the same for the same arguments."""
    rng = random.Random(seed)
    modules: list[nn.Module] = []
    names: list[str] = []
    kind = "tensor"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        while len(modules) < layers - 1 or kind not in ("tensor", "fresh", "view"):
            name, make, kind = rng.choice(LAYERS[kind])
            modules.append(make())
            names.append(name)
        modules.append(nn.Linear(WIDTH, CLASSES))
        names.append("head")
        _move_weights(modules)
    return nn.Sequential(*modules), names


def _move_weights(modules: list[nn.Module]) -> None:
    """Biases and norms away from 0 and 1, so that every gradient shows."""
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)


def random_batch(seed: int, samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, WIDTH, generator=generator)
    return inputs, torch.randint(0, CLASSES, (samples,), generator=generator)


def random_lengths(seed: int, layers: int, stages: int) -> list[int]:
    """A random cut of `layers` layers into `stages` stages."""
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, layers), stages - 1))
    return [end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]
