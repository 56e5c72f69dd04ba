"""On which machines shared memory is used."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.time_limits import HANG_S

from penstock.shared_memory import availability
from penstock.shared_memory.availability import SWITCH, unavailable_reason


def test_this_machine_is_judged_by_what_it_is():
    """The tests of this folder run where the answer is None."""
    linux = sys.platform == "linux" and os.uname().machine == "x86_64"
    assert (unavailable_reason() is None) == linux


@pytest.mark.parametrize("system", ["darwin", "win32", "freebsd14"])
def test_other_systems_are_named(monkeypatch, system):
    """They have no futex, and no memory that another process can open by number."""
    monkeypatch.setattr(availability.sys, "platform", system)
    assert unavailable_reason() == f"it needs Linux, and this system is {system}"


@pytest.mark.parametrize("machine", ["aarch64", "ppc64le", "riscv64", "i686"])
def test_other_processors_are_named(monkeypatch, machine):
    """They may show stores in another order than that of the program."""
    monkeypatch.setattr(availability.platform, "machine", lambda: machine)
    assert f"this is {machine}" in unavailable_reason()


def test_a_32_bit_python_on_x86_64_is_refused(monkeypatch):
    """Its futex system call has another number."""
    monkeypatch.setattr(availability.sys, "maxsize", 2**31 - 1)
    assert "64-bit" in unavailable_reason()


def test_the_environment_turns_it_off(monkeypatch):
    """To compare the two transports, and to rule one out when a run misbehaves."""
    monkeypatch.setenv(SWITCH, "0")
    assert unavailable_reason() == f"the environment variable {SWITCH} is 0"
    monkeypatch.setenv(SWITCH, "1")
    assert SWITCH not in (unavailable_reason() or "")


#: Takes away what only Linux has before the transport is imported.
OTHER_SYSTEM = """
import mmap, os, select
from torch.distributed import HashStore
for module, name in [
    (os, "memfd_create"), (os, "pidfd_open"), (os, "posix_fallocate"), (os, "sched_yield"),
    (select, "poll"), (mmap, "MAP_SHARED"), (mmap, "MAP_POPULATE"),
]:
    delattr(module, name)
from penstock.transport.same_host import SameHostTransport
end = SameHostTransport(0, 1.0)
end.connect(HashStore(), 1)
assert end.reachable == frozenset()
end.close()
"""


def test_the_transport_is_imported_and_connects_where_linux_calls_do_not_exist():
    """A name that is looked up at import would break training on macOS and Windows."""
    subprocess.run([sys.executable, "-c", OTHER_SYSTEM], check=True, timeout=HANG_S)


@pytest.mark.parametrize("name", ["memfd_create", "pidfd_open", "posix_fallocate"])
def test_each_call_of_the_system_is_needed(monkeypatch, name):
    """The first use of one that is missing would end the run."""
    monkeypatch.delattr(os, name)
    assert unavailable_reason() == f"this Python has no os.{name}"
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert unavailable_reason() == "this Python has no os.memfd_create"
