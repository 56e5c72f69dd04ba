"""What a pipeline saves and loads: model, optimizers, weight averages, checkpoints."""
