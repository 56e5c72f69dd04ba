"""A loss that is read when it is used: by any operation, once, and not before."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from penstock.errors import RunError
from penstock.ranks.lazy_loss import LazyLoss

CPU = torch.device("cpu")


def counted(value=0.5):
    """A lazy loss, and the list to which each read adds 1."""
    reads = []

    def read():
        """Return the value."""
        reads.append(1)
        return torch.tensor(value)

    return LazyLoss(CPU, read), reads


def saved(loss):
    """The loss after it was written and read."""
    file = io.BytesIO()
    torch.save(loss, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


USES = {
    "float": float,
    "item": torch.Tensor.item,
    "tolist": lambda loss: loss.tolist(),
    "numpy": lambda loss: float(loss.numpy()),
    "detach": torch.Tensor.detach,
    "cpu": torch.Tensor.cpu,
    "add": lambda loss: loss + 0.0,
    "add to a number": lambda loss: 0.0 + loss,
    "in place": lambda loss: torch.zeros(()).add_(loss),
    "stack": lambda loss: torch.stack([loss, loss])[1],
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "save": saved,
    "format": lambda loss: float(f"{loss:.3f}"),
    "double": torch.Tensor.double,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_gives_the_value_and_reads_it_once(use):
    """Used as any other tensor; the device is waited for once."""
    loss, reads = counted()
    assert float(use(loss)) == 0.5
    assert float(use(loss)) == 0.5
    assert reads == [1]


def test_a_loss_that_nobody_uses_is_not_read():
    """The host would wait. Its form is known."""
    loss, reads = counted()
    assert isinstance(loss, torch.Tensor)
    assert (loss.dtype, loss.shape, loss.dim()) == (torch.float32, (), 0)
    assert (loss.device, loss.numel(), loss.requires_grad) == (CPU, 1, False)
    assert reads == []


def test_text_shows_the_value():
    """As that of any other tensor."""
    loss, _ = counted()
    assert repr(loss) == str(loss) == "tensor(0.5000)"
    assert (f"{loss:.3f}", f"{loss:6.1e}") == ("0.500", "5.0e-01")


def test_comparisons_read_the_value():
    """As with any other tensor."""
    loss, _ = counted()
    assert loss > 0.4
    assert torch.isfinite(loss)
    assert loss == 0.5


def test_a_run_that_has_failed_is_reported_where_the_loss_is_used():
    """What would be read is garbage."""

    def read():
        """Fail."""
        raise RunError("rank 1 is gone")

    loss = LazyLoss(CPU, read)
    for _ in range(2):
        with pytest.raises(RunError, match="rank 1 is gone"):
            float(loss)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved, torch.Tensor.clone])
def test_a_copy_shares_no_memory_with_the_loss(copied):
    """Whoever changes it must not change the loss of others."""
    loss, _ = counted()
    copied(loss).zero_()
    assert float(loss) == 0.5
    assert float(copied(loss)) == 0.5


def test_operations_on_several_losses_read_each_of_them():
    """In lists and keyword arguments as well."""
    first, first_reads = counted(1.0)
    second, second_reads = counted(2.0)
    assert float(torch.stack([first, second]).sum()) == 3.0
    assert float(torch.add(first, other=second, alpha=10)) == 21.0
    assert (first_reads, second_reads) == ([1], [1])
    assert first._read is None, "it refers to buffers of the batch"


def test_a_loss_is_on_the_device_of_its_rank_before_it_is_read():
    """Callers may ask for the device to make other tensors there."""
    loss = LazyLoss(torch.device("meta"), lambda: torch.zeros((), device="meta"))
    assert (loss.device.type, loss.dtype) == ("meta", torch.float32)
    assert loss._value is None
