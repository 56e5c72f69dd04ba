"""A pipeline in a `DeviceMesh` of torch: its processes, copies of it, and the batches of copies."""
