"""What a model is: a chain of layers. Names, shapes and sharing; no tensors."""
