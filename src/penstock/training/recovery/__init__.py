"""Recovery of a stage's state from the ranks that hold another copy of the stage."""
