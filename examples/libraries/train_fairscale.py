"""The minimal program with FairScale 0.4.13.

Shows: balance_by_time, Pipe.
Story: `python train_fairscale.py`. One process drives both devices.
Takes: a few seconds on a CPU.
"""

from fairscale.nn import Pipe
from fairscale.nn.pipe.balance import balance_by_time
from torch.nn.functional import cross_entropy
from workload import MICRO_BATCHES, batches, make_model, make_optimizer, report

model = make_model()
sample, _ = next(batches())
balance = balance_by_time(2, model, sample, device="cpu")
model = Pipe(model, balance, devices=["cpu", "cpu"], chunks=MICRO_BATCHES)
optimizer = make_optimizer(model.parameters())
losses = []
for x, y in batches():
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses)
del model  # otherwise the interpreter waits at its end for threads that it has stopped
