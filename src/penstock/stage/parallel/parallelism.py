"""Apply the caller's `parallelize=` to the layers of a stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import SettingError
from penstock.ranks.mesh.pipeline_mesh import COPIES, TENSOR, PipelineMesh
from penstock.ranks.process_world import DistributedWorld
from penstock.ranks.settings.run_config import RunConfig
from penstock.ranks.world import World
from penstock.schedule.op import ACTIVATION_MOVES, Kind
from penstock.schedule.recompute import Recompute
from penstock.stage.training_options import TrainingOptions
from penstock.tracing.traced_chain import TracedChain
from penstock.values.sharded import is_sharded

if TYPE_CHECKING:
    from penstock.stage.parallel.parallel_stage import ParallelStage

#: Called with the layers of a stage and the mesh of the pipeline; changes the layers in place.
Parallelize = Callable[[list[nn.Module], DeviceMesh], Any]


@dataclass(frozen=True)
class Parallelism:
    """How the layers of stages are shared between processes.

    Attributes:
        mesh: the place of this process.
        function: the caller's.
    """

    mesh: PipelineMesh
    function: Parallelize

    @classmethod
    def of(
        cls,
        mesh: PipelineMesh | None,
        options: TrainingOptions,
        setting: RunConfig,
        traced: TracedChain,
    ) -> Parallelism | None:
        """Return how layers are shared; None if every process has its own.

        Args:
            mesh: the place of this process.
            options: the caller's.
            setting: what is run.
            traced: the model, whose layers are whole.

        Raises:
            SettingError: the function or its dimension of the mesh is missing; a setting is not
                possible for such layers; or the layers are shared already.
        """
        function = options.parallelize
        for module in traced.modules:
            if any(map(is_sharded, module.parameters())):
                raise SettingError(
                    f"{type(module).__name__} has weights that processes share already: construct "
                    "the Pipeline from whole layers, and share them in parallelize=, which is "
                    "called with the layers of each stage, see docs/mesh.md"
                )
        if function is None:
            if mesh is not None and mesh.width > 1:
                raise SettingError(
                    f"the dimension 'tp' of the mesh has {mesh.width} processes that share the "
                    "layers of a rank: give the function that divides them, parallelize=, see "
                    "docs/mesh.md; or pass mesh=mesh['pp', 'dp'] or mesh['pp']"
                )
            return None
        if mesh is None or not {COPIES, TENSOR} & {*mesh.dimensions}:
            raise SettingError(
                "parallelize= shares the layers of a stage between the processes of a dimension "
                "'dp' or 'tp': give mesh= with one of them, see docs/mesh.md"
            )
        _check_supported(setting, options)
        return cls(mesh, function)

    def apply(self, index: int, layers: Sequence[nn.Module]) -> ParallelStage:
        """Share the layers of a stage between processes.

        They start with the weights of the first process.

        Args:
            index: the stage.
            layers: its layers, with weights.

        Raises:
            SettingError: the function does not change the layers in place, or shares them over
                another dimension.
        """
        # It imports FSDP, which takes a second that other pipelines need not spend.
        from penstock.stage.parallel.parallel_stage import ParallelStage

        for layer in layers:
            for tensor in (*layer.parameters(), *layer.buffers()):
                self._share(tensor.detach())
        modules = list(layers)
        result = self.function(modules, self.mesh.mesh)
        returned = modules
        if isinstance(result, (nn.Module, list, tuple)):
            returned = [result] if isinstance(result, nn.Module) else [*result]
        layer_ids = {id(layer) for layer in layers}
        if [*map(id, modules)] != [*map(id, layers)] or not {*map(id, returned)} <= layer_ids:
            raise SettingError(
                "parallelize= has returned or inserted other modules: it must change the layers "
                "in place, as fully_shard(layer, mesh=mesh['dp']) and parallelize_module(layer, "
                "mesh['tp'], plan) do"
            )
        return ParallelStage(index, modules, self.mesh)

    def watch_groups(self, world: World) -> None:
        """Close the groups of the shared layers, too, when the run is stopped."""
        assert isinstance(world, DistributedWorld)
        for name in self._shared_dimensions:
            group = self.mesh.group(name)
            if dist.get_backend(group) == "gloo":
                world.watch_group(group)

    @property
    def writes(self) -> bool:
        """Whether this process writes checkpoints for all that share its layers."""
        return self.mesh.coordinate == 0

    def all_agree(self, *, success: bool) -> bool:
        """Return whether an action has succeeded on all processes that share this one's layers.

        Args:
            success: whether it has on this one.
        """
        if self.mesh.width == 1:
            return success
        failures = torch.tensor([not success], dtype=torch.int32, device=self.mesh.mesh.device_type)
        dist.all_reduce(failures, group=self.mesh.group(TENSOR))
        return not failures.item()

    def _share(self, tensor: Tensor) -> None:
        """Copy a tensor of the first process to all that share the stage or have a copy of it."""
        for name in self._shared_dimensions:
            # A copy only if the tensor is not contiguous, so that what arrives is copied back.
            content = tensor.contiguous()
            message = content.view(-1).view(torch.uint8)  # gloo has few dtypes
            dist.broadcast(message, group=self.mesh.group(name), group_src=0)
            tensor.copy_(content)

    @property
    def _shared_dimensions(self) -> list[str]:
        """The dimensions of the mesh over which a stage's weights are the same, or divided."""
        return [name for name in (TENSOR, COPIES) if name in self.mesh.dimensions]


def _check_supported(setting: RunConfig, options: TrainingOptions) -> None:
    """Reject what layers that processes share do not support.

    Raises:
        SettingError: it is requested.
    """
    schedule = setting.schedule
    kinds = {op.kind for op in schedule.ops}
    refused = {
        f"{schedule.name}, which is asynchronous": schedule.stream is not None,
        f"{schedule.name}, which slices micro-batches": schedule.slicing is not None,
        f"{schedule.name}, which splits backwards": Kind.W in kinds,
        f"{schedule.name}, which moves activations": bool(kinds & {*ACTIVATION_MOVES}),
        "recompute of single layers": setting.recompute is Recompute.SELECTIVE,
        "compile": options.compiled is not None,
        "offload": bool(options.offload),
        "memory_format": options.memory_format is not None,
        "deferred_batch_norm": options.deferred_batch_norm,
    }
    words = [word for word, requested in refused.items() if requested]
    if words:
        raise SettingError(
            f"parallelize= is not possible with {' and '.join(words)}: leave it out, or use "
            "schedule='1f1b', 'gpipe' or 'interleaved', recompute='always', and mesh= "
            "without parallelize="
        )
