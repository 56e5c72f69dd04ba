"""The minimal program with torchgpipe 0.0.7.

Shows: balance_by_time, GPipe.
Story: `python train_torchgpipe.py`. One process drives both devices.
Takes: a few seconds on a CPU.
"""

from torch.nn.functional import cross_entropy
from torchgpipe import GPipe
from torchgpipe.balance import balance_by_time
from workload import MICRO_BATCHES, batches, make_model, make_optimizer, report

model = make_model()
sample, _ = next(batches())
balance = balance_by_time(2, model, sample, device="cpu")
model = GPipe(model, balance, devices=["cpu", "cpu"], chunks=MICRO_BATCHES)
optimizer = make_optimizer(model.parameters())
losses = []
for x, y in batches():
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses)
