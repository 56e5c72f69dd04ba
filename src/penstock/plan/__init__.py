"""All of what there is to do, in one value."""
