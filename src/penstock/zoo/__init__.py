"""Models for experiments, each a chain of layers."""
