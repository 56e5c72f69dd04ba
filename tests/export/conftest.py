"""Plans to export."""

import pytest

from penstock.plan.plan import Plan
from penstock.plan.prediction import Prediction

#: A transformer of twelve blocks: an embedding before them, norm and head behind.
NAMES = ("embedding", *(f"blocks.{block}" for block in range(12)), "norm", "head")


@pytest.fixture(scope="session")
def plan_of():
    """A plan from a schedule and lengths, of the layers of `NAMES` or others; other fields by
    keyword.
    """

    def make(made, lengths, names=NAMES, *, batch=None, **fields):
        own = {"synchronous": made.stream is None, "stream": made.stream, "slicing": made.slicing}
        own["weights"] = "flush" if made.stream is None else made.stream.weights
        found = Plan(
            "abc",
            names,
            tuple(lengths),
            made.name,
            made.lines,
            made.micro_batches,
            batch or 2 * made.micro_batches,
            "4xA",
            64,
            Prediction(0.5, 0.2, (1,) * made.ranks, 32.0, 0.9),
            made.options,
            **{**own, **fields},
        )
        found.check()
        return found

    return make
