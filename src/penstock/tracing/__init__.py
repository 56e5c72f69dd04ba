"""From nn.Module to a chain with its modules."""
