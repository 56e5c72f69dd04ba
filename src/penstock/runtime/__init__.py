"""The interpreter of programs, and Pipeline."""
