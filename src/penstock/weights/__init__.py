"""Which weight version a forward and a backward read: one file per rule."""
