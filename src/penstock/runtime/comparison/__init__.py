"""A pipeline held against plain training on one device."""
