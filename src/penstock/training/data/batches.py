"""Dataset: tensors to train and to test with. Batches: the same on every rank, independent of other
random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from penstock.errors import SettingError

if TYPE_CHECKING:
    import torch


# eq=False: comparing tensors gives a tensor, so a field-by-field == would raise. Data sets compare
# by identity.
@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs and targets, to train and to test with. All tensors are on the CPU.

    Task `classify`: inputs (n, channels, height, width) float32, targets (n,) int64 in
    0..classes-1.

    Task `next_token`: inputs and targets (n, tokens) int64 in 0..classes-1; targets are the inputs
    shifted by one.

    Task `translate`: inputs (n, 2, tokens) int64, the source, and the target's tokens so far before
    each token; targets (n, tokens) int64.

    Task `regress`: inputs (n, ...), targets (n, ...) float32.

    `classes` is the size of the vocabulary if there are tokens. `description` is one line on the
    contents, the source and the size of the data.
    """

    name: str
    train_inputs: torch.Tensor = field(repr=False)
    train_targets: torch.Tensor = field(repr=False)
    test_inputs: torch.Tensor = field(repr=False)
    test_targets: torch.Tensor = field(repr=False)
    classes: int
    task: Literal["classify", "next_token", "translate", "regress"]
    description: str


def batches(
    inputs: torch.Tensor,
    targets: torch.Tensor,
    batch: int,
    *,
    seed: int,
    epoch: int,
    shuffle: bool = True,
    drop_last: bool = False,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return one epoch of batches: every sample once, in an order that depends on `seed` and
    `epoch` only.

    Every rank gets the same order, and the global random generators are not used, so that dropout
    is the same whether the data is shuffled or not. The arguments are checked at the call, not at
    the first batch.

    Args:
        inputs: (n, ...).
        targets: (n, ...).
        batch: samples per batch, at least 1; the last batch has the remainder.
        seed: of the order.
        epoch: number of the epoch; each has another order.
        shuffle: False keeps the samples in their own order.
        drop_last: leave out a last batch that is smaller than the others.

    Returns:
        Pairs (batch, ...), (batch, ...): copies, on the device of `inputs` and `targets`.

    Raises:
        SettingError: the batch is below 1, inputs and targets differ in number, or there is not a
            single batch.
    """
    samples = len(inputs)
    if samples != len(targets):
        raise SettingError(
            f"{samples} inputs and {len(targets)} targets: every input needs its own target"
        )
    count = count_batches(samples, batch, drop_last=drop_last)
    if count == 0:
        # An empty epoch is refused: a caller that trains for a number of steps would loop forever.
        condition = " with drop_last" if drop_last else ""
        raise SettingError(
            f"no batch of {batch} can be made of {samples} samples{condition}: choose a smaller "
            "batch or provide more samples"
        )
    import torch

    from penstock.batches.sample_order import sample_order

    order = sample_order(samples, seed, epoch) if shuffle else torch.arange(samples, device="cpu")
    indices = [order[start : start + batch] for start in range(0, count * batch, batch)]
    return _select(inputs, targets, indices)


def count_batches(samples: int, batch: int, *, drop_last: bool = False) -> int:
    """Return the number of batches in an epoch of `samples` samples.

    >>> count_batches(1437, 128), count_batches(1437, 128, drop_last=True)
    (12, 11)

    Raises:
        SettingError: the batch is below 1.
    """
    check_count("batch", batch)
    return samples // batch if drop_last else -(-samples // batch)


def check_count(name: str, number: object) -> None:
    """Refuse anything but a whole number of 1 or more; `name` is the option's, for the message.

    Raises:
        SettingError: it is not.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise SettingError(f"{name} is a whole number of 1 or more, not {number!r}")


def _select(
    inputs: torch.Tensor, targets: torch.Tensor, batch_indices: list[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield inputs and targets of each batch."""
    for indices in batch_indices:
        yield inputs[indices.to(inputs.device)], targets[indices.to(targets.device)]
