"""The study of torchgpipe, FairScale and DeepSpeed: its published tables, their simulation, and the
same cells run here.
"""
