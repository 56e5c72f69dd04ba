"""Schedule families, one per file; each registers a function that generates the schedule."""
