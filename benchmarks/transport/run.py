"""One-way time of messages between two processes of this host: shared memory beside gloo, in one
run, in turn.

A message goes there and back; half of that is its one-way time, the copy into a fresh tensor
included. gloo gets what is best for it: receives posted before the message is sent, into buffers
that are there already. A burst is eight messages one way and one back, as activations go while a
pipeline fills.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import HashStore

import penstock as ps
from penstock.ranks.process_world import join
from penstock.schedule.lower import Message
from penstock.schedule.op import Kind
from penstock.transport.payload import Payload
from penstock.transport.same_host import SPIN_S, SameHostTransport

SIZES = (64, 4 * 2**10, 64 * 2**10, 256 * 2**10, 2**20, 4 * 2**20, 16 * 2**20, 64 * 2**20)
BURST = 8

#: Runs one exchange with the other rank: a number of messages to it, then a number back.
Exchange = Callable[[torch.Tensor, int, int], None]


def shared_memory(rank: int, spin_s: float) -> Exchange:
    """Penstock's transport, through the calls that the runtime makes."""
    transport = SameHostTransport(rank, 60.0)
    transport.spin_s = spin_s
    transport.connect(PrefixStore(f"spin {spin_s}", dist.distributed_c10d._get_default_store()), 2)
    assert transport.reachable == {1 - rank}, "the two processes cannot open each other's memory"
    messages = [Message(Kind.F, 0, number) for number in range(BURST)]

    def exchange(tensor: torch.Tensor, count: int, back: int) -> None:
        payload, counts = Payload.of(tensor), (count, back)
        for turn in (0, 1):
            if turn == rank:
                for message in messages[: counts[turn]]:
                    transport.send(1 - rank, message, payload, "")
            else:
                for message in messages[: counts[turn]]:
                    transport.post(1 - rank, message, "").wait()

    return exchange


def gloo(rank: int) -> Exchange:
    """torch.distributed's isend and irecv."""
    buffers: dict[int, list[torch.Tensor]] = {}

    def exchange(tensor: torch.Tensor, count: int, back: int) -> None:
        into = buffers.setdefault(tensor.numel(), [torch.empty_like(tensor) for _ in range(BURST)])
        sends, receives = (count, back)[:: 1 if rank == 0 else -1]
        arriving = [dist.irecv(into[number], 1 - rank, tag=number) for number in range(receives)]
        leaving = []
        for turn in (0, 1):
            if turn == rank:
                leaving = [dist.isend(tensor, 1 - rank, tag=number) for number in range(sends)]
            else:
                for work in arriving:
                    work.wait()
        for work in leaving:
            work.wait()

    return exchange


def measure(rounds: int) -> dict[str, dict[int, dict[str, list[float]]]]:
    """Microseconds, by size and round, of every way: one message, one of a burst, and this
    process's own time for one.
    """
    join()
    rank = dist.get_rank()
    ways = {
        "gloo": gloo(rank),
        "shared memory": shared_memory(rank, SPIN_S),
        "shared memory, no spin": shared_memory(rank, 0.0),
    }
    measured: dict[str, dict[int, dict[str, list[float]]]] = {way: {} for way in ways}
    for nbytes in SIZES:
        tensor = torch.ones(nbytes // 4)
        times = max(3, min(400, 40 * 2**20 // nbytes))
        for number in range(rounds + 1):  # the first warms up
            for way, exchange in ways.items():
                rows = measured[way].setdefault(
                    nbytes, {"one_way_us": [], "burst_us": [], "own_time_us": []}
                )
                for column, count, back in (("one_way_us", 1, 1), ("burst_us", BURST, 1)):
                    dist.barrier()
                    start, cpu_start = time.perf_counter(), time.process_time()
                    for _ in range(times):
                        exchange(tensor, count, back)
                    seconds, spent = time.perf_counter() - start, time.process_time() - cpu_start
                    if number:
                        rows[column].append(seconds / times / (count + back) * 1e6)
                        if count == 1:
                            rows["own_time_us"].append(spent / times / 2 * 1e6)
    return measured


def calls(rounds: int) -> dict[str, float]:
    """Microseconds of one `send` and of one `post` and `wait` of 64 bytes that are there, both ends
    in this process.
    """
    torch.set_num_threads(1)
    store, ends = HashStore(), [SameHostTransport(rank, 60.0) for rank in (0, 1)]
    threads = [threading.Thread(target=end.connect, args=(store, 2)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    payload, messages = (
        Payload.of(torch.ones(16)),
        [Message(Kind.F, 0, number) for number in range(BURST)],
    )
    durations: dict[str, list[float]] = {"send_us": [], "post_and_wait_us": []}
    for _ in range(rounds):
        spent = [0.0, 0.0]
        for _ in range(500):
            start = time.perf_counter()
            for message in messages:
                ends[0].send(1, message, payload, "")
            middle = time.perf_counter()
            for message in messages:
                ends[1].post(0, message, "").wait()
            spent = [spent[0] + middle - start, spent[1] + time.perf_counter() - middle]
        for column, seconds in zip(durations, spent, strict=True):
            durations[column].append(seconds / 500 / BURST * 1e6)
    for end in ends:
        end.close()
    return {column: round(statistics.median(values), 2) for column, values in durations.items()}


def main() -> None:
    """Print a table, write results.json."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--rounds", type=int, default=9)
    words.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    arguments = words.parse_args()
    measured = ps.launch(measure, 2, arguments.rounds, threads=1)[0]
    results: dict[str, dict[str, dict[str, float]]] = {}
    for nbytes in SIZES:
        row: dict[str, dict[str, float]] = {}
        for way, sizes in measured.items():
            times = sizes[nbytes]
            row[way] = {
                f"{column}_median": round(statistics.median(values), 2)
                for column, values in times.items()
            }
            row[way] |= {
                "one_way_us_min": round(min(times["one_way_us"]), 2),
                "one_way_us_max": round(max(times["one_way_us"]), 2),
            }
            row[way]["GB_per_s"] = round(nbytes / row[way]["one_way_us_median"] / 1e3, 3)
            if way != "gloo":
                for column in ("one_way_us", "burst_us"):
                    pairs = zip(measured["gloo"][nbytes][column], times[column], strict=True)
                    row[way][f"gloo / this, {column}"] = round(
                        statistics.median(a / b for a, b in pairs), 2
                    )
        results[str(nbytes)] = row
        print(f"{nbytes} bytes")
        for way, cells in row.items():
            print(f"  {way:24} " + "  ".join(f"{key} {value}" for key, value in cells.items()))
    machine = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }
    of_calls = calls(arguments.rounds)
    print(f"calls at 64 bytes: {of_calls}")
    arguments.out.write_text(
        json.dumps({"machine": machine, "calls": of_calls, "results": results}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
