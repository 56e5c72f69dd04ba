"""Experiments: grids of cells, a runner, records of raw times, and reports."""
