"""Schedules that are made for the costs of the stages: one method per file."""
