"""A rank's memory."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from penstock.errors import RunError
from penstock.transport import host_memory, process_group
from penstock.transport.host_memory import disable_memory_trimming, trim_memory

#: Page faults of taking and leaving the same 64 MiB ten times over.
PROGRAM = """
import resource, sys
from penstock.transport.host_memory import disable_memory_trimming
disabled = disable_memory_trimming() if "keep" in sys.argv else False
import torch
def turn():
    parts = [torch.ones(2**20) for _ in range(16)]
turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    turn()
print(disabled, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_what_is_freed_is_not_fetched_from_the_system_again():
    """Fresh pages have to be cleared: a fifth of the step of VGG-11 on 2 ranks went into that."""
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM, "keep"], capture_output=True, text=True, check=True
    ).stdout.split()
    if printed[0] == "False":
        pytest.skip("another C library, or the environment says how memory is to be had")
    assert int(printed[1]) < 16384, "10 x 64 MiB are 163,840 pages"


@pytest.mark.parametrize(
    "name",
    [
        "MALLOC_TRIM_THRESHOLD_",
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TOP_PAD_",
        "MALLOC_MMAP_MAX_",
        "GLIBC_TUNABLES",
    ],
)
def test_what_the_environment_says_of_memory_stands(name, monkeypatch):
    """Who sets it knows his program."""
    monkeypatch.setenv(name, "1")
    assert not disable_memory_trimming()


def test_other_systems_are_left_alone(monkeypatch):
    """They have no mallopt."""
    monkeypatch.setattr(host_memory.sys, "platform", "darwin")
    assert not disable_memory_trimming()
    trim_memory()


@pytest.mark.parametrize("initialised", [False, True], ids=["by Penstock", "by the program"])
def test_ranks_keep_freed_memory_whoever_initialises_the_group(monkeypatch, initialised):
    """Steps in a group of the program's own took 1.5 times as long without."""
    calls = []
    monkeypatch.setattr(process_group, "disable_memory_trimming", lambda: calls.append("disabled"))
    monkeypatch.setattr(process_group.dist, "is_initialized", lambda: initialised)
    monkeypatch.setattr(process_group.dist, "get_world_size", lambda: 1)
    monkeypatch.delenv("RANK", raising=False)
    if initialised:
        assert process_group.join() == 1
    else:
        with pytest.raises(RunError, match="this process is alone"):
            process_group.join()
    assert calls == ["disabled"]


class Library:
    """A C library that notes the calls of its allocator."""

    def __init__(self, calls, functions, succeeds=True):
        for name in functions:
            setattr(self, name, lambda *given, name=name: calls.append((name, *given)) or succeeds)


@pytest.fixture
def library(monkeypatch):
    """Replace the C library; no variable of the allocator is set."""
    monkeypatch.setattr(host_memory.sys, "platform", "linux")
    for name in host_memory._USER_SETTINGS:
        monkeypatch.delenv(name, raising=False)

    def replace(*functions, succeeds=True):
        calls = []
        fake = Library(calls, functions, succeeds)
        monkeypatch.setattr(host_memory, "ctypes", SimpleNamespace(CDLL=lambda _: fake))
        return calls

    return replace


def test_both_thresholds_of_glibc_are_raised(library):
    """Either of them alone would return blocks to the system."""
    calls = library("mallopt", "gnu_get_libc_version", "malloc_trim")
    assert disable_memory_trimming()
    assert calls == [("mallopt", -3, 2**30), ("mallopt", -1, 2**30)]
    trim_memory()
    assert calls[2:] == [("malloc_trim", 0)]


def test_a_refusal_of_the_allocator_or_another_library_is_told(library):
    """The caller may say so; musl has no such option."""
    library("mallopt", "gnu_get_libc_version", succeeds=False)
    assert not disable_memory_trimming()
    for functions in (["mallopt"], ["gnu_get_libc_version"], []):
        calls = library(*functions)
        assert not disable_memory_trimming()
        trim_memory()
        assert calls == []
