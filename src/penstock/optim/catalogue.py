"""Implementations of weight rules on tensors: one file each, found by the rule's `arithmetic`."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from penstock.errors import SettingError
from penstock.optim.stage_weights import Site, StageWeights
from penstock.registry import Registry

ARITHMETIC: Registry[Callable[[Site], StageWeights]] = Registry(
    "weight arithmetic", "penstock.optim"
)
register = ARITHMETIC.register


def stage_weights(site: Site) -> StageWeights:
    """Return the weights of one stage under its rule.

    Without an optimizer or trainable parameters there is a single version, whatever the rule, since
    no update creates another one.

    Raises:
        SettingError: the rule's paper has no formula for this optimizer or its options.
    """
    optimizer = site.update.optimizer
    if optimizer is None or not site.update.parameters:
        return ARITHMETIC.find("newest").make(site)
    allowed = site.rule.optimizers
    if allowed and kind_of(optimizer) not in allowed:
        supported = " and ".join(_join_names(allowed))
        raise no_formula(site, type(optimizer).__name__, f"it goes with {supported}")
    return ARITHMETIC.find(site.rule.arithmetic).make(site)


def kind_of(optimizer: Optimizer) -> str:
    """Return the name of the class of torch.optim from which an optimizer's class derives.

    The name of the optimizer's own class if there is none.

    >>> from torch import nn, optim
    >>> kind_of(optim.AdamW([nn.Parameter()]))
    'AdamW'
    """
    kinds = (
        kind
        for kind in type(optimizer).__mro__
        if kind.__module__.startswith("torch.optim.") and kind is not Optimizer
    )
    return next(kinds, type(optimizer)).__name__


def no_formula(site: Site, what: str, instead: str) -> SettingError:
    """Return the error that a rule has no formula for an optimizer or its options.

    Args:
        site: the stage and its rule.
        what: the optimizer, or its option, in words.
        instead: what to do.
    """
    because = f": {site.rule.because}" if site.rule.because else ""
    return SettingError(
        f"weight rule {site.rule.name!r} has no formula for {what}{because}; {instead} "
        f"(stage {site.stage}; source: {site.rule.source})"
    )


def _join_names(names: tuple[str, ...]) -> list[str]:
    # At most two parts, to be joined by "and".
    return [", ".join(names[:-1]), names[-1]] if len(names) > 1 else list(names)
