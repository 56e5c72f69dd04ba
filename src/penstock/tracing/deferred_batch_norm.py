"""Batch norm that normalises by micro-batch, and updates its running statistics once per batch, by
the whole batch's.

Plain batch norm in a pipeline updates them at every micro-batch: with m of them, momentum works m
times, and the variance between micro-batches is in no average. Here each micro-batch's count, mean
and sum of squared deviations are merged as they come, which loses no digits (Chan, Golub and
LeVeque 1979), and after the batch's last one the running statistics are updated as plain batch norm
on the whole batch would have. What is normalised by stays the micro-batch's own: outputs are those
of plain batch norm on micro-batches.

The idea is torchgpipe's (Kim et al. 2020), which sums squares instead and keeps the biased
variance, where torch's is unbiased.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.errors import SettingError
from penstock.tracing.recomputing import is_recomputing

#: Its own state: buffers, so that who runs a forward again and restores buffers restores these too;
#: not in any `state_dict`.
_PARTIAL = ("batch_mean", "batch_variance", "batch_count", "batch_seen")


class DeferredBatchNorm(_BatchNorm):
    """Made by `convert` of a batch norm layer, of which it has all tensors, settings and hooks."""

    kind: type[_BatchNorm]
    micro_batches: int
    batch_mean: Tensor
    batch_variance: Tensor
    batch_count: Tensor
    batch_seen: Tensor

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        """Normalise a micro-batch, (samples, channels, ...); in training, take note of its
        statistics.
        """
        self.kind._check_input_dim(self, input)  # type: ignore[no-untyped-call]
        counts = self.training and not is_recomputing()
        if not self.training or not counts:
            mean, variance = (
                (None, None) if self.training else (self.running_mean, self.running_var)
            )
            return functional.batch_norm(
                input, mean, variance, self.weight, self.bias, self.training, 0.0, self.eps
            )
        assert self.running_mean is not None
        # With momentum 1 these become the micro-batch's mean and unbiased variance, which every
        # backend has at hand anyway.
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_mean)
        made = functional.batch_norm(
            input, mean, variance, self.weight, self.bias, True, 1.0, self.eps
        )
        self._take_in(input.numel() // input.shape[1], mean, variance)
        return made

    @torch.no_grad()
    def _take_in(self, count: int, mean: Tensor, variance: Tensor) -> None:
        """Merge one micro-batch's statistics; after the last, update. Without a branch on a tensor,
        for which a GPU would wait.
        """
        kind = torch.promote_types(mean.dtype, torch.float32)
        before = self.batch_count.to(kind)
        self.batch_count += count
        self.batch_seen += 1
        total = self.batch_count.to(kind)
        difference = mean.to(kind) - self.batch_mean
        self.batch_mean += difference * (count / total)
        within = self.batch_variance * before + variance * (count - 1)
        self.batch_variance.copy_(
            within / total + difference.square() * (before / total) * (count / total)
        )
        done = self.batch_seen >= self.micro_batches
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += done
        share = (
            1.0 / self.num_batches_tracked.clamp(min=1).to(kind)
            if self.momentum is None
            else self.momentum
        )
        for running, new in (
            (self.running_mean, self.batch_mean),
            (self.running_var, self.batch_variance * (total / (total - 1))),
        ):
            assert running is not None
            running.copy_(torch.where(done, running + (new - running) * share, running))
        for name in _PARTIAL:
            getattr(self, name).masked_fill_(done, 0)

    def begin(self, micro_batches: int) -> None:
        """A batch of so many micro-batches begins: what an unfinished one has left is dropped."""
        self.micro_batches = micro_batches
        for name in _PARTIAL:
            getattr(self, name).zero_()

    def reset_running_stats(self) -> None:
        """As torch's own; whoever gives a layer from the meta device memory comes by here."""
        super().reset_running_stats()
        self.begin(self.micro_batches)

    def extra_repr(self) -> str:
        """Torch's own, and how many micro-batches a batch has."""
        return f"{super().extra_repr()}, micro_batches={self.micro_batches}"  # type: ignore[no-untyped-call]


