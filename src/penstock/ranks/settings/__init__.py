"""The run that all ranks agree on: its configuration, and what differs between ranks."""
