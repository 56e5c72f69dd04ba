"""Conversion of an nn.Module into a chain of layers with its modules."""
