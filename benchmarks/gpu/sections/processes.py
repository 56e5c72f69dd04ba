"""Several ranks as processes on one device: messages, a training step, and what happens when one is
killed.

This process does not start CUDA: ranks do.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from kit.section import Section, words_of
from kit.systems import pipeline
from kit.timing import seconds_of, time_steps
from kit.workloads import STAGES, equal_cut, gpt2

import penstock as ps
from penstock.ranks.process_world import join
from penstock.schedule.lower import Message
from penstock.schedule.op import Kind
from penstock.transport.collectives import barrier
from penstock.transport.payload import Payload
from penstock.transport.same_host import SameHostTransport

SIZES = {"4 KiB": 2**12, "1 MiB": 2**20, "16 MiB": 2**24, "64 MiB": 2**26}
#: A killed rank and its neighbours have to be gone by then.
GONE_S = 5.0


def measure(section: Section) -> None:
    """Rows for messages through shared memory, for steps on 2 and 4 ranks, and for a rank that is
    killed.
    """
    device, smoke = str(section.device), section.smoke
    sizes = dict(list(SIZES.items())[:2]) if smoke else SIZES
    section.attempt("gpt2 1f1b, 2 processes", lambda: _two(section, sizes), least_s=8)
    section.attempt("CUDA IPC by hand", lambda: _by_ipc(section, sizes), least_s=8)
    section.attempt("rank killed", lambda: _killed(device, smoke=smoke), least_s=8)
    name = f"gpt2 1f1b, {STAGES} processes"
    if smoke:
        section.row(name, "skipped", note="not with small sizes: starting processes takes longest")
    else:
        section.attempt(name, lambda: _steps(device, STAGES, smoke=smoke), least_s=8)
    # Last, since it starts CUDA in this process.
    section.attempt("gpt2 1f1b, 4 threads", lambda: {"ms": _in_threads(section)}, least_s=5)
    _ratio(section)


def _two(section: Section, sizes: dict[str, int]) -> dict[str, object]:
    """Messages and steps of the same two processes: a row for each message, and the values of the
    steps.
    """
    results = ps.launch(_both, 2, sizes, str(section.device), section.smoke, threads=1)
    for name, seconds in results[0][0].items():
        speed = sizes[name] / seconds / 1e9
        section.row(f"message {name}, shared memory", us=seconds * 1e6, GB_per_s=speed)
    return _step_row([steps for _, steps in results])


def _both(
    sizes: dict[str, int],
    device: str,
    smoke: bool,
) -> tuple[dict[str, float], tuple[float, float]]:
    """In each of two ranks."""
    return _messages(sizes, device), _train(device, 2, smoke)


def _messages(sizes: dict[str, int], device: str) -> dict[str, float]:
    """In each of two ranks: median seconds of one way, by size. Every message is made on the device
    and read there.
    """
    join()
    rank = dist.get_rank()
    place = torch.device(device)
    transport = SameHostTransport(rank, 20.0, place)
    transport.connect(dist.PrefixStore("gpu kit", dist.distributed_c10d._get_default_store()), 2)
    medians = {}
    for name, nbytes in sizes.items():
        tensor = torch.ones(nbytes // 4, device=place)
        times = max(5, min(100, 2**28 // nbytes))
        seconds = []
        for number in range(times + 2):
            message = Message(Kind.F, 0, number)
            started = time.perf_counter()
            for turn in (0, 1):
                if turn == rank:
                    transport.send(1 - rank, message, Payload.of(tensor), "")
                else:
                    transport.post(1 - rank, message, "").wait()
            if place.type == "cuda":
                torch.cuda.synchronize(place)
            if number > 1:
                seconds.append((time.perf_counter() - started) / 2)
        medians[name] = statistics.median(seconds)
    transport.close()
    return medians


def _by_ipc(section: Section, sizes: dict[str, int]) -> dict[str, object]:
    """A row for each size: what a copy into another process's memory takes, on the CPU that of
    shared host memory. Penstock has no transport that does this on a GPU.
    """
    results = ps.launch(_ipc_copies, 2, sizes, str(section.device), threads=1)
    for name, seconds in results[0].items():
        speed = sizes[name] / seconds / 1e9
        section.row(f"message {name}, CUDA IPC by hand", us=seconds * 1e6, GB_per_s=speed)
    arrived = set(results[1].values()) == {1.0}
    return {"status": "measured" if arrived else "wrong", "sizes": len(sizes)}


def _ipc_copies(sizes: dict[str, int], device: str) -> dict[str, float]:
    """In each of two ranks: rank 1 exports memory, rank 0 copies into it. Rank 0 returns the median
    seconds of a copy by size, rank 1 the least number in its memory afterwards, which is 1.
    """
    join()
    rank, place = dist.get_rank(), torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    results = {}
    for name, nbytes in sizes.items():
        slot = torch.zeros(nbytes // 4, device=place)
        exported = [_exported(slot) if rank else None]
        dist.broadcast_object_list(exported, src=1, device=torch.device("cpu"))
        if rank == 0:
            opener, handle = exported[0]
            storage = getattr(torch.UntypedStorage, opener)(*handle)
            target = torch.empty(0, device=place).set_(storage)
            source = torch.ones_like(target)
            work = lambda target=target, source=source: target.copy_(source)  # noqa: E731
            results[name] = seconds_of(work, place, times=5)
            del storage, target, work
        barrier()
        if rank:
            results[name] = float(slot.min())
    return results


def _exported(tensor: torch.Tensor) -> tuple[str, tuple[object, ...]]:
    """How another process opens a tensor's memory: a method of storages, and its arguments."""
    storage = tensor.untyped_storage()
    if tensor.is_cuda:
        return "_new_shared_cuda", storage._share_cuda_()
    return "_new_shared_filename_cpu", storage._share_filename_cpu_()


