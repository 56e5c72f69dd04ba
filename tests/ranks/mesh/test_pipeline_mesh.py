"""Places of processes in meshes of all shapes, without process groups."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import SettingError
from penstock.ranks.mesh.pipeline_mesh import PipelineMesh


class Mesh(DeviceMesh):
    """A mesh that has ranks, names and a coordinate alone."""

    def __init__(self, ranks, names, coordinate) -> None:
        self.ranks, self.names, self.coordinate = ranks, names, coordinate

    mesh = property(lambda self: self.ranks)
    mesh_dim_names = property(lambda self: self.names)

    def get_coordinate(self):
        """Where this process is."""
        return self.coordinate

    def get_group(self, dimension):
        """Name a group."""
        return f"group of {dimension}"

    def __repr__(self) -> str:
        return "a mesh"


SIZES = {"pp": 3, "dp": 2, "tp": 4}


@pytest.mark.parametrize("names", [("pp",), ("pp", "dp"), ("pp", "tp"), ("pp", "dp", "tp")])
def test_ranks_are_numbered_copy_after_copy_at_the_coordinate_of_this_process(names):
    """A slow reference: a loop over copies and stages, for every process of the mesh."""
    shape = [SIZES[name] for name in names]
    count = 1
    for extent in shape:
        count *= extent
    # Ranks of the job are not in order in the mesh.
    numbers = [(7 * n + 5) % count for n in range(count)]
    ranks = torch.tensor(numbers).reshape(shape)
    sizes = {name: SIZES[name] if name in names else 1 for name in SIZES}

    def rank_at(stage, copy, number):
        place = {"pp": stage, "dp": copy, "tp": number}
        return int(ranks[tuple(place[name] for name in names)])

    def pipeline_at(number):
        order = itertools.product(range(sizes["dp"]), range(sizes["pp"]))
        return tuple(rank_at(stage, copy, number) for copy, stage in order)

    for coordinate in itertools.product(*map(range, shape)):
        mesh = Mesh(ranks, names, list(coordinate))
        place = PipelineMesh.of(mesh)
        number = coordinate[-1] if "tp" in names else 0
        assert place.mesh is mesh
        assert (place.stages, place.copies, place.width) == (3, sizes["dp"], sizes["tp"])
        assert place.coordinate == number
        assert place.pipeline == pipeline_at(number)
        assert place.pipelines == [pipeline_at(other) for other in range(sizes["tp"])]
        assert place.dimensions == names
        assert place.group("dp") == "group of dp"
        for rank in range(3 * sizes["dp"]):
            assert place.copy_of(rank) == rank // 3
    assert PipelineMesh.of(None) is None


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (None, "has no names: mesh = init_device_mesh"),
        (("dp", "pp"), "has 'dp', 'pp': "),
        (("pp", "tp", "dp"), "has 'pp', 'tp', 'dp'"),
        (("pp", "dp", "cp"), "has 'pp', 'dp', 'cp'"),
        (("dp",), "has 'dp'"),
    ],
)
def test_other_dimensions_or_orders_are_refused_with_their_names(names, text):
    """A mesh in another order would mix stages and copies."""
    ranks = torch.zeros([1] * len(names or [1]), dtype=torch.int64)
    with pytest.raises(SettingError, match=text):
        PipelineMesh.of(Mesh(ranks, names, [0, 0, 0]))


def test_a_process_outside_of_the_mesh_and_what_is_no_mesh_are_refused():
    """Both with how to make one."""
    with pytest.raises(SettingError, match="not in the mesh a mesh: mesh = init_device_mesh"):
        PipelineMesh.of(Mesh(torch.zeros(1), ("pp",), None))
    with pytest.raises(SettingError, match="mesh is a torch DeviceMesh, not tuple: mesh = init"):
        PipelineMesh.of((2, 2))
