"""Trainer, data, checkpoints, metrics."""
