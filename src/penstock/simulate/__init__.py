"""The simulator: from programs and costs to a timeline."""
