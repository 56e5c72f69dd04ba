"""A batch on its way through a pipeline: micro-batches, slices, and copies on devices."""
