"""Counts of the floating-point operations and bytes of layers, from their ops."""
