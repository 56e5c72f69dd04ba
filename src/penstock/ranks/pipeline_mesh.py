"""The place of a pipeline in a `DeviceMesh` of torch."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import SettingError

#: Name of the dimension of pipeline stages.
PIPELINE = "pp"

_HOW = (
    "mesh = init_device_mesh('cpu', (stages, copies), mesh_dim_names=('pp', 'dp')), and then "
    "Pipeline(..., mesh=mesh['pp'])"
)


@dataclass(frozen=True)
class PipelineMesh:
    """The processes of a pipeline in a mesh.

    Attributes:
        pipeline: ranks in the job of the pipeline's processes, in the order of the mesh.
    """

    pipeline: tuple[int, ...]

    @classmethod
    def of(cls, mesh: object) -> PipelineMesh | None:
        """Return the place of this process in a mesh; None without a mesh.

        Raises:
            SettingError: the object is not a mesh whose only dimension is "pp", or this process is
                not in it.
        """
        if mesh is None:
            return None
        if not isinstance(mesh, DeviceMesh):
            raise SettingError(f"mesh is a torch DeviceMesh, not {type(mesh).__name__}: {_HOW}")
        names = mesh.mesh_dim_names or ()
        if names != (PIPELINE,):
            raise SettingError(
                "the mesh of a Pipeline has the dimension 'pp' alone, and this one has "
                f"{', '.join(map(repr, names)) or 'no names'}: {_HOW}. Copies of the pipeline "
                "average their gradients in the caller's loop, see docs/mesh.md"
            )
        if mesh.get_coordinate() is None:
            raise SettingError(f"this process is not in the mesh {mesh}: {_HOW}")
        return cls(tuple(int(rank) for rank in mesh.mesh.tolist()))
