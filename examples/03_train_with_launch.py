"""Train with one process per rank, started from a script or a notebook.

Shows: profile, cluster, plan, launch, Pipeline with a plan.
Story: this program profiles a model, plans a pipeline for two ranks of this machine, and trains it
    on handwritten digits in two processes. Every rank runs the same function with the same data.
Takes: half a minute on two cores. Needs scikit-learn (the extra `data`) for the digits.
"""

import torch
from torch.nn.functional import cross_entropy

import penstock as ps
from penstock.plan.plan import Plan
from penstock.training.data.batches import batches
from penstock.training.data.catalogue import dataset
from penstock.zoo.catalogue import model

BATCH = 64
EPOCHS = 3


def make_model(device: str) -> torch.nn.Sequential:
    """Return four linear layers with ReLU between them: two million parameters."""
    return model("mlp", device=device, features=64, hidden=1024, layers=4, classes=10)


def train(plan: Plan) -> list[str]:
    """Train on every rank, and return the lines to print."""
    digits = dataset("digits")
    x, y = digits.train_inputs.flatten(1), digits.train_targets
    pipe = ps.Pipeline(
        make_model("meta"),  # no memory: each rank initialises its stages from the seed
        plan,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        seed=0,
    )
    lines = []
    for epoch in range(EPOCHS):
        for loss in pipe.train(batches(x, y, BATCH, seed=0, epoch=epoch)):
            last = float(loss)
        right = pipe.forward(digits.test_inputs.flatten(1)).argmax(1) == digits.test_targets
        lines.append(f"epoch {epoch}: loss {last:.3f}, test accuracy {right.float().mean():.1%}")
    measured = pipe.timeline().makespan
    lines.append(
        f"a step: {plan.predicted.step_s * 1000:.1f} ms predicted, {measured * 1000:.1f} ms the last one"
    )
    pipe.close()
    return lines


if __name__ == "__main__":
    example = torch.randn(BATCH, 64)
    profile = ps.profile(make_model("meta"), example, batch=BATCH, threads=1)
    plan = ps.plan(profile, ps.cluster("local:2"), batch=BATCH, stages=2)
    print(plan)
    lines = ps.launch(train, plan.ranks, plan)
    print("\n".join(lines[0]))
