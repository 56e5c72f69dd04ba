"""Train with a pipeline in one process: every rank is a thread.

Shows: chain, Pipeline, compare_with_one_device, timeline, save and load.
Story: seven layers are cut into three stages. The pipeline memorises random data, with the gradients
    of plain training, and continues from a checkpoint under another cut. Use threads for debugging
    and tests, and processes, as in the next example, for speed.
Takes: a few seconds on a CPU.
"""

import tempfile

import torch
from torch import nn

import penstock as ps

BATCH = 32

# With several threads, sums are split, and gradients would agree only within rounding.
torch.set_num_threads(1)
torch.manual_seed(0)
x, y = torch.randn(BATCH, 20), torch.randint(0, 5, (BATCH,))


def make_model() -> nn.Sequential:
    """Return seven layers with a dropout, whose numbers are the same under every cut."""
    return nn.Sequential(
        nn.Linear(20, 64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.Linear(64, 5),
    )


def make_pipeline(balance: list[int], schedule: str) -> ps.Pipeline:
    """Return a pipeline with one rank per stage of `balance`."""
    return ps.Pipeline(
        make_model(),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        balance=balance,
        schedule=schedule,
        micro_batches=4,
        executor="threads",
        device="cpu",
    )


print(
    ps.chain(make_model()).parameter_count, "parameters in", len(ps.chain(make_model())), "layers"
)

pipe = make_pipeline(balance=[3, 2, 2], schedule="1f1b")
gradients = pipe.compare_with_one_device(x, y).gradients
print(
    f"largest difference from plain training in any of {len(gradients)} gradients: {max(gradients.values()):g}"
)

stream = pipe.train((x, y) for _ in range(60))
losses = [float(loss) for loss in stream]
print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} batches")

print(
    "ops of rank 1 in the last batch:",
    *(str(event.op) for event in pipe.timeline().compute if event.rank == 1),
)

with tempfile.TemporaryDirectory() as folder:
    pipe.save(folder)
    other = make_pipeline(balance=[1, 6], schedule="gpipe")
    other.load(folder)
    same = torch.allclose(pipe.eval_batch(x, y), other.eval_batch(x, y))
    print("the same loss under another cut:", "yes" if same else "no")

pipe.close()
other.close()
