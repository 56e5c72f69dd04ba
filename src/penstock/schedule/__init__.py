"""A schedule is a program: for every rank, an ordered list of ops."""
