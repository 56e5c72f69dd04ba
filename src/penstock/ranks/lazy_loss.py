"""The loss of a batch as a tensor whose value the host reads when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self, SupportsIndex

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class LazyLoss(Tensor):
    """A float32 scalar on an accelerator that is read at its first use.

    `train_batch` returns it where ranks exchange losses on their devices: a host that waited for
    each loss could not launch the next batch in time. Shape, dtype and device are known at once.
    Everything else, `float(loss)` and `loss.detach()` alike, waits for the device, and raises if
    the run has failed meanwhile: what comes after a failure is garbage.
    """

    _read: Callable[[], Tensor] | None
    _value: Tensor | None

    def __new__(cls, device: torch.device, read: Callable[[], Tensor]) -> Self:
        """Make a tensor without a value.

        Args:
            device: where the value will be.
            read: waits for the value and returns it as a float32 scalar tensor on the device.
        """
        loss: Self = torch.Tensor._make_wrapper_subclass(
            cls, (), dtype=torch.float32, device=device
        )
        loss._read, loss._value = read, None
        return loss

    def __init__(self, device: torch.device, read: Callable[[], Tensor]) -> None:
        """See `__new__`."""

    def value(self) -> Tensor:
        """Return the loss as a plain tensor.

        Raises:
            RunError: a rank has failed before the loss was there.
        """
        if self._value is None:
            assert self._read is not None
            self._value = self._read()
            self._read = None  # it refers to buffers of the batch
        return self._value

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an argument of its own
        """Show the value."""
        return repr(self.value())

    def __format__(self, format_spec: str) -> str:
        """Format the value as a number."""
        return format(self.value(), format_spec)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Copy and save the value."""
        return self.value().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy the value."""
        return self.value().clone()

    def tolist(self) -> Any:
        """Return the value as a number."""
        return self.value().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the value as an array; see `torch.Tensor.numpy`."""
        return self.value().numpy(force=force)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        """Run an op on the value."""
        del types
        args, kwargs = pytree.tree_map_only(cls, cls.value, (args, kwargs or {}))
        return func(*args, **kwargs)
