"""A user's script: its classes are its own, and its layers pass them from process to process. Run
as a program, by `test_crossing_script`.

Under torchrun every process runs the whole script; else it starts its ranks by `ps.launch`, which
sends them the function and its classes.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import os
import sys
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

import penstock as ps

WIDTH = 6


class Mode(enum.Enum):
    """A constant that crosses."""

    WIDE = 1


@dataclasses.dataclass(frozen=True)
class State:
    """A dataclass of the script."""

    h: torch.Tensor
    mode: Mode


class Pair(NamedTuple):
    """A named tuple of the script."""

    state: State
    mask: torch.Tensor


class Plain:
    """An object of the script."""

    def __init__(self, pair):
        self.pair = pair
        self.note = {"bytes": b"x", 1j: torch.float32}


def strided(h):
    """Views of many strides, by name."""
    return {
        "transposed": h.t(),
        "expanded": h.mean(0).expand(4, WIDTH),
        "permuted": h.reshape(-1, 2, 3).permute(2, 0, 1),
        "gaps": h[:, ::2],
        "sparse": (h > 0).to(h.dtype).to_sparse(),
    }


class First(nn.Module):
    """Returns classes of the script, and one that its constructor was given."""

    def __init__(self, local):
        super().__init__()
        self.map, self.local = nn.Linear(WIDTH, WIDTH), local

    def forward(self, x):
        """One tensor in two places, and views of many strides."""
        h = self.map(x)
        pair = Pair(State(h, Mode.WIDE), h > 0)
        return {"plain": Plain(pair), "local": self.local(h), "strided": strided(torch.tanh(h))}


class Second(nn.Module):
    """Takes them, and keeps what it has seen."""

    def __init__(self):
        super().__init__()
        self.map, self.seen = nn.Linear(WIDTH, 1), []

    def forward(self, value):
        """Everything counts."""
        pair = value["plain"].pair
        views = value["strided"]
        self.seen.append(
            [
                type(value["plain"]) is Plain,
                type(pair) is Pair and type(pair.state) is State and pair.state.mode is Mode.WIDE,
                value["local"].h is pair.state.h,
                value["plain"].note == {"bytes": b"x", 1j: torch.float32},
                [views[name].stride() for name in ("transposed", "expanded", "permuted", "gaps")],
                [tensor.requires_grad for tensor in (pair.state.h, pair.mask, views["gaps"])],
            ]
        )
        h = pair.state.h * pair.mask + value["local"].h
        h = h + views["transposed"].t() + views["expanded"].sum() + views["permuted"].sum()
        return self.map(h) + views["gaps"].sum(-1, keepdim=True) + views["sparse"].to_dense().sum()


class Last(nn.Module):
    """Returns an object of the script from the pipeline."""

    def forward(self, value):
        """The one that came."""
        return value["plain"]


def build():
    """The model; one of its classes is defined in here."""

    @dataclasses.dataclass
    class Local:
        h: torch.Tensor

    torch.manual_seed(0)
    return nn.Sequential(First(Local), Second())


def main():
    """Gradients and what was seen, beside plain PyTorch's, on this rank; an object of the script
    comes out of the pipeline, too.
    """
    net, x, y = build(), torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH), torch.ones(8, 1)
    plain = copy.deepcopy(net)
    for xs, ys in zip(x.chunk(2), y.chunk(2), strict=True):
        (functional.mse_loss(plain(xs), ys) / 2).backward()
    differing = []
    for recompute in ("never", "always"):
        net.zero_grad()
        pipe = ps.Pipeline(
            net,
            balance=[1, 1],
            schedule="1f1b",
            micro_batches=2,
            loss=functional.mse_loss,
            recompute=recompute,
            device="cpu",
        )
        net[1].seen.clear()
        pipe.train_batch(x, y)
        rank = int(os.environ["RANK"])
        for parameter, other in zip(net[rank].parameters(), plain[rank].parameters(), strict=True):
            if not torch.equal(parameter.grad, other.grad):
                differing.append(f"gradient under {recompute}")
        if rank == 1 and any(shapes != plain[1].seen[0] for shapes in net[1].seen):
            differing.append(f"{net[1].seen[0]} and {plain[1].seen[0]}")
    outputs = ps.Pipeline(
        nn.Sequential(First(type(plain[0](x)["local"])), Last()),
        balance=[1, 1],
        schedule="gpipe",
        micro_batches=2,
        loss=functional.mse_loss,
        device="cpu",
    )
    result = outputs.forward(x)
    if type(result) is not Plain or type(result.pair.state) is not State:
        differing.append("the output's classes")
    return differing


if __name__ == "__main__":
    differing = main() if "RANK" in os.environ else ps.launch(main, 2, threads=1)
    # One write: torchrun starts Python without buffers, and its ranks share the standard output.
    sys.stdout.write(f"differs: {differing}\n")
    sys.stdout.flush()
