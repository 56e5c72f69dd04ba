"""Measurements of layers, devices and links."""
