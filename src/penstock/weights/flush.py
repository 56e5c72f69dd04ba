"""Flush: the pipeline drains before every update, so that all of a batch reads one version."""

from __future__ import annotations

from penstock.weights.catalogue import register


@register("flush", synchronous=True, source="Huang et al. 2019, GPipe, section 2: gradients of all micro-batches, one update")
def flush(in_flight: int) -> int:  # noqa: ARG001 - other rules keep a version for each
    """One version, however many micro-batches are in flight."""
    return 1
