"""Planners, one file each, and the search for the best plan."""
