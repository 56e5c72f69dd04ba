"""DeepSpeed's PipelineModule: 1F1B over gloo. A cut of one's choice takes a subclass.

Its compiled all-reduce for CPUs is switched off: every rank would compile it at its start, and
pipelines send from one rank to one other.
"""

from __future__ import annotations

import itertools

from torch import Tensor, nn

from penstock.peers.catalogue import Step, register
from penstock.peers.job import Job, join

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
    "deepspeed",
    about="PipelineModule, one process per stage; clipping off (its default clips to a norm of 1)",
    imports=("deepspeed", "deepspeed.pipe"),
    packages=PACKAGES,
    schedules=("1f1b",),
    options={"recompute": (0, 1)},
    variables={"DS_ACCELERATOR": "cpu", "DS_IGNORE_CUDA_DETECTION": "1"},
)
def make(job: Job) -> Step:
    """Make the engine. Layers are built on the rank that holds them."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    join(job)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", init_method="env://", verbose=False)
    bounds = list(itertools.accumulate(job.setup.lengths, initial=0))

    class CutModule(PipelineModule):  # type: ignore[misc]
        """A PipelineModule with the stages of the setup."""

        def _partition_layers(self, method: str = "") -> None:
            """Cut as the setup says, whatever the method."""
            del method
            self.parts = bounds
            stage = self._topo.get_coord(self.global_rank).pipe
            self._set_bounds(start=bounds[stage], stop=bounds[stage + 1])

    class SetupLayer(LayerSpec):  # type: ignore[misc]
        """A layer of the setup, built where it is needed."""

        def __init__(self, index: int) -> None:
            super().__init__(nn.Module)
            self.index = index

        def build(self, log: bool = False) -> nn.Module:
            """Return the layer with its initial weights."""
            del log
            return job.layers(self.index, self.index + 1)[0]

    network = CutModule(
        [SetupLayer(index) for index in range(bounds[-1])],
        num_stages=job.spec.ranks,
        loss_fn=job.loss,
        activation_checkpoint_interval=job.option("recompute", 0),
    )
    micro_batches = job.setup.micro_batches
    settings = {
        "train_micro_batch_size_per_gpu": job.setup.batch // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        # Never: printing would be a part of the time.
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(
        model=network, config=settings, optimizer=job.optimizer(network.parameters())
    )

    # Whether DeepSpeed adds data parallelism by itself, as the study of it supposes.
    job.notes["data_parallel_size"] = int(engine.dp_world_size)
    job.notes["pipeline_stages"] = int(engine.num_stages)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        """Train one batch."""
        parts = zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True)
        loss: Tensor = engine.train_batch(iter(parts))
        return loss

    return step
