"""What the card and its links reach: ceilings for everything after."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from kit.section import Section
from kit.timing import seconds_of
from torch import Tensor

from penstock.measure.card_check import TorchDriver, check_cards


def measure(section: Section) -> None:
    """Versions, memory, launches, copies, matrix products."""
    section.attempt("versions", lambda: _versions(section))
    section.attempt("host overhead", lambda: _host(section))
    _products(section)
    if section.needs_gpu(
        "memory",
        "launch",
        "event",
        "pinned h2d",
        "pinned d2h",
        "pageable h2d",
        "pageable d2h",
        "copy on the device",
        "launch by graph",
        "card check",
    ):
        section.attempt("memory", lambda: _memory(section))
        section.attempt("launch", lambda: _launch(section))
        section.attempt("event", lambda: _event(section))
        _copies(section)
        section.attempt("launch by graph", lambda: _graph(section))
        section.attempt("card check", _check)


def _versions(section: Section) -> dict[str, object]:
    versions: dict[str, object] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
    }
    if section.on_gpu:
        properties = torch.cuda.get_device_properties(section.device)
        versions["gpu"] = properties.name
        versions["multiprocessors"] = properties.multi_processor_count
        versions["capability"] = f"{properties.major}.{properties.minor}"
        versions["bf16"] = torch.cuda.is_bf16_supported()
        versions["devices"] = torch.cuda.device_count()
    return versions


def _check() -> dict[str, object]:
    """What `penstock doctor` finds: whether another process can open the card's memory, and NCCL."""
    report = check_cards(TorchDriver())
    status = "measured" if report.sound else "wrong"
    return {"status": status, "nccl": report.nccl, "cards": [str(card) for card in report.cards]}


def _memory(section: Section) -> dict[str, object]:
    free, total = torch.cuda.mem_get_info(section.device)
    return {"free_GiB": free / 2**30, "total_GiB": total / 2**30}


def _host(section: Section) -> dict[str, object]:
    """What Python and torch take for an op that does nothing, on the CPU."""
    value = torch.zeros(1)
    seconds = seconds_of(lambda: value.add_(1), torch.device("cpu"), times=_times(section))
    return {"eager_op_us": seconds * 1e6}


def _times(section: Section) -> int:
    return 20 if section.smoke else 1000


def _launch(section: Section) -> dict[str, object]:
    """Host's time per launch, the device being far behind or not: the larger of the two is what
    training pays.
    """
    value = torch.zeros(1, device=section.device)
    leaf = torch.zeros(1, device=section.device, requires_grad=True)
    times = _times(section)

    def chain() -> Tensor:
        value = leaf
        for _ in range(times):
            value = value * 1.0
        return value.sum()

    eager_s = seconds_of(lambda: value.add_(1), section.device, times=times)
    chain().backward()
    losses = [chain() for _ in range(3)]
    section.synchronize()
    started = time.perf_counter()
    for loss in losses:
        loss.backward()
    section.synchronize()
    backward_s = (time.perf_counter() - started) / len(losses) / times
    return {"eager_op_us": eager_s * 1e6, "autograd_op_us": backward_s * 1e6}


def _event(section: Section) -> dict[str, object]:
    event = torch.cuda.Event(enable_timing=True)
    times = _times(section)
    event.record()
    section.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        event.record()
    seconds = (time.perf_counter() - started) / times
    section.synchronize()
    return {"record_us": seconds * 1e6}


def _graph(section: Section) -> dict[str, object]:
    """A node of a graph of small kernels."""
    value = torch.zeros(1, device=section.device)
    value.add_(1)
    times = _times(section)
    graph = torch.cuda.CUDAGraph()
    section.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(times):
            value.add_(1)
    return {"node_us": seconds_of(graph.replay, section.device, times=5) / times * 1e6}


def _copies(section: Section) -> None:
    nbytes = 2**20 if section.smoke else 256 * 2**20
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=section.device)
    other = torch.empty_like(on_device)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    pageable = torch.ones(nbytes, dtype=torch.uint8)
    ways: dict[str, tuple[Tensor, Tensor, int]] = {
        "pinned h2d": (on_device, pinned, 1),
        "pinned d2h": (pinned, on_device, 1),
        "pageable h2d": (on_device, pageable, 1),
        "pageable d2h": (pageable, on_device, 1),
        "copy on the device": (other, on_device, 2),
    }
    for name, (target, source, traffic) in ways.items():

        def work(target: Tensor = target, source: Tensor = source) -> Tensor:
            return target.copy_(source, non_blocking=True)

        def values(work: Callable[[], Tensor] = work, traffic: int = traffic) -> dict[str, object]:
            seconds = seconds_of(work, section.device, times=3, rounds=3, warm=1)
            return {"GB_per_s": traffic * nbytes / seconds / 1e9, "MiB": nbytes / 2**20}

        section.attempt(name, values)


def _products(section: Section) -> None:
    """Matrix products; TF32 only where there is any."""
    edge = 64 if section.smoke else 8192
    kinds = {
        "gemm bf16": (torch.bfloat16, False),
        "gemm tf32": (torch.float32, True),
        "gemm fp32": (torch.float32, False),
    }
    for name, (dtype, tf32) in kinds.items():
        if tf32 and not section.on_gpu:
            section.row(name, "not on this machine")
            continue

        def values(dtype: torch.dtype = dtype, tf32: bool = tf32) -> dict[str, object]:
            torch.backends.cuda.matmul.allow_tf32 = tf32
            left = torch.randn(edge, edge, device=section.device, dtype=dtype)
            right = torch.randn(edge, edge, device=section.device, dtype=dtype)
            out = torch.empty_like(left)
            work = lambda: torch.mm(left, right, out=out)  # noqa: E731 - timed as it is
            seconds = seconds_of(work, section.device, times=3, rounds=3, warm=2)
            return {"TFLOP_per_s": 2 * edge**3 / seconds / 1e12, "edge": edge}

        section.attempt(name, values)
    torch.backends.cuda.matmul.allow_tf32 = False
    section.free()
