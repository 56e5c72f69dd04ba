"""What a model costs: seconds and bytes per layer and micro-batch size."""
