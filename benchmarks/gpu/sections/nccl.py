"""NCCL with one rank: what a communicator costs; and that two ranks on one card are refused with
words.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from kit.section import Section, words_of

import penstock as ps
from penstock.ranks.process_world import join
from penstock.transport.devices.device_discovery import assign_device


def measure(section: Section) -> None:
    """Rows for a communicator, a message to oneself, and two ranks on a card."""
    names = (
        "communicator",
        "self send and receive",
        "two ranks on one card, plain NCCL",
        "two ranks on one card, Penstock",
    )
    if not section.needs_gpu(*names):
        return
    section.attempt(names[0], lambda: _communicator(section))
    section.attempt(names[1], lambda: _message(section))
    if dist.is_initialized():
        dist.destroy_process_group()
    section.attempt(names[2], _two_ranks, least_s=8)
    section.attempt(names[3], _assigned, least_s=8)


def _free(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def _communicator(section: Section) -> dict[str, object]:
    torch.cuda.set_device(section.device)
    value = torch.ones(1, device=section.device)
    before = _free(section.device)
    started = time.perf_counter()
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=section.device
    )
    dist.all_reduce(value)
    torch.cuda.synchronize(section.device)
    seconds = time.perf_counter() - started
    return {"s": seconds, "MiB": (before - _free(section.device)) / 2**20}


def _message(section: Section) -> dict[str, object]:
    source = torch.ones(2**22, device=section.device)
    target = torch.zeros_like(source)

    def exchange() -> None:
        operations = [dist.P2POp(dist.isend, source, 0), dist.P2POp(dist.irecv, target, 0)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        torch.cuda.synchronize(section.device)

    exchange()
    started = time.perf_counter()
    for _ in range(10):
        exchange()
    seconds = (time.perf_counter() - started) / 10
    arrived = bool(torch.equal(source, target))
    return {"status": "measured" if arrived else "wrong", "us": seconds * 1e6, "MiB": 16}


def _two_ranks() -> dict[str, object]:
    started = time.perf_counter()
    words = ps.launch(_reduce, 2, threads=1)
    refused = [word for word in words if word]
    status = "measured" if refused else "wrong"
    return {"status": status, "words": refused[:1], "s": time.perf_counter() - started}


def _assigned() -> dict[str, object]:
    """What Penstock does instead: messages through host memory, said in one line."""
    lines = ps.launch(_assign, 2, "cuda:0", threads=1)
    names = [transport for transport, _ in lines]
    status = "measured" if names == ["host memory"] * 2 else "wrong"
    return {"status": status, "words": lines[1][1]}


def _assign(device: str) -> tuple[str, str]:
    """The transport of a rank, and the line that is logged."""
    join()
    assignment = assign_device(device)
    return assignment.transport, assignment.line


def _reduce() -> str:
    """NCCL's own words in a rank, empty if it did not refuse."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    try:
        dist.all_reduce(torch.ones(1, device="cuda:0"))
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - it is what the row is about
        return words_of(error)
    return ""
