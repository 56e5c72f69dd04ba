"""The minimal program with torch.distributed.pipelining.

Shows: PipelineStage, Schedule1F1B.
Story: `torchrun --nproc-per-node 2 train_torch_pipelining.py`. One process per stage; the model is
    cut by hand, and the last stage has the losses.
Takes: half a minute on a CPU.
"""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from workload import MICRO_BATCHES, batches, make_model, make_optimizer, report

dist.init_process_group("gloo")
rank = dist.get_rank()
model = make_model()
part = model[:5] if rank == 0 else model[5:]
stage = PipelineStage(part, rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=cross_entropy)
optimizer = make_optimizer(part.parameters())
losses = []
for x, y in batches():
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(x)
    else:
        parts = []
        schedule.step(target=y, losses=parts)
        losses.append(torch.stack(parts).mean().item())
    optimizer.step()
if rank == 1:
    report(losses)
dist.destroy_process_group()
