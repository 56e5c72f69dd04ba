"""GPUs of this process: which there are, who uses which, and their collectives."""
