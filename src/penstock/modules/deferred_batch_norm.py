"""Batch norm that normalises per micro-batch and updates its running statistics once per batch.

Plain batch norm in a pipeline updates them at every micro-batch: with m micro-batches, momentum is
applied m times, and the variance between micro-batches is lost. Here count, mean and sum of squared
deviations of the micro-batches are merged one by one, which loses no digits (Chan, Golub and
LeVeque 1979). After the last micro-batch the running statistics are updated as plain batch norm on
the whole batch would update them. Outputs are normalised by the micro-batch's own statistics, as in
plain batch norm on micro-batches.

The idea is torchgpipe's (Kim et al. 2020), which sums squares instead and keeps the biased
variance, where torch's is unbiased.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.errors import SettingError
from penstock.modules.recomputing import is_recomputing

#: Statistics of the current batch. They are buffers, so that a recomputation, which restores
#: buffers, restores them too; they are not in the `state_dict`.
_BATCH_STATISTICS = ("batch_mean", "batch_variance", "batch_count", "batch_seen")


class DeferredBatchNorm(_BatchNorm):
    """Result of `convert` for a batch norm layer, with all its tensors, settings and hooks.

    Attributes:
        kind: class of the original layer.
        micro_batches: number of micro-batches per batch.
        batch_mean, batch_variance: merged statistics; the variance is divided by the count.
        batch_count: number of values per channel so far.
        batch_seen: number of micro-batches so far.
    """

    kind: type[_BatchNorm]
    micro_batches: int
    batch_mean: Tensor
    batch_variance: Tensor
    batch_count: Tensor
    batch_seen: Tensor

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        """Normalise a micro-batch, (samples, channels, ...); in training, merge its statistics."""
        self.kind._check_input_dim(self, input)  # type: ignore[no-untyped-call]
        if not self.training:
            return functional.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                False,
                0.0,
                self.eps,
            )
        assert self.running_mean is not None
        # With momentum 1 these become the micro-batch's mean and unbiased variance, which every
        # backend computes anyway.
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_mean)
        output = functional.batch_norm(
            input, mean, variance, self.weight, self.bias, True, 1.0, self.eps
        )
        if not is_recomputing():
            self._merge(input.numel() // input.shape[1], mean, variance)
        return output

    @torch.no_grad()
    def _merge(self, count: int, mean: Tensor, variance: Tensor) -> None:
        """Merge one micro-batch's statistics; after the last, update the running statistics.

        There is no branch on a tensor, for which a GPU would have to synchronise.
        """
        dtype = torch.promote_types(mean.dtype, torch.float32)
        before = self.batch_count.to(dtype)
        self.batch_count += count
        self.batch_seen += 1
        total = self.batch_count.to(dtype)
        difference = mean.to(dtype) - self.batch_mean
        self.batch_mean += difference * (count / total)
        # Mean and variance of two sets are merged (Chan, Golub and LeVeque 1979). `variance` is
        # unbiased: times (count - 1) it is the sum of squares.
        weighted_variances = self.batch_variance * before + variance * (count - 1)
        self.batch_variance.copy_(
            weighted_variances / total + difference.square() * (before / total) * (count / total)
        )
        done = self.batch_seen >= self.micro_batches
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += done
        share = (
            1.0 / self.num_batches_tracked.clamp(min=1).to(dtype)
            if self.momentum is None
            else self.momentum
        )
        for running, new in (
            (self.running_mean, self.batch_mean),
            # torch's running variance is the unbiased one.
            (self.running_var, self.batch_variance * (total / (total - 1))),
        ):
            assert running is not None
            running.copy_(torch.where(done, running + (new - running) * share, running))
        for name in _BATCH_STATISTICS:
            getattr(self, name).masked_fill_(done, 0)

    def begin(self, micro_batches: int) -> None:
        """Start a batch of `micro_batches` micro-batches; drop statistics of an unfinished one."""
        self.micro_batches = micro_batches
        for name in _BATCH_STATISTICS:
            getattr(self, name).zero_()

    def reset_running_stats(self) -> None:
        """Reset the running statistics and those of the batch.

        Initialisation of a layer on the meta device calls this.
        """
        super().reset_running_stats()
        self.begin(self.micro_batches)

    def extra_repr(self) -> str:
        """Return torch's text with the number of micro-batches."""
        settings = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{settings}, micro_batches={self.micro_batches}"


