"""PipeMare: no stash and no flush, but corrected learning rates and backward weights."""

from __future__ import annotations

from penstock.weights.catalogue import register
from penstock.weights.rule_types import Place, Reads


@register(
    "pipemare",
    synchronous=False,
    arithmetic="corrected",
    one_version=True,
    extra=2.0,
    options={"decay": 0.135, "annealing": 100.0, "lockstep": 0.0, "warm_up": 0.0},
    source="Yang et al. 2021, PipeMare, section 3: techniques T1, T2, T3",
)
def pipemare(place: Place) -> Reads:
    """Read the newest version; the backward moves it back towards what its forward has read.

    τ is the delay of the stage, in updates. Three techniques:

    - T1, rescheduling: step k, from 0, has the learning rate lr / max(τ, 1)^(1 - min(k / annealing,
      1)).
    - T2, correction: backwards read W - τ δ. After each update, δ ← γ δ + (1 - γ) (W(k+1) - W(k)),
      γ = decay^(1/τ). Not used where τ = 0.
    - T3, warm-up: the first batches are run with a flush after each.

    The paper's τ, (2 (P - i) + 1) / N on stage i of P, from 1, with N micro-batches per batch,
    assumes a device that runs a forward and a backward at the same time. Here ranks run one op at a
    time, so τ is the mean staleness of the stage's gradients in the program, (p - 1 - s) at N = 1
    in 1F1B. Below 1 the learning rate is not changed; the available source does not specify this
    case. One version is kept, with δ and a working copy for what the backward reads. PipeMare
    Recompute corresponds to the recompute setting.

    Options:
        decay: D of T2, 0 to 1; the paper has e^-2 and tunes from 0.1 to 0.7.
        annealing: steps of T1; 0 disables it.
        lockstep: 1 uses the paper's τ instead of the program's.
        warm_up: batches of T3.
    """
    return Reads(place.at_forward, place.at_backward)
