"""A clock that the test sets, and a store whose waits end soon."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import HashStore


def store_of():
    """Return a store whose own waits end soon: no test needs one."""
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=100))
    return store


class Clock:
    """Seconds that pass in `sleep` and in waits alone; `share` of them are computed."""

    def __init__(self) -> None:
        self.now_s, self.used_s, self.share = 100.0, 0.0, 0.0

    def sleep(self, seconds):
        """Let time pass."""
        self.now_s += seconds
        self.used_s += seconds * self.share

    def monotonic(self):
        """As time.monotonic."""
        return self.now_s

    def process_time(self):
        """As time.process_time."""
        return self.used_s
