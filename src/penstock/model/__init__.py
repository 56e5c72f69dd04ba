"""Description of a model as a chain of layers: names, shapes and sharing, without tensors."""
