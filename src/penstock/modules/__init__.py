"""Layers with special needs: skips, side losses, batch norms, random numbers, initial values."""
