"""Asynchronous schedules as streams of batches: periods and increments."""
