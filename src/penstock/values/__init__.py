"""Nested values: their tensors and constants apart from how they nest, in one way for everything
that needs it.
"""
