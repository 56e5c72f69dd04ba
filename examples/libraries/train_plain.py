"""Plain training on one device: what the other programs start from.

Shows: a training loop without a pipeline.
Story: `python train_plain.py`.
Takes: a few seconds on a CPU.
"""

from torch.nn.functional import cross_entropy
from workload import batches, make_model, make_optimizer, report

model = make_model()
optimizer = make_optimizer(model.parameters())
losses = []
for x, y in batches():
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses)
