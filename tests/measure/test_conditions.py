"""Conditions of a measurement: counters of the kernel, read twice. No test asserts a load."""

from __future__ import annotations

import pytest

from penstock.measure import conditions as measuring
from penstock.measure.conditions import ConditionsMeter
from penstock.profile.conditions import RankConditions, combine_conditions
from penstock.transport.hosts import Host

#: The files of a host of two cores at two moments, one second apart.
BEFORE = {
    "/proc/stat": "cpu0 100 0 50 999 7 0 0 10 0 0\ncpu1 100 0 50 999 7 0 0 10 0 0\n",
    "/proc/self/task/7/schedstat": "1000000000 500000000 12\n",
    "/proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=1000\n",
    "/proc/vmstat": "pswpin 10\npswpout 0\npgfault 3\n",
    "/proc/self/cgroup": "0::/job\n",
    "/sys/fs/cgroup/job/cpu.stat": "usage_usec 9\nnr_throttled 0\nthrottled_usec 0\n",
    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "3000000\n",
    "/sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": "2000000\n",
}
AFTER = {
    **BEFORE,
    "/proc/stat": "cpu0 180 0 60 999 7 0 0 30 0 0\ncpu1 150 0 60 999 7 0 0 30 0 0\n",
    "/proc/self/task/7/schedstat": "1800000000 900000000 12\n",
    "/proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=251000\n",
    "/proc/vmstat": "pswpin 30\npswpout 5\npgfault 9\n",
    "/sys/fs/cgroup/job/cpu.stat": "usage_usec 9\nnr_throttled 4\nthrottled_usec 300000\n",
}


@pytest.fixture
def host(monkeypatch):
    """A host whose files and clocks the test sets."""
    state = {"files": BEFORE, "time": 0.0}
    monkeypatch.setattr(measuring, "_text", lambda path: state["files"].get(str(path), ""))
    monkeypatch.setattr(measuring.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(measuring.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(measuring.os, "listdir", lambda path: ["7"])
    monkeypatch.setattr(measuring.mmap, "PAGESIZE", 4096)
    monkeypatch.setattr(measuring.time, "monotonic", lambda: state["time"])
    monkeypatch.setattr(measuring.time, "process_time", lambda: 0.8 * state["time"])
    return state


def test_all_conditions_follow_from_two_readings(host):
    """The figures of the files, per second."""
    meter = ConditionsMeter()
    host.update(files=AFTER, time=1.0)
    conditions = meter.conditions()
    assert conditions.busy_cores == pytest.approx(1.5)
    assert conditions.stolen_cores == pytest.approx(0.4)
    assert conditions.process_cores == pytest.approx(0.8)
    assert conditions.core_wait == pytest.approx(0.5)
    assert conditions.clock_hz == pytest.approx(2.5e9)
    assert conditions.memory_stall == pytest.approx(0.25)
    assert conditions.swap_bytes_per_s == pytest.approx(25 * 4096)
    assert conditions.quota_throttled == pytest.approx(0.3)
    assert conditions.heat_throttles_per_s is None


def test_a_host_is_told_apart_by_its_kernel_and_network(host, monkeypatch):
    """Containers of one name are hosts to training; its profile counts them in the same way."""
    monkeypatch.setattr(measuring, "this_host", lambda: Host("name", "name kernel net:[7]"))
    meter = ConditionsMeter()
    host["time"] = 1.0
    assert meter.conditions().host == "name kernel net:[7]"


def test_a_host_that_reports_nothing_has_no_conditions(host):
    """None, and not 0: nothing may be concluded from it."""
    host["files"] = {}
    meter = ConditionsMeter()
    host["time"] = 1.0
    conditions = meter.conditions()
    unknown = (
        "busy_cores",
        "stolen_cores",
        "core_wait",
        "clock_hz",
        "memory_stall",
        "swap_bytes_per_s",
    )
    assert [getattr(conditions, name) for name in unknown] == [None] * len(unknown)


def test_too_short_a_time_has_no_load(host):
    """The kernel counts in ticks of 10 ms."""
    meter = ConditionsMeter()
    host.update(files=AFTER, time=0.05)
    assert meter.conditions().busy_cores is None


def test_restarting_forgets_what_was_before(host):
    """Such as the first step of an epoch."""
    meter = ConditionsMeter()
    host.update(files=AFTER, time=1.0)
    meter.restart()
    host["time"] = 2.0
    assert meter.conditions().busy_cores == 0.0


def test_what_the_ranks_use_themselves_is_no_other_load():
    """The busy cores of a host without those of all its ranks; the worst host counts."""
    ranks = [
        RankConditions(
            host="a", seconds=5.0, cores=4, busy_cores=2.5, process_cores=1.0, clock_hz=3e9
        ),
        RankConditions(
            host="a", seconds=5.0, cores=4, busy_cores=2.5, process_cores=1.0, clock_hz=3e9
        ),
        RankConditions(
            host="b", seconds=5.0, cores=4, busy_cores=1.9, process_cores=1.0, clock_hz=2e9
        ),
    ]
    combined = combine_conditions(ranks)
    assert combined.processes == 2
    assert combined.own_cores == pytest.approx(2.0)
    assert combined.other_cores == pytest.approx(0.9)
    assert combined.clock_hz == pytest.approx(2e9)
    assert combined.core_wait is None
    assert combine_conditions([]) is None


def test_the_quota_of_control_groups_of_version_1_counts(host):
    """In nanoseconds, in the group of the cpu controller."""
    path = "/sys/fs/cgroup/cpu,cpuacct/job/cpu.stat"
    group = {"/proc/self/cgroup": "1:name=systemd:/\n4:cpu,cpuacct:/job\n"}
    host["files"] = {**group, path: "nr_throttled 0\nthrottled_time 0\n"}
    meter = ConditionsMeter()
    host.update(files={**group, path: "nr_throttled 2\nthrottled_time 400000000\n"}, time=1.0)
    assert meter.conditions().quota_throttled == pytest.approx(0.4)


def test_this_machine_can_be_observed():
    """Whatever it reports; every figure is a number of its range."""
    meter = ConditionsMeter()
    sum(range(10**6))
    conditions = meter.conditions()
    assert conditions.seconds > 0
    assert conditions.process_cores >= 0
    assert conditions.page_fault_s >= 0
    assert conditions.product_s > 0
    assert conditions.copy_s > 0