def convert(module: nn.Module, micro_batches: int) -> nn.Module:
    """Let all `nn.BatchNorm1d`, `2d` and `3d` in `module` that track running statistics defer them.

    Parameters, buffers and hooks stay the same objects, and names in `state_dict` the same names.
    Subclasses with a forward of their own stay as they are. A shared layer counts every use as a
    micro-batch, so it must be used once per forward.

    Args:
        module: changed in place, unless it is a batch norm itself.
        micro_batches: how many a batch has, at least 1. Where it differs (a small last batch),
        `begin` must say so before the batch.

    Returns:
        `module`, or what takes its place.

    Raises:
        SettingError: `micro_batches` is below 1; or there is a SyncBatchNorm, whose statistics span
        other processes.
    """
    if micro_batches < 1:
        raise SettingError(f"a batch has at least 1 micro-batch, not {micro_batches}")
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise SettingError(
                f"{name or 'the module'} is a SyncBatchNorm, which cannot be deferred: it takes its statistics over "
                "several processes. Use nn.BatchNorm, or do without deferred_batch_norm"
            )

    def deferred(part: nn.Module) -> nn.Module:
        if isinstance(part, DeferredBatchNorm):
            part.begin(micro_batches)
            return part
        kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        if (
            not isinstance(part, kinds)
            or type(part).forward is not _BatchNorm.forward
            or not part.track_running_stats
        ):
            return part
        assert part.running_mean is not None
        made: DeferredBatchNorm = _with_the_state_of(part, DeferredBatchNorm)
        made._buffers, made._non_persistent_buffers_set = (
            dict(part._buffers),
            set(part._non_persistent_buffers_set),
        )
        made.kind, made.micro_batches = type(part), micro_batches
        number = torch.zeros((), dtype=torch.int64, device=part.running_mean.device)
        for name, like in zip(
            _PARTIAL, (part.running_mean, part.running_mean, number, number), strict=True
        ):
            made.register_buffer(name, torch.zeros_like(like), persistent=False)
        return made

    return _replaced(module, deferred, {})


def revert(module: nn.Module) -> nn.Module:
    """Plain batch norm again where `convert` has been; see there for what stays."""

    def plain(part: nn.Module) -> nn.Module:
        if not isinstance(part, DeferredBatchNorm):
            return part
        made: _BatchNorm = _with_the_state_of(part, part.kind)
        made._buffers = {
            name: buffer for name, buffer in part._buffers.items() if name not in _PARTIAL
        }
        made._non_persistent_buffers_set = part._non_persistent_buffers_set - set(_PARTIAL)
        del made.__dict__["kind"], made.__dict__["micro_batches"]
        return made

    return _replaced(module, plain, {})


def begin(module: nn.Module, micro_batches: int) -> None:
    """Tell all deferred batch norms in `module` that a batch of so many micro-batches begins."""
    for part in deferring(module):
        part.begin(micro_batches)


def deferring(module: nn.Module) -> Iterator[DeferredBatchNorm]:
    """The deferred batch norms in `module`."""
    for part in module.modules():
        if isinstance(part, DeferredBatchNorm):
            yield part


def _with_the_state_of(part: nn.Module, kind: Any) -> Any:
    made = kind.__new__(kind)
    made.__dict__.update(part.__dict__)
    return made


def _replaced(module: nn.Module, replace: Any, made: dict[int, nn.Module]) -> nn.Module:
    """`module` with `replace` applied to all its parts; one that stands in several places stays
    one.
    """
    if id(module) not in made:
        found: nn.Module = replace(module)
        made[id(module)] = found
        for name, child in list(found._modules.items()):
            if child is not None:
                found._modules[name] = _replaced(child, replace, made)
    return made[id(module)]
