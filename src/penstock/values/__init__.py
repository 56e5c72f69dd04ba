"""Nested values: split into their leaves (tensors and constants) and the structure in which they
nest.
"""
