"""The penstock command: one file per verb."""
