"""The minimal program with Penstock's Pipe: a module in the loop of plain training.

Shows: profile, partition, Pipe.
Story: `python train_penstock_pipe.py`. One process drives both devices.
Takes: a few seconds on a CPU.
"""

from torch.nn.functional import cross_entropy
from workload import MICRO_BATCHES, batches, make_model, make_optimizer, report

import penstock as ps

model = make_model()
sample, _ = next(batches())
balance = ps.partition(ps.profile(model, sample), 2)
model = ps.Pipe(model, balance, devices=["cpu", "cpu"], chunks=MICRO_BATCHES)
optimizer = make_optimizer(model.parameters())
losses = []
for x, y in batches():
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses)
