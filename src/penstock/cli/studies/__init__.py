"""Parts of `penstock study`: studies from files, and of convergence."""
