"""Ranks: processes and threads, what they agree on, and their status."""
