"""What a device computes: peaks by dtype, memory bandwidth, the cost of an op, and how long a piece
of training takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from penstock.measure.quiet import quiet

#: Ops of the chain that the cost of an op is taken from.
_OPS: Final = 64


@dataclass(frozen=True)
class Load:
    """Work that is done over and over: what one run of it is, and the function.

    Attributes:
        name: "matmul float32", "conv", "memory", "ops".
        amount: FLOP of a matmul, bytes that a copy moves, ops of a chain, runs of the piece of
        training. run: does it once; what it is done on has been made before.
    """

    name: str
    amount: float
    run: Callable[[], object]


class Taken(NamedTuple):
    """Seconds of one run: when nothing else got in between, and on average.

    Of more busy ranks than cores each works as fast as ever while it is its turn: only the average
    tells that they wait.
    """

    quiet_s: float
    mean_s: float


def loads(device: torch.device) -> dict[str, Load]:
    """The work that tells what a device can do, by name; sized so that one run takes milliseconds."""
    gpu = device.type == "cuda"
    names = ("float32", "tf32", "bfloat16", "float16") if gpu else ("float32", "bfloat16")
    found = [_matmul(name, 8192 if gpu else 512, device) for name in names]
    found += [_conv(device), _memory(2**26 if gpu else 2**24, device), _ops(device)]
    return {load.name: load for load in found}


def time_load(load: Load, device: torch.device, seconds: float) -> Taken:
    """Seconds of one run, of those that fit into `seconds`, at least four, after one to warm up.

    Given a time and not a count, ranks that run it at once are busy at once to the end.
    """
    times: list[float] = []
    _settled(load, device)
    until = time.perf_counter() + seconds
    while len(times) < 4 or time.perf_counter() < until:
        times.append(_settled(load, device))
    return Taken(quiet(times), statistics.fmean(times))


def _settled(load: Load, device: torch.device) -> float:
    start = time.perf_counter()
    load.run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _matmul(name: str, size: int, device: torch.device) -> Load:
    """Two square matrices multiplied."""
    dtype = torch.float32 if name == "tf32" else getattr(torch, name)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def run() -> None:
        with _tf32(name == "tf32"):
            torch.mm(a, b, out=out)

    return Load(f"matmul {name}", 2.0 * size**3, run)


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """float32 in tensor cores, or not; as it was afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _conv(device: torch.device) -> Load:
    """A piece of training: forward and backward of a convolution with what usually stands around
    it.
    """
    layers = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()).to(
        device
    )
    value = torch.randn(8, 32, 28, 28, device=device, requires_grad=True)

    def run() -> None:
        layers.zero_grad()
        layers(value).sum().backward()

    return Load("conv", 1.0, run)


def _memory(count: int, device: torch.device) -> Load:
    """Two vectors added into a third: of each number two are read and one is written, 4 bytes each."""
    a, b, out = (torch.ones(count, device=device) for _ in range(3))
    return Load("memory", 12.0 * count, lambda: torch.add(a, b, out=out))


def _ops(device: torch.device) -> Load:
    """A chain of ops on next to nothing, forward and backward, as eager training runs them."""
    start = torch.zeros(8, device=device, requires_grad=True)

    def run() -> None:
        value: Tensor = start
        for _ in range(_OPS):
            value = torch.tanh(value)
        torch.autograd.backward([value], [torch.ones_like(value)])

    return Load("ops", 2.0 * _OPS, run)