def _pipe(device: str, ranks: int, *, smoke: bool) -> tuple[ps.Pipeline, object, object]:
    """GPT-2 small over processes on one device."""
    cell = gpt2(smoke=smoke)
    model = cell.first_model()
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    pipe = ps.Pipeline(
        model,
        loss=cell.loss,
        optimizer=cell.make_optimizer,
        balance=equal_cut(len(model), ranks),
        schedule="1f1b",
        micro_batches=cell.micro_batches,
        autocast=cell.autocast,
        device=device,
        deadline_s=30.0,
    )
    return pipe, *cell.first_batch(place)


def _train(device: str, ranks: int, smoke: bool) -> tuple[float, float]:
    """In each rank: seconds of a step, and the last loss."""
    pipe, x, y = _pipe(device, ranks, smoke=smoke)
    loss = pipe.train_batch(x, y)
    for _ in range(1 if smoke else 3):
        loss = pipe.train_batch(x, y)
    steps = 1 if smoke else 7
    place = torch.device(device)
    seconds = time_steps(lambda: pipe.train_batch(x, y), steps, place).wall_s
    last = float(loss)
    pipe.close()
    return seconds, last


def _steps(device: str, ranks: int, *, smoke: bool) -> dict[str, object]:
    return _step_row(ps.launch(_train, ranks, device, ranks, smoke, threads=1))


def _step_row(rounds: list[tuple[float, float]]) -> dict[str, object]:
    """The slowest rank's step. All ranks have the same loss, or the row is wrong."""
    losses = [loss for _, loss in rounds]
    status = "measured" if max(losses) == min(losses) else "wrong"
    slowest = max(seconds for seconds, _ in rounds)
    return {"status": status, "ms": slowest * 1e3, "loss": losses[0]}


def _in_threads(section: Section) -> float:
    system = pipeline(gpt2(smoke=section.smoke), section.device)
    for _ in range(2 if section.smoke else 4):
        system.step()
    times = time_steps(system.step, 1 if section.smoke else 7, section.device)
    system.close()
    return times.wall_s * 1e3


def _ratio(section: Section) -> None:
    rows = {row["row"]: row for row in section.written}
    processes = rows.get(f"gpt2 1f1b, {STAGES} processes", {}).get("ms")
    threads = rows.get("gpt2 1f1b, 4 threads", {}).get("ms")
    if processes and threads:
        section.row("4 processes to 4 threads", ratio=processes / threads)


def _die(device: str, smoke: bool, died: str) -> None:
    """Rank 1 kills itself between two steps, having said when; rank 0 is left in the middle of its
    next one.
    """
    pipe, x, y = _pipe(device, 2, smoke=smoke)
    pipe.train_batch(x, y)
    if dist.get_rank() == 1:
        Path(died).write_text(str(time.time()), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(1000):
        pipe.train_batch(x, y)


def _killed(device: str, *, smoke: bool) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        died = str(Path(folder) / "died")
        try:
            ps.launch(_die, 2, device, smoke, died, threads=1)
        except ps.PenstockError as error:
            killed_at = time.time()
            seconds = killed_at - float(Path(died).read_text(encoding="utf-8"))
            status = "measured" if seconds <= GONE_S else "wrong"
            return {"status": status, "s_until_all_are_gone": seconds, "words": words_of(error)}
    return {"status": "wrong", "note": "nothing was raised when a rank was killed"}
