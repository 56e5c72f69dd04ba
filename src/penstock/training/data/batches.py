"""Dataset: tensors to train and to test with. Batches: the same on every rank, whatever else draws
random numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from penstock.errors import SettingError


# eq=False: the equality of tensors is a tensor, so a field-by-field == would raise; two data sets
# are equal when they are the same.
@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and what is to be learned from them, to train and to test with. Everything is on the
    CPU.

    Task `classify`: inputs (n, channels, height, width) float32, targets (n,) int64 in
    0..classes-1. Task `next_token`: inputs and targets (n, tokens) int64 in 0..classes-1; targets
    are the inputs moved by one.

    Task `translate`: inputs (n, 2, tokens) int64, the source and what of the target is known before
    each of its tokens; targets (n, tokens) int64.

    `classes` is the size of the vocabulary where there are tokens. `description` is one line for
    people: what the data is, where it comes from, how much of it there is.
    """

    name: str
    train_inputs: torch.Tensor = field(repr=False)
    train_targets: torch.Tensor = field(repr=False)
    test_inputs: torch.Tensor = field(repr=False)
    test_targets: torch.Tensor = field(repr=False)
    classes: int
    task: Literal["classify", "next_token", "translate"]
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
    """One epoch of batches: every sample once, in an order that depends on `seed` and `epoch` only.

    Every rank gets the same order, and the global random generators are neither read nor moved, so
    that dropout is the same whether the data is shuffled or not. The arguments are checked here and
    now, not at the first batch.

    Args:
        inputs: (n, ...).
        targets: (n, ...).
        batch: samples per batch, at least 1; the last batch has what remains.
        seed: one order for each seed,
        epoch: and another for each epoch.
        shuffle: False keeps the samples in their own order.
        drop_last: leave out a last batch that is smaller than the others.

    Returns:
        Pairs (batch, ...), (batch, ...): copies, on the device of `inputs` and `targets`.

    Raises:
        SettingError: the batch is below 1, inputs and targets differ in number, or not one batch
        comes of it.
    """
    samples = len(inputs)
    if samples != len(targets):
        raise SettingError(
            f"{samples} inputs and {len(targets)} targets: every input needs its own target"
        )
    count = count_batches(samples, batch, drop_last=drop_last)
    if count == 0:
        # Not an empty epoch: who trains for a number of steps would go round it for ever.
        raise SettingError(
            f"no batch of {batch} can be made of {samples} samples{' with drop_last' if drop_last else ''}: "
            "ask for a smaller batch or give more samples"
        )
    order = _order(samples, seed, epoch) if shuffle else torch.arange(samples, device="cpu")
    return _gather(
        inputs, targets, [order[start : start + batch] for start in range(0, count * batch, batch)]
    )


def count_batches(samples: int, batch: int, *, drop_last: bool = False) -> int:
    """How many batches an epoch of `samples` samples has.

    >>> count_batches(1437, 128), count_batches(1437, 128, drop_last=True)
    (12, 11)

    Raises:
        SettingError: the batch is below 1.
    """
    check_count("batch", batch)
    return samples // batch if drop_last else -(-samples // batch)


def check_count(word: str, number: object) -> None:
    """Refuse what is not a whole number of 1 or more; `word` says in the message whose number it
    is.

    Raises:
        SettingError: it is not.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise SettingError(f"{word} is a whole number of 1 or more, not {number!r}")


def _order(samples: int, seed: int, epoch: int) -> torch.Tensor:
    # Hashed rather than added: with seed + epoch, epoch 1 of seed 0 would be epoch 0 of seed 1, and
    # the seeds of a study
    # would share all but one of their orders. Four bytes, because torch's CPU generator takes no
    # more from a seed.
    digest = hashlib.sha256(f"{int(seed)} {int(epoch)}".encode()).digest()
    own = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:4], "little"))
    return torch.randperm(samples, generator=own, device="cpu")


def _gather(
    inputs: torch.Tensor, targets: torch.Tensor, parts: list[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for part in parts:
        yield inputs[part.to(inputs.device)], targets[part.to(targets.device)]
