"""Update of a stage's weights, and the tensors behind a weight rule: which memory an op reads, and
what an update does to it.
"""
