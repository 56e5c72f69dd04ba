"""Shared memory between processes of one host: segments, slots, mailboxes and queues."""
