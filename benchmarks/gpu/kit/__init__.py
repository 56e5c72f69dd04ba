"""What the sections of the GPU benchmark share."""
