"""Losses of micro-batches, and their weights in the loss of the batch."""
