"""One stage: its layers, what it saves between forward and backward, and its replicas."""
