"""Every planner by name, one file each."""
