"""The hardware that a plan is for: devices and links."""
