"""Is it sound? Order, placement, channels, weight versions."""
