"""What there is to run on: devices and links."""
