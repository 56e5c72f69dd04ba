"""The place of a pipeline in a `DeviceMesh` of torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import SettingError

#: Names of the dimensions: pipeline stages, copies of the pipeline, devices that share layers.
PIPELINE, COPIES, TENSOR = "pp", "dp", "tp"

_HOW = (
    "mesh = init_device_mesh('cpu', (stages, copies), mesh_dim_names=('pp', 'dp')), and then "
    "Pipeline(..., mesh=mesh), or mesh=mesh['pp'] for pipelines that do not share gradients"
)


@dataclass(frozen=True)
class PipelineMesh:
    """The processes of a pipeline and its copies in a mesh.

    Ranks of the pipeline are numbered copy after copy: rank r of copy n is rank r + n * `stages`.

    Attributes:
        mesh: the mesh that the caller gave.
        pipeline: ranks in the job of the pipeline's processes, by rank in the pipeline.
        stages: number of ranks of one copy.
        copies: number of copies.
        width: number of processes that share the layers of a rank.
        coordinate: number of this process among these.
    """

    mesh: DeviceMesh
    pipeline: tuple[int, ...]
    stages: int
    copies: int = 1
    width: int = 1
    coordinate: int = 0

    @classmethod
    def of(cls, mesh: object) -> PipelineMesh | None:
        """Return the place of this process in a mesh; None without a mesh.

        Raises:
            SettingError: the object is not a mesh with the dimension "pp" and, after it, "dp" or
                "tp", or this process is not in it.
        """
        if mesh is None:
            return None
        if not isinstance(mesh, DeviceMesh):
            raise SettingError(f"mesh is a torch DeviceMesh, not {type(mesh).__name__}: {_HOW}")
        names = mesh.mesh_dim_names or ()
        in_order = [name for name in (PIPELINE, COPIES, TENSOR) if name in names]
        if names[:1] != (PIPELINE,) or list(names) != in_order:
            raise SettingError(
                "the mesh of a Pipeline has the dimension 'pp', then 'dp' for copies, and then "
                f"'tp' for layers that processes share, and this one has "
                f"{', '.join(map(repr, names)) or 'no names'}: {_HOW}"
            )
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise SettingError(f"this process is not in the mesh {mesh}: {_HOW}")
        grid = _grid(mesh)
        number = coordinate[names.index(TENSOR)] if TENSOR in names else 0
        stages, copies, width = grid.shape
        return cls(mesh, _in_order(grid, number), stages, copies, width, number)

    @property
    def dimensions(self) -> tuple[str, ...]:
        """The names of the dimensions of the mesh."""
        return self.mesh.mesh_dim_names or ()

    def group(self, dimension: str) -> dist.ProcessGroup:
        """Return the process group of this process in a dimension of the mesh."""
        return self.mesh.get_group(dimension)

    @property
    def pipelines(self) -> list[tuple[int, ...]]:
        """For each process that shares the layers of a rank, what `pipeline` is on it."""
        grid = _grid(self.mesh)
        return [_in_order(grid, number) for number in range(self.width)]

    def copy_of(self, rank: int) -> int:
        """Return the copy that a rank of the pipeline belongs to."""
        return rank // self.stages


def _grid(mesh: DeviceMesh) -> Tensor:
    """Return the ranks of a mesh, with all three dimensions."""
    names, ranks = mesh.mesh_dim_names or (), mesh.mesh
    for position, name in enumerate((PIPELINE, COPIES, TENSOR)):
        if name not in names:
            ranks = ranks.unsqueeze(position)
    return ranks


def _in_order(grid: Tensor, number: int) -> tuple[int, ...]:
    """Return the ranks at a coordinate of the dimension "tp", copy after copy."""
    return tuple(int(rank) for rank in grid[:, :, number].t().flatten().tolist())
