"""Modules and their backward, whole or in two parts."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.grad.split import input_grad, weight_grad


class Pair(nn.Module):
    """Two linear maps of width 4; the tests define their own forward."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)


def random(*shape, seed=0):
    """Return numbers that depend on shape and seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensors(output):
    """Return a stage's outputs as a list."""
    return list(output) if isinstance(output, (tuple, list)) else [output]


@dataclass
class Run:
    """A module, its inputs as leaves, the outputs, and their gradients."""

    module: nn.Module
    inputs: list[Tensor]
    roots: list[Tensor]
    grads: list[Tensor | None]

    @classmethod
    def of(cls, module, forward, inputs, keep=None):
        """Run the forward of a copy of `module`, so that runs share nothing; `keep` selects the
        outputs with a gradient.
        """
        module = copy.deepcopy(module)
        leaves = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
        torch.manual_seed(7)
        roots = [root for root in tensors(forward(module, *leaves)) if root.requires_grad]
        grads: list[Tensor | None] = [random(*root.shape, seed=i) for i, root in enumerate(roots)]
        if keep is not None:
            grads = [grad if has_grad else None for grad, has_grad in zip(grads, keep, strict=True)]
        return cls(module, [leaf for leaf in leaves if leaf.requires_grad], roots, grads)

    def whole(self):
        """Run autograd's own backward."""
        live = [
            (root, grad)
            for root, grad in zip(self.roots, self.grads, strict=True)
            if grad is not None
        ]
        if live:
            torch.autograd.backward([root for root, _ in live], [grad for _, grad in live])
        return [leaf.grad for leaf in self.inputs]

    def split(self):
        """Run the split backward."""
        grads, pending = input_grad(self.roots, self.grads, self.inputs)
        assert all(leaf.grad is None for leaf in self.inputs)
        weight_grad(pending)
        return grads

    def weight_grads(self):
        """Return the gradients of all parameters."""
        return {name: parameter.grad for name, parameter in self.module.named_parameters()}


def call(module, *inputs):
    """Call the module."""
    return module(*inputs)
