"""Search for the shortest program: list scheduling, local search, bounds, and proof."""
