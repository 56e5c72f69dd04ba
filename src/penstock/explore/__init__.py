"""A local web page to play with a pipeline: its state, what is computed for it, and its server."""
