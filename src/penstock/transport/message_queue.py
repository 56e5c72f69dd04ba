"""Queues of payloads between two processes of a host: `shared_memory.queue` with the layouts of
payloads.
"""

from __future__ import annotations

import torch

from penstock.shared_memory.mailbox import Mailbox
from penstock.shared_memory.queue import MAX_LAYOUTS, QueueReader, QueueWriter
from penstock.transport.layout import Layout, key_of
from penstock.transport.payload import Payload


class PayloadWriter(QueueWriter):
    """The sender's end of a queue of payloads."""

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        """Prepare to send. Arguments as of `QueueWriter`."""
        super().__init__(mailbox, rank)
        self._layouts: dict[tuple[object, ...], Layout] = {}

    def send(self, name: int, payload: Payload) -> int:
        """Copy the payload's tensors into a slot, enter it into the queue, and wake the receiver.

        Returns:
            The bytes of the slot that are used.

        Raises:
            OutOfSharedMemory: there is no memory for another message in flight.
        """
        layout = self._layouts.get(key_of(payload))
        if layout is None:
            layout = self._add_layout(payload)
        assert layout.pool is not None
        slot = self.arena.take(layout.pool)
        try:
            layout.put(slot, payload.leaves if layout.bare else payload.tensors)
            self.append(name, layout.number, slot.place)
        except BaseException:
            slot.free()
            raise
        self.notifier.notify()
        return layout.nbytes

    def _add_layout(self, payload: Payload) -> Layout:
        """Announce the payload's layout to the receiver."""
        description = payload.header().encode()
        number = self.announce_layout(description)
        if number % MAX_LAYOUTS == 0:
            self._layouts.clear()
        layout = self._layouts[key_of(payload)] = Layout.parse(number, description)
        layout.pool = self.arena.pool(layout.nbytes)
        return layout


class PayloadReader(QueueReader[Layout]):
    """The receiver's end of a queue of payloads, which returns tensors on `device`."""

    def __init__(self, mailbox: Mailbox, source: int, pid: int, device: torch.device) -> None:
        """Prepare to receive.

        Args:
            mailbox: the receiver's.
            source: the sender's rank.
            pid: the sender's process.
            device: where received tensors are put.
        """
        super().__init__(mailbox, source, pid, Layout.parse)
        self._device = None if device.type == "cpu" else device

    def take(self, name: int) -> Payload:
        """Copy out the oldest pending message of a name."""
        queue = self.pending[name]
        layout, slot = queue.popleft()
        if not queue:
            del self.pending[name]
        payload = layout.take(slot, self._device)
        slot.free()
        return payload
