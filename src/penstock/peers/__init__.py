"""Ways to train, of Penstock and of other libraries: how to install, start, time and end each."""
