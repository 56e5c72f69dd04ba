"""The minimal program with Penstock's Pipeline: planned, and one process per stage.

Shows: profile, cluster, plan, launch, Pipeline.
Story: `python train_penstock.py`. Cut, schedule and number of micro-batches are the planner's.
Takes: half a minute on a CPU.
"""

from torch.nn.functional import cross_entropy
from workload import BATCH, batches, make_model, make_optimizer, report

import penstock as ps


def train(plan: ps.Plan) -> list[float]:
    """Train on every rank, and return the losses."""
    pipe = ps.Pipeline(make_model(), plan, loss=cross_entropy, optimizer=make_optimizer)
    return [float(loss) for loss in pipe.train(batches())]


if __name__ == "__main__":
    sample, _ = next(batches())
    profile = ps.profile(make_model(), sample)
    plan = ps.plan(profile, ps.cluster("local:2"), batch=BATCH, stages=2)
    report(ps.launch(train, plan.ranks, plan)[0])
