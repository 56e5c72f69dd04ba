"""The minimal program with DeepSpeed 0.19.8.

Shows: PipelineModule, initialize, train_batch.
Story: `torchrun --nproc-per-node 2 train_deepspeed.py`, on a CPU with DS_ACCELERATOR=cpu in the
    environment. One process per stage; the engine splits batches and updates the weights. The
    cut balances parameters, its default.
Takes: half a minute on a CPU.
"""

import deepspeed
from deepspeed.pipe import PipelineModule
from torch.nn.functional import cross_entropy
from workload import BATCH, BATCHES, MICRO_BATCHES, batches, make_model, make_optimizer, report

deepspeed.init_distributed()
model = PipelineModule(make_model(), num_stages=2, loss_fn=cross_entropy)
config = {
    "train_micro_batch_size_per_gpu": BATCH // MICRO_BATCHES,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "gradient_clipping": 0.0,  # the default clips gradients to a norm of 1
}
engine, *_ = deepspeed.initialize(
    model=model, config=config, optimizer=make_optimizer(model.parameters())
)
data = batches(BATCH // MICRO_BATCHES)
losses = [engine.train_batch(data).item() for _ in range(BATCHES)]
if engine.global_rank == 0:
    report(losses)
