"""Stages, the interpreter, executors, Pipeline."""
