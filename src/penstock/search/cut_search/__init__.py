"""Search over cuts: lower bounds, local search, and stages with replicas."""
