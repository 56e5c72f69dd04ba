"""Python state that a forward reads: recorded while tracing, watched afterwards."""