def convert(module: nn.Module, micro_batches: int) -> nn.Module:
    """Defer the running statistics of all `nn.BatchNorm1d`, `2d` and `3d` that track them.

    Parameters, buffers and hooks stay the same objects, and names in `state_dict` stay the same.
    Subclasses with a forward of their own are not converted. Every use of a shared layer counts as
    a micro-batch, so it must be used once per forward.

    Args:
        module: changed in place, unless it is a batch norm itself.
        micro_batches: number of micro-batches per batch, at least 1. Before a batch with another
            number (a small last batch), call `begin`.

    Returns:
        `module`, or its replacement.

    Raises:
        SettingError: `micro_batches` is below 1; or there is a SyncBatchNorm, whose statistics span
            other processes.
    """
    if micro_batches < 1:
        raise SettingError(f"a batch has at least 1 micro-batch, not {micro_batches}")
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise SettingError(
                f"{name or 'the module'} is a SyncBatchNorm, which cannot be deferred: it takes "
                "its statistics over several processes. Use nn.BatchNorm, or do without "
                "deferred_batch_norm"
            )
    return _replace_modules(module, partial(_defer, micro_batches=micro_batches), {})


def _defer(part: nn.Module, micro_batches: int) -> nn.Module:
    """Return the deferred batch norm for a plain one; other modules as they are."""
    if isinstance(part, DeferredBatchNorm):
        part.begin(micro_batches)
        return part
    if (
        not isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
        or type(part).forward is not _BatchNorm.forward
        or not part.track_running_stats
    ):
        return part
    assert part.running_mean is not None
    layer: DeferredBatchNorm = _with_state_of(part, DeferredBatchNorm)
    layer._buffers = dict(part._buffers)
    layer._non_persistent_buffers_set = set(part._non_persistent_buffers_set)
    layer.kind, layer.micro_batches = type(part), micro_batches
    number = torch.zeros((), dtype=torch.int64, device=part.running_mean.device)
    templates = (part.running_mean, part.running_mean, number, number)
    for name, template in zip(_BATCH_STATISTICS, templates, strict=True):
        layer.register_buffer(name, torch.zeros_like(template), persistent=False)
    return layer


def revert(module: nn.Module) -> nn.Module:
    """Replace deferred batch norms by plain ones; see `convert` for what stays the same."""
    return _replace_modules(module, _plain, {})


def _plain(part: nn.Module) -> nn.Module:
    """Return the plain batch norm in place of a deferred one, with its state."""
    if not isinstance(part, DeferredBatchNorm):
        return part
    layer: _BatchNorm = _with_state_of(part, part.kind)
    layer._buffers = {
        name: buffer for name, buffer in part._buffers.items() if name not in _BATCH_STATISTICS
    }
    layer._non_persistent_buffers_set = part._non_persistent_buffers_set - set(_BATCH_STATISTICS)
    del layer.__dict__["kind"], layer.__dict__["micro_batches"]
    return layer


def check_not_traced(model: nn.Module) -> None:
    """Reject a traced model with batch norms that `convert` would defer: its graph calls no
    modules.

    Raises:
        SettingError: it has one.
    """
    for name, part in model.named_modules():
        if isinstance(part, _BatchNorm) and part.track_running_stats:
            raise SettingError(
                f"deferred_batch_norm is for models of layers, and {type(model).__name__} is "
                f"traced: the graph updates the running statistics of {name} at every micro-batch. "
                "Leave deferred_batch_norm out, or pass an nn.Sequential"
            )


def begin(module: nn.Module, micro_batches: int) -> None:
    """Start a batch of `micro_batches` micro-batches in all deferred batch norms in `module`."""
    for part in deferred_norms(module):
        part.begin(micro_batches)


def deferred_norms(module: nn.Module) -> Iterator[DeferredBatchNorm]:
    """Yield the deferred batch norms in `module`."""
    for part in module.modules():
        if isinstance(part, DeferredBatchNorm):
            yield part


def _with_state_of(part: nn.Module, kind: Any) -> Any:
    layer = kind.__new__(kind)
    # No copies: parameters, buffers and hooks stay the same objects.
    layer.__dict__.update(part.__dict__)
    return layer


def _replace_modules(
    module: nn.Module,
    replace: Callable[[nn.Module], nn.Module],
    replacements: dict[int, nn.Module],
) -> nn.Module:
    """Apply `replace` to a module and all its submodules; shared modules stay shared.

    Args:
        module: the module.
        replace: returns the replacement of a module.
        replacements: the replacements so far, by the id of the original.
    """
    if id(module) not in replacements:
        replacement = replace(module)
        replacements[id(module)] = replacement
        for name, child in list(replacement._modules.items()):
            if child is not None:
                replacement._modules[name] = _replace_modules(child, replace, replacements)
    return replacements[id(module)]
