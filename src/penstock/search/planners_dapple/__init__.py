"""The innermost loop of DAPPLE's planner."""
