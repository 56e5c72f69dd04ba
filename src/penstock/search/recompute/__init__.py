"""Choose the layers to recompute so that a pipeline fits in memory."""
