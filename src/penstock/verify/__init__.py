"""Verification of schedules: order, placement, channels, weight versions."""
