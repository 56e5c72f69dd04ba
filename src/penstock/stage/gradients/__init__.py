"""Gradients of the replicas of a stage: how they are summed, and which replica updates what."""
