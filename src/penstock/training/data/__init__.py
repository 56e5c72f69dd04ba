"""Data sets by name, and their batches: one file per data set."""
