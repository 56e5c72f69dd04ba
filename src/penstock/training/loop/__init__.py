"""The training loop of a rank, what it logs, and what it returns."""
