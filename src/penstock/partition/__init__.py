"""Where to cut: one file per method."""
