"""Profiles: seconds and bytes of a model's layers, by micro-batch size."""
