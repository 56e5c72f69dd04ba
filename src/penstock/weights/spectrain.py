"""SpecTrain: both passes read weights predicted by momentum for the end of the batch."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.op import Schedule
from penstock.weights.batch_shares import shares_of_batches
from penstock.weights.catalogue import check_synchronised_copies, register
from penstock.weights.rule_types import Place, Reads


def _check(schedule: Schedule) -> None:
    """Check that batches have one micro-batch per rank."""
    check_synchronised_copies(schedule)
    maximum = shares_of_batches(schedule)[1]
    if maximum > 1:
        raise ScheduleError(
            "weight rule 'spectrain' has distances for batches of one micro-batch, and "
            f"{schedule.name} has {maximum} on a rank: give micro_batches=1, or take 'xpipe' or "
            "'pipeoptim', whose distances are for several"
        )


@register(
    "spectrain",
    synchronous=False,
    arithmetic="predicted",
    one_version=True,
    extra=1.0,
    check=_check,
    optimizers=("SGD",),
    because="it predicts by the momentum of SGD",
    source="Chen et al. 2018, Efficient and robust parallel DNN training (SpecTrain), section 3",
)
def spectrain(place: Place) -> Reads:
    """Predict the version at the moment when the batch's gradient reaches stage 0.

    Ŵ = W - lr · distance · v, where v is the momentum; on stage k of N the distance is
    floor(k / 2) + N - k - 1 before a forward and floor(k / 2) before a backward: N = 4 has 3, 2, 2,
    1 and 0, 0, 1, 1. Gradients are taken at Ŵ and applied to W. One version is kept, and a working
    copy with the prediction.

    The paper's v is an exponential average, γ v + (1 - γ) g, with its own learning rate. torch's is
    momentum · v + g: the same steps with lr scaled by 1 - γ, and so the same prediction. Before the
    first update there is no v, and W itself is read.

    Refused: optimizers without momentum, and Nesterov's momentum, for which the paper has no
    formula; batches of several micro-batches, for which its distances, which count a batch per
    micro-batch, would be too long.
    """
    half = place.stage // 2
    return Reads(place.at_forward, place.at_backward, half + place.stages - place.stage - 1, half)
