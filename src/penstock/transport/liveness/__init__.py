"""Heartbeats between ranks, and processes that have stopped."""
