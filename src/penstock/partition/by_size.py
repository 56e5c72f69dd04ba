"""torchgpipe's balance by memory."""

from __future__ import annotations

from penstock.partition.block import block_partition
from penstock.partition.catalogue import register
from penstock.partition.validation import check_number
from penstock.profile.profile import Profile


@register("size", source="Kim et al. 2020, torchgpipe, balance_by_size")
def by_size(
    profile: Profile,
    stages: int,
    batch: float | None = None,
    micro_batches: float = 1,
    param_scale: float = 2.0,
) -> list[int]:
    """Balance the bytes of the layers' outputs and parameters with `block_partition`.

    A layer costs output_bytes_per_sample * batch / micro_batches + parameter_bytes * param_scale.

    Options:
        batch: samples; None is the profile's own batch.
        micro_batches: number of micro-batches per batch.
        param_scale: memory of a parameter together with its gradient and optimizer state, as a
            multiple of the parameter's own bytes. torchgpipe's advice: SGD 2 to 3, Adam 4 to 5,
            Adadelta 4, Adagrad and RMSprop 3.

    Raises:
        PartitionError: `batch` or `micro_batches` is not a number above 0, or `param_scale` is
            below 0.
    """
    batch_samples = check_number("batch", profile.batch if batch is None else batch)
    samples = batch_samples / check_number("micro_batches", micro_batches)
    scale = check_number("param_scale", param_scale, zero=True)
    costs = [
        layer.output_bytes_per_sample * samples + layer.parameter_bytes * scale for layer in profile
    ]
    return block_partition(costs, stages)
