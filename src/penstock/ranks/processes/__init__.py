"""Processes of ranks: how they start, what they report, and how they end."""
