"""Weight updates of a stage, and the weight versions that its ops read."""
