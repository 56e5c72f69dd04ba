"""DeepSpeed's PipelineModule: 1F1B over gloo. Custom cuts take a subclass of it.

Its compiled all-reduce for CPUs is left out: every rank would build it when it begins, and
pipelines send from one to one.
"""

from __future__ import annotations

import itertools

from job import Job, join
from torch import nn

from adapters.catalogue import Step, register

PACKAGES = (
    "deepspeed==0.19.8",
    "einops",
    "hjson",
    "msgpack",
    "ninja",
    "psutil",
    "py-cpuinfo",
    "tqdm",
)


@register(
    "deepspeed 1f1b",
    peer="deepspeed",
    imports=("torch", "deepspeed", "deepspeed.pipe"),
    packages=PACKAGES,
    variables=(("DS_ACCELERATOR", "cpu"),),
)
def make(job: Job) -> Step:
    """Layers are made where they are held; the engine makes the steps of the optimizer."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    join(job)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", init_method="env://", verbose=False)
    bounds = list(itertools.accumulate(job.spec.cuts.lengths, initial=0))

    class Planned(PipelineModule):
        def _partition_layers(self, method: str = "") -> None:
            del method
            self.parts = bounds
            stage = self._topo.get_coord(self.global_rank).pipe
            self._set_bounds(start=bounds[stage], stop=bounds[stage + 1])

    class Layer(LayerSpec):
        def __init__(self, index: int) -> None:
            super().__init__(nn.Module)
            self.index = index

        def build(self, log: bool = False) -> nn.Module:
            del log
            return job.layers(self.index, self.index + 1)[0]

    net = Planned(
        [Layer(index) for index in range(bounds[-1])], num_stages=job.spec.ranks, loss_fn=job.loss
    )
    x, y = job.batch()
    count = job.cell.micro_batches
    settings = {
        "train_micro_batch_size_per_gpu": len(x) // count,
        "gradient_accumulation_steps": count,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,  # its default clips to a norm of 1
    }
    engine, *_ = deepspeed.initialize(
        model=net, config=settings, optimizer=job.optimizer(net.parameters())
    )
    data = itertools.cycle(zip(x.chunk(count), y.chunk(count), strict=True))
    return lambda: engine.train_batch(data)
