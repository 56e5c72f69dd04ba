"""Flags and tables of `penstock profile`: clusters, devices, and profiles for `penstock plan`."""
