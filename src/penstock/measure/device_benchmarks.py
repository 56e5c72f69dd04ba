"""Benchmarks of a device: peaks by dtype, memory bandwidth, cost of an op, a piece of training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from penstock.measure.messages import undisturbed_seconds

#: Length of the chain of ops from which the cost of an op is measured.
_OPS: Final = 64


@dataclass(frozen=True)
class Load:
    """A piece of work that is repeated for a benchmark.

    Attributes:
        name: "matmul float32", "conv", "memory", "ops".
        amount: work of one run: FLOP of a matmul, bytes that a copy moves, ops of a chain, runs of
            the piece of training.
        run: does it once, on tensors that exist already.
    """

    name: str
    amount: float
    run: Callable[[], object]


class LoadSeconds(NamedTuple):
    """Seconds of one run of a load: without interference, and on average.

    With more busy ranks than cores each rank runs at full speed during its time slices: only the
    average shows that they wait.
    """

    undisturbed_s: float
    mean_s: float


def benchmark_loads(device: torch.device) -> dict[str, Load]:
    """Return the loads that measure a device, by name; one run of each takes milliseconds."""
    gpu = device.type == "cuda"
    dtypes = ("float32", "tf32", "bfloat16", "float16") if gpu else ("float32", "bfloat16")
    loads = [_matmul(dtype, 8192 if gpu else 512, device) for dtype in dtypes]
    loads += [_conv(device), _memory(2**26 if gpu else 2**24, device), _ops(device)]
    return {load.name: load for load in loads}


def time_load(load: Load, device: torch.device, seconds: float) -> LoadSeconds:
    """Time runs of a load for `seconds`, at least four of them, after a warm-up.

    A duration rather than a count, so that ranks that run it at the same time are all busy to the
    end.
    """
    times: list[float] = []
    _run_seconds(load, device)
    deadline = time.perf_counter() + seconds
    while len(times) < 4 or time.perf_counter() < deadline:
        times.append(_run_seconds(load, device))
    return LoadSeconds(undisturbed_seconds(times), statistics.fmean(times))


def _run_seconds(load: Load, device: torch.device) -> float:
    """Return the seconds of one run, until the device has finished it."""
    start = time.perf_counter()
    load.run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _matmul(name: str, size: int, device: torch.device) -> Load:
    """Return the load of multiplying two square matrices."""
    dtype = torch.float32 if name == "tf32" else getattr(torch, name)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def run() -> None:
        """Multiply once."""
        with _tf32(name == "tf32"):
            torch.mm(a, b, out=out)

    return Load(f"matmul {name}", 2.0 * size**3, run)


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Allow float32 in tensor cores, or forbid it, and restore the setting afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _conv(device: torch.device) -> Load:
    """Return a load like training: forward and backward of a convolution, batch norm and ReLU."""
    convolution = nn.Conv2d(32, 32, 3, padding=1)
    layers = nn.Sequential(convolution, nn.BatchNorm2d(32), nn.ReLU()).to(device)
    value = torch.randn(8, 32, 28, 28, device=device, requires_grad=True)

    def run() -> None:
        """Run forward and backward once."""
        layers.zero_grad()
        layers(value).sum().backward()

    return Load("conv", 1.0, run)


def _memory(count: int, device: torch.device) -> Load:
    """Return the load of adding two vectors into a third: 2 reads and a write of 4 bytes each."""
    a, b, out = (torch.ones(count, device=device) for _ in range(3))
    return Load("memory", 12.0 * count, lambda: torch.add(a, b, out=out))


def _ops(device: torch.device) -> Load:
    """Return the load of a chain of ops on tiny tensors, forward and backward, in eager mode."""
    start = torch.zeros(8, device=device, requires_grad=True)

    def run() -> None:
        """Run the chain once."""
        value: Tensor = start
        for _ in range(_OPS):
            value = torch.tanh(value)
        torch.autograd.backward([value], [torch.ones_like(value)])

    return Load("ops", 2.0 * _OPS, run)
