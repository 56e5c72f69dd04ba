"""Weight rules: which version of the weights a forward and a backward read; one file per rule."""
