"""Observe the conditions of a measurement, from counters that the kernel keeps anyway.

Two readings bracket the measurement; nothing runs in between. A reading takes about 0.3 ms (on a
virtual machine of 2 cores), which is why there are two per epoch and not two per step. At the end a
product and a copy of fixed sizes are timed for 0.1 s: the speed of the cores themselves.

Sources: proc(5) for /proc/stat, /proc/vmstat and task/*/schedstat; the kernel's documentation of
pressure stall information (accounting/psi), of cpufreq, and of cgroup v1 and v2 (`cpu.stat`).
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import torch

from penstock.cluster.local import available_cores
from penstock.measure.torch_threads import torch_threads
from penstock.profile.conditions import RankConditions
from penstock.transport.hosts import this_host

#: Columns of /proc/stat in which a core works: user, nice, system, irq, softirq. `guest` is part of
#: `user`; `iowait` is idle.
_BUSY_COLUMNS = (1, 2, 3, 6, 7)
_STOLEN_COLUMN = 8
#: /proc/stat counts in ticks of 10 ms: over a shorter time than this its shares mean nothing.
_SHORTEST_S = 0.2
#: Side of the matrices of the product that is timed, and bytes of the block that is copied: more than
#: the caches of a core.
_PRODUCT_SIDE, _COPIED_BYTES = 256, 32 << 20
#: Seconds for which each of both is repeated.
_REPEAT_S = 0.05
#: Bytes that are touched page by page to time a page fault; less than a huge page.
_TOUCHED_BYTES = 1 << 20


@dataclass(frozen=True)
class _Reading:
    """Counters at one moment; absent keys and None are what the system does not report.

    Attributes:
        seconds: on the monotonic clock.
        busy_s, stolen_s: of the cores that the process may run on.
        process_s: CPU time of the process.
        threads: per thread, CPU nanoseconds and nanoseconds of waiting for a core.
        clock_hz: mean frequency now.
        counters: of faults, throttles, stalls and swap.
    """

    seconds: float
    busy_s: float | None
    stolen_s: float | None
    process_s: float
    threads: dict[str, tuple[int, int]]
    clock_hz: float | None
    counters: dict[str, float] = field(default_factory=dict)


@final
class ConditionsMeter:
    """Observes this process and its host from its construction, or `restart`, to `conditions`."""

    def __init__(self) -> None:
        self._start = _read()

    def restart(self) -> None:
        """Begin the observation now."""
        self._start = _read()

    def conditions(self) -> RankConditions:
        """Return the conditions since the beginning."""
        before, after = self._start, _read()
        seconds = max(after.seconds - before.seconds, 1e-9)
        counters = _rates(before.counters, after.counters, seconds)
        ticks = seconds >= _SHORTEST_S
        product_s, copy_s = _core_times()
        return RankConditions(
            host=this_host().key,
            seconds=seconds,
            cores=available_cores(),
            busy_cores=_rate(before.busy_s, after.busy_s, seconds) if ticks else None,
            stolen_cores=_rate(before.stolen_s, after.stolen_s, seconds) if ticks else None,
            process_cores=(after.process_s - before.process_s) / seconds,
            core_wait=_core_wait(before.threads, after.threads),
            clock_hz=_mean(before.clock_hz, after.clock_hz),
            heat_throttles_per_s=counters.get("heat"),
            quota_throttled=_share(counters.get("quota")),
            memory_stall=_share(counters.get("memory_stall")),
            swap_bytes_per_s=counters.get("swap"),
            page_faults_per_s=counters.get("page_faults"),
            disk_faults_per_s=counters.get("disk_faults"),
            page_fault_s=_page_fault_s(),
            product_s=product_s,
            copy_s=copy_s,
        )


def _read() -> _Reading:
    """Read all counters now."""
    busy_s, stolen_s = _core_seconds()
    return _Reading(
        time.monotonic(),
        busy_s,
        stolen_s,
        time.process_time(),
        _thread_times(),
        _clock_hz(),
        _counters(),
    )


def _core_seconds() -> tuple[float | None, float | None]:
    """Return busy and stolen seconds of the cores that this process may run on."""
    try:
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        ticks = os.sysconf("SC_CLK_TCK")
    except (AttributeError, ValueError, OSError):
        # Not Linux: these figures are left out of the conditions.
        return None, None
    busy = stolen = 0
    for line in _text("/proc/stat").splitlines():
        columns = line.split()
        if columns and columns[0] in names and len(columns) > _STOLEN_COLUMN:
            busy += sum(int(columns[column]) for column in _BUSY_COLUMNS)
            stolen += int(columns[_STOLEN_COLUMN])
    # Sandboxes show a file of zeros.
    return (busy / ticks, stolen / ticks) if busy else (None, None)


def _thread_times() -> dict[str, tuple[int, int]]:
    """Return CPU time and time of waiting for a core, in nanoseconds, per thread of the process."""
    times: dict[str, tuple[int, int]] = {}
    try:
        tasks = os.listdir("/proc/self/task")  # noqa: PTH208 - names are enough, and faster
    except OSError:
        return times
    for task in tasks:
        columns = _text(f"/proc/self/task/{task}/schedstat").split()
        if len(columns) >= 2:
            times[task] = int(columns[0]), int(columns[1])
    return times


def _core_wait(
    before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]
) -> float | None:
    """Return the seconds of waiting for a core per second of CPU time, over all threads."""
    cpu = wait = 0
    for task, (task_cpu, task_wait) in after.items():
        earlier_cpu, earlier_wait = before.get(task, (0, 0))
        cpu += task_cpu - earlier_cpu
        wait += task_wait - earlier_wait
    return wait / cpu if cpu > 0 else None


def _clock_hz() -> float | None:
    """Return the mean clock frequency of the cores; None where the system does not report it."""
    frequencies = []
    try:
        cores = os.sched_getaffinity(0)
    except AttributeError:
        # Not Linux.
        return None
    for core in cores:
        text = _text(f"/sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq").strip()
        if text.isdecimal():
            frequencies.append(1e3 * int(text))
    return sum(frequencies) / len(frequencies) if frequencies else None


def _counters() -> dict[str, float]:
    """Return the counters of faults, throttles, stalls and swap; those that exist here."""
    counters: dict[str, float] = {}
    try:
        import resource
    except ImportError:  # not on every system
        return counters
    usage = resource.getrusage(resource.RUSAGE_SELF)
    counters["page_faults"], counters["disk_faults"] = usage.ru_minflt, usage.ru_majflt
    _add_memory_counters(counters)
    quota = _quota_throttled_s()
    if quota is not None:
        counters["quota"] = quota
    heat = [
        int(text)
        for path in Path("/sys/devices/system/cpu").glob(
            "cpu[0-9]*/thermal_throttle/core_throttle_count"
        )
        if (text := _text(path).strip()).isdecimal()
    ]
    if heat:
        counters["heat"] = sum(heat)
    return counters


def _add_memory_counters(counters: dict[str, float]) -> None:
    """Add seconds in which a task of the host waited for memory, and bytes of its swap."""
    pressure = _named_values(_text("/proc/pressure/memory").partition("\n")[0].replace("=", " "))
    if "total" in pressure:
        counters["memory_stall"] = 1e-6 * pressure["total"]
    swap = [
        int(line.split()[1])
        for line in _text("/proc/vmstat").splitlines()
        if line.startswith(("pswpin ", "pswpout "))
    ]
    if swap:
        counters["swap"] = sum(swap) * mmap.PAGESIZE


def _quota_throttled_s() -> float | None:
    """Return the seconds in which the CPU quota of the container has stopped it; None without."""
    for name, unit in (("throttled_usec", 1e-6), ("throttled_time", 1e-9)):
        for path in _quota_files():
            values = _named_values(_text(path))
            if name in values:
                return unit * values[name]
    return None


def _quota_files() -> list[str]:
    """Return the files with the figures of the quota of this process: cgroup v2, then v1."""
    files = []
    for line in _text("/proc/self/cgroup").splitlines():
        number, controllers, group = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            files.append(f"/sys/fs/cgroup{group}/cpu.stat")
        elif "cpu" in controllers.split(","):
            files.append(f"/sys/fs/cgroup/{controllers}{group}/cpu.stat")
    # In a container, its own group is mounted at the root.
    return [*files, "/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpu/cpu.stat"]


def _named_values(text: str) -> dict[str, float]:
    """Return the numbers that follow a word each, as in `nr_periods 3`."""
    words = text.split()
    values: dict[str, float] = {}
    for name, value in pairwise(words):
        if value.isdecimal():
            values[name] = float(value)
    return values


def _core_times() -> tuple[float, float]:
    """Return the seconds that a product of matrices and a copy of a block take now, on one thread.

    Cores of a virtual machine share execution units, caches and memory with others, which no counter
    here shows: both then take longer.
    """
    side, count = _PRODUCT_SIDE, _COPIED_BYTES // 4
    kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    left, right, product = torch.ones(3, side, side, **kind).unbind()
    source, target = torch.ones(count, **kind), torch.zeros(count, **kind)
    with torch_threads(1):
        product_s = _median_seconds(lambda: torch.mm(left, right, out=product))
        copy_s = _median_seconds(lambda: target.copy_(source))
    return product_s, copy_s


def _median_seconds(run: Callable[[], object]) -> float:
    """Return the median seconds of a short function, after a first call that does not count."""
    run()
    times = []
    start_s = time.perf_counter()
    end_s = start_s + _REPEAT_S
    while start_s < end_s:
        run()
        now_s = time.perf_counter()
        times.append(now_s - start_s)
        start_s = now_s
    return statistics.median(times)


def _page_fault_s() -> float:
    """Return the seconds that one page fault takes now, by touching new pages."""
    pages = _TOUCHED_BYTES // mmap.PAGESIZE
    with mmap.mmap(-1, _TOUCHED_BYTES) as memory:
        start = time.perf_counter()
        for page in range(pages):
            memory[page * mmap.PAGESIZE] = 1
        first = time.perf_counter()
        for page in range(pages):
            memory[page * mmap.PAGESIZE] = 1
        second = time.perf_counter()
    # The second pass has the cost of the loop alone.
    return max((first - start) - (second - first), 0.0) / pages


def _text(path: str | Path) -> str:
    """Return the content of a file of the kernel; empty if there is none."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:  # noqa: PTH123 - faster
            return file.read()
    except OSError:
        return ""


def _rate(before: float | None, after: float | None, seconds: float) -> float | None:
    """Return the increase per second; None if a value is unknown."""
    return None if before is None or after is None else max(after - before, 0.0) / seconds


def _rates(
    before: Mapping[str, float], after: Mapping[str, float], seconds: float
) -> dict[str, float]:
    """Return the increase per second of the counters that both readings have."""
    common = before.keys() & after.keys()
    return {name: max(after[name] - before[name], 0.0) / seconds for name in common}


def _share(value: float | None) -> float | None:
    """Return a share of the time, at most 1."""
    return None if value is None else min(value, 1.0)


def _mean(first: float | None, second: float | None) -> float | None:
    """Return the mean of two values; None if one is unknown."""
    return None if first is None or second is None else (first + second) / 2
