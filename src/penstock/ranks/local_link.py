"""Measure the link between two processes of this host."""

from __future__ import annotations

from penstock.cluster.device import Link
from penstock.measure.link import measure_link
from penstock.ranks.process_world import join
from penstock.ranks.processes.launch import launch


def measure_local_link() -> Link:
    """Start two ranks and measure latency and bandwidth of messages between them.

    Raises:
        RunError: the ranks cannot be started, or cannot exchange messages.
    """
    link: Link = launch(_measure, 2)[0]
    return link


def _measure() -> Link:
    join()
    return measure_link()
