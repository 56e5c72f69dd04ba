"""What weight rules do on tensors: one file each, found by the name that a rule's `arithmetic` has."""

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
    """The weights of one stage under a rule.

    Without an optimizer, or anything to train, there is one version, whatever the rule says:
    nothing makes another.

    Raises:
        SettingError: the rule's paper has no formula for this optimizer, or for how it is set.
    """
    optimizer = site.update.optimizer
    if optimizer is None or not site.update.parameters:
        return ARITHMETIC.find("newest").make(site)
    allowed = site.rule.optimizers
    if allowed and kind_of(optimizer) not in allowed:
        raise no_formula(
            site, type(optimizer).__name__, f"it goes with {' and '.join(_listed(allowed))}"
        )
    return ARITHMETIC.find(site.rule.arithmetic).make(site)


def kind_of(optimizer: Optimizer) -> str:
    """The name of torch's class that an optimizer is one of, or the next of kin to; else of its own
    class.

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
    """That a rule cannot say where weights go under such an optimizer."""
    because = f": {site.rule.because}" if site.rule.because else ""
    return SettingError(
        f"weight rule {site.rule.name!r} has no formula for {what}{because}; {instead} (stage {site.stage}; "
        f"source: {site.rule.source})"
    )


def _listed(names: tuple[str, ...]) -> list[str]:
    return [", ".join(names[:-1]), names[-1]] if len(names) > 1 else list(names)
