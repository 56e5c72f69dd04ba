"""Layers of the models of the zoo. They import torch, which the catalogue of models does not."""
