"""Schedules that are built from the costs of the stages: one method per file."""
