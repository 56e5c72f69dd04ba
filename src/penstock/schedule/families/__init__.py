"""One file per schedule family; each registers a function that returns programs."""
