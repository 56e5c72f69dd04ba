"""Partitioning: where to cut a model into stages, one file per method."""
