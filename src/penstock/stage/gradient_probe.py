"""A probe of a gradient: the sum of the elements of a small one, which shows NaN and infinities.

It is taken after every backward. On the CPU torch takes 2.5 µs for the sum of 64 elements, and a
dot product with ones in NumPy, on the gradient's memory, 0.7 µs.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.values.sharded import local_part

#: Most elements for which NumPy is used. With more, its overhead hardly matters, and its library of
#: linear algebra may start threads.
_MAX_NUMPY = 4096

_NUMPY_DTYPES = (torch.float32, torch.float64)


class GradientProbe:
    """The sum of the gradient of one parameter, which is accumulated over micro-batches.

    Args:
        parameter: the parameter.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._grad: Tensor | None = None
        self._address = 0
        # The gradient's memory if NumPy is used, and as many ones.
        self._elements: NDArray[np.floating] | None = None
        self._ones: NDArray[np.floating] = np.ones(0)

    def total(self) -> float | Tensor | None:
        """Return the sum: a number on the CPU, where it may be complex, else a tensor.

        Returns None without a gradient, and for a sparse one.
        """
        grad = self._parameter.grad
        if grad is None:
            return None
        # An optimizer that sets gradients to None, or a hook, replaces the tensor or its memory.
        if grad is not self._grad or grad.data_ptr() != self._address:
            self._attach(grad)
        if self._elements is not None:
            number: float = self._elements.dot(self._ones)
            return number
        if grad.is_sparse:
            return None
        total = local_part(grad).sum()
        return total.item() if total.is_cpu else total

    def _attach(self, grad: Tensor) -> None:
        """Prepare the sums of a gradient that accumulates in the same memory from now on."""
        self.release()
        suited = (
            type(grad) is Tensor
            and grad.is_cpu
            and grad.layout is torch.strided
            and not grad.requires_grad
            and grad.dtype in _NUMPY_DTYPES
            and grad.numel() <= _MAX_NUMPY
            and grad.is_contiguous()
        )
        if not suited:
            return
        self._grad, self._address = grad, grad.data_ptr()
        self._elements = grad.numpy().reshape(-1)
        if self._ones.dtype != self._elements.dtype or self._ones.size != self._elements.size:
            self._ones = np.ones_like(self._elements)

    def release(self) -> None:
        """Do not keep the gradient alive any longer."""
        self._grad = self._elements = None
        self._address = 0
