"""Full, input-only and weight-only backward; recompute."""
