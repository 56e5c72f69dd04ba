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

    def make(example, lengths, names=NAMES, *, batch=None, **fields):
        weight_fields = {
            "synchronous": example.stream is None,
            "stream": example.stream,
            "slicing": example.slicing,
        }
        weight_fields["weights"] = "flush" if example.stream is None else example.stream.weights
        plan = Plan(
            "abc",
            names,
            tuple(lengths),
            example.name,
            example.lines,
            example.micro_batches,
            batch or 2 * example.micro_batches,
            "4xA",
            64,
            Prediction(0.5, 0.2, (1,) * example.ranks, 32.0, 0.9),
            example.options,
            **{**weight_fields, **fields},
        )
        plan.check()
        return plan

    return make
