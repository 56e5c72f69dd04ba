"""Stages whose layers processes share: FSDP2 over "dp" and tensor parallelism over "tp".

In float64. Weights equal those of plain training to 1e-12, since sums have another order, unless a
test says that they are equal to the bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import penstock as ps
from penstock.errors import FileError, RanksDiffer
from penstock.ranks.process_world import join

WORDS = 11
#: Steps before the checkpoint, and in all.
SAVED, STEPS = 3, 5
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


class Block(nn.Module):
    """The feed-forward part of a transformer layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add the result to the input."""
        hidden = torch.relu(self.up(self.norm(x)))
        return x + self.dropout(self.down(hidden))


def model(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a small language model of four layers."""
    torch.manual_seed(0)
    layers = [nn.Embedding(WORDS, 8), Block(dropout), Block(dropout), nn.Linear(8, WORDS)]
    return nn.Sequential(*layers).to(dtype)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over all tokens that are not ignored."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-1)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer with state."""
    return torch.optim.AdamW(parameters, lr=0.05)


def batch(copy: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of one copy."""
    generator = torch.Generator().manual_seed(copy + 10 * step)
    samples = 5 + 2 * copy
    x = torch.randint(0, WORDS, (samples, 4), generator=generator)
    return x, torch.randint(-1, WORDS, (samples, 4), generator=generator)


def joined(step: int) -> tuple[Tensor, Tensor]:
    """Return the batches of both copies as one."""
    x, y = zip(batch(0, step), batch(1, step), strict=True)
    return torch.cat(x), torch.cat(y)


def shard(layers: list[nn.Module], mesh: DeviceMesh) -> None:
    """Share layers over the dimensions that a mesh has: as a caller of `parallelize=` does."""
    names = mesh.mesh_dim_names or ()
    for layer in layers:
        if "tp" in names and isinstance(layer, Block):
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], plan)
        if "dp" in names:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)


def pipeline(network: nn.Sequential | None = None, **options: object) -> ps.Pipeline:
    """Return a pipeline; of two stages unless the options say something else."""
    options = {"balance": [2, 2], "micro_batches": 3, "optimizer": adam, **options}
    network = model() if network is None else network
    return ps.Pipeline(network, loss=loss, **options)  # type: ignore[arg-type]


def clipped(**options: object) -> ps.Pipeline:
    """Return a pipeline that clips by the norm of all gradients."""
    return pipeline(clip_grad_norm=0.5, **options)


def train(pipe: ps.Pipeline, data: Callable[[int], tuple[Tensor, Tensor]], end: int) -> None:
    """Train up to a step, and check that every rank gets a loss."""
    while pipe.step < end:
        assert torch.isfinite(pipe.train_batch(*data(pipe.step)))


def final_state(pipe: ps.Pipeline) -> dict[str, Tensor]:
    """Return the weights, and close."""
    state = dict(pipe.state_dict())
    pipe.close()
    return state


def _meshes() -> dict[str, DeviceMesh]:
    """Return the meshes of four processes."""
    return {
        "fsdp": init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")),
        "tensor": init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")),
        "both": init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp")),
    }


def _continue_under(meshes: dict[str, DeviceMesh], folder: str) -> dict[str, object]:
    """Train with FSDP, and continue from its checkpoint under other meshes."""
    results: dict[str, object] = {}
    mine = partial(batch, meshes["fsdp"].get_local_rank("dp"))
    pipe = clipped(mesh=meshes["fsdp"], parallelize=shard)
    results["kinds"] = sorted({type(parameter).__name__ for parameter in pipe.parameters()})
    train(pipe, mine, SAVED)
    pipe.save(f"{folder}/fsdp")
    train(pipe, mine, STEPS)
    results["output"] = pipe.forward(mine(0)[0])
    results["fsdp"] = final_state(pipe)

    pipe = clipped(mesh=meshes["tensor"], parallelize=shard)
    pipe.load(f"{folder}/fsdp")
    train(pipe, joined, STEPS)
    pipe.save(f"{folder}/tensor")
    results["tensor"] = final_state(pipe)

    pipe = clipped(mesh=meshes["both"], parallelize=shard, balance=[4])
    pipe.load(f"{folder}/fsdp")
    train(pipe, partial(batch, meshes["both"].get_local_rank("dp")), STEPS)
    results["both"] = final_state(pipe)

    pipe = clipped(balance=[1, 1, 1, 1])
    pipe.load(f"{folder}/fsdp")
    train(pipe, joined, STEPS)
    results["four stages"] = final_state(pipe)
    return results


def _without_fsdp(layers: list[nn.Module], mesh: DeviceMesh) -> None:
    """Share layers over "tp" alone, so that the gradients of copies are summed without FSDP."""
    shard(layers, mesh["tp"])


def _compare_copies(meshes: dict[str, DeviceMesh]) -> dict[str, object]:
    """Train copies with whole layers and with FSDP, in float32."""
    results: dict[str, object] = {}
    mine = partial(batch, meshes["fsdp"].get_local_rank("dp"))
    for name, options in (("whole", {}), ("shared", {"parallelize": shard})):
        network = model(dropout=0.3, dtype=torch.float32)
        pipe = pipeline(network, mesh=meshes["fsdp"], accumulate=2, recompute="always", **options)
        train(pipe, mine, 4)
        results[name] = final_state(pipe)
    pipe = pipeline(mesh=meshes["both"], parallelize=_without_fsdp, balance=[4], accumulate=2)
    train(pipe, partial(batch, meshes["both"].get_local_rank("dp")), 4)
    results["accumulated"] = final_state(pipe)
    pipe = pipeline(model(dropout=0.3), mesh=meshes["tensor"], parallelize=shard)
    train(pipe, joined, 3)
    results["dropout"] = final_state(pipe)
    return results


def _skip_steps(meshes: dict[str, DeviceMesh]) -> dict[str, object]:
    """Train with a batch that is not finite on one copy, which all ranks skip."""

    class Poisoned(nn.Embedding):
        """Returns NaN for a word."""

        def forward(self, x: Tensor) -> Tensor:
            """Look words up."""
            return super().forward(x) + torch.where(x[..., None] == WORDS - 1, torch.nan, 0.0)

    def data(copy: int, step: int) -> tuple[Tensor, Tensor]:
        """Return a batch with the word in step 1 of copy 1."""
        x, y = batch(copy, step)
        return (x if (copy, step) == (1, 1) else x.clamp(max=WORDS - 2)), y

    network = model()
    network[0] = Poisoned(WORDS, 8).double()
    network[0].load_state_dict(model()[0].state_dict())
    mine = partial(data, meshes["fsdp"].get_local_rank("dp"))
    pipe = pipeline(network, mesh=meshes["fsdp"], parallelize=shard, on_nonfinite="skip")
    pipe.train_batch(*mine(0))
    pipe.train_batch(*mine(1))
    return {"skipped": final_state(pipe)}


def _refuse(meshes: dict[str, DeviceMesh]) -> None:
    """Try what is refused, in all processes."""
    mesh = meshes["fsdp"]
    for options, text in (
        ({"schedule": "zb-h1"}, "not possible with zb-h1, which splits backwards"),
        ({"compile": True}, "not possible with compile"),
        ({"recompute": [1]}, "not possible with recompute of single layers"),
        ({"mesh": mesh["pp"]}, "give mesh= with one of them"),
        ({"parallelize": lambda layers, _: nn.Sequential(*layers)}, "change the layers in place"),
        (
            {"parallelize": lambda layers, mesh: fully_shard(layers[1], mesh=mesh["pp"])},
            "over the dimensions 'pp': fully_shard takes",
        ),
        ({"mesh": meshes["tensor"], "parallelize": None}, "give the function that divides them"),
    ):
        with pytest.raises(ps.PenstockError, match=text):
            pipeline(**{"mesh": mesh, "parallelize": shard, **options})
    wrapped = model()
    fully_shard(wrapped[1], mesh=mesh["dp"])
    with pytest.raises(ps.SettingError, match="construct the Pipeline from whole layers"):
        pipeline(wrapped, mesh=mesh, parallelize=shard)
    tied = model()
    tied[3] = nn.Linear(8, WORDS, bias=False).double()
    tied[3].weight = tied[0].weight
    with pytest.raises(ps.SettingError, match="which several stages use: leave its layer"):
        pipeline(tied, mesh=mesh, parallelize=shard)

    pipe = pipeline(mesh=meshes["tensor"], parallelize=shard)
    for call in (pipe.ema, pipe.optimizer_state_dict):
        with pytest.raises(ps.SettingError, match="where processes share the layers of a stage"):
            call()
    with pytest.raises(ps.SettingError, match="Checkpoints does not agree"):
        ps.Checkpoints("unused").save(pipe)
    x, y = joined(0)
    with pytest.raises(RanksDiffer, match="of copy 0 of the pipeline have different batches"):
        pipe.train_batch(x, y.clamp(max=9 - meshes["tensor"].get_local_rank("tp")))
    pipe.close()


def _plan_with_groups(meshes: dict[str, DeviceMesh]) -> dict[str, object]:
    """Run a plan whose ranks are groups of two devices."""
    profile = ps.analytic(model(), joined(0)[0], batch=12, device="V100")
    plan = ps.plan(profile, ps.cluster("2xV100-NVLink"), batch=12, planner="gpipe")
    plan = replace(plan, tensor_parallel=2)
    with pytest.raises(ps.PlanError, match="each rank of the plan is 4 devices"):
        ps.Pipeline(
            model(),
            replace(plan, tensor_parallel=4),
            loss=loss,
            mesh=meshes["tensor"],
            parallelize=shard,
        )
    pipe = ps.Pipeline(
        model(), plan, loss=loss, optimizer=adam, mesh=meshes["tensor"], parallelize=shard
    )
    train(pipe, joined, 2)
    return {"plan": final_state(pipe)}


def _save_on_separate_disks(meshes: dict[str, DeviceMesh], folder: str) -> dict[str, object]:
    """Save and load in folders that are disks of two hosts.

    First each host has all parts of a stage, then it has one part of every stage.
    """
    results: dict[str, object] = {}
    rank = torch.distributed.get_rank()
    start = Path.cwd()
    for name, host in (("stages", rank // 2), ("parts", rank % 2)):
        disk = Path(folder) / name / str(host)
        disk.mkdir(parents=True, exist_ok=True)
        os.chdir(disk)
        pipe = clipped(mesh=meshes["tensor"], parallelize=shard)
        try:
            pipe.save("saved")
            pipe.load("saved")
        except FileError as error:
            results[name] = str(error)
        results[f"{name} files"] = len([*disk.glob("saved/*.safetensors")])
        pipe.close()
    os.chdir(start)
    return results


def _run(folder: str) -> dict[str, object]:
    """Run all cases in one set of four processes."""
    join()
    meshes = _meshes()
    results = _continue_under(meshes, folder)
    results |= _compare_copies(meshes)
    results |= _skip_steps(meshes)
    results |= _plan_with_groups(meshes)
    results |= _save_on_separate_disks(meshes, folder)
    _refuse(meshes)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the checkpoints."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def shared(folder: Path) -> list[dict[str, object]]:
    """Return the results of four processes."""
    return ps.launch(_run, 4, str(folder), threads=1)


def plain(steps: int, clip: float = 1e9) -> nn.Sequential:
    """Return the model after plain training on the joined batches."""
    reference = model()
    optimizer = adam(list(reference.parameters()))
    for step in range(steps):
        x, y = joined(step)
        optimizer.zero_grad()
        loss(reference(x), y).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), clip)
        optimizer.step()
    return reference


@pytest.mark.parametrize("mesh", ["fsdp", "tensor", "both", "four stages"])
def test_training_continues_exactly_under_another_mesh(shared, mesh):
    """A checkpoint holds whole tensors, so any mesh reads it; norms count every part once."""
    close(shared[0][mesh], dict(plain(STEPS, clip=0.5).state_dict()))


@pytest.mark.parametrize("mesh", ["fsdp", "tensor"])
def test_one_device_continues_from_a_checkpoint_of_shared_layers(shared, folder, mesh):
    """The state of the optimizer, too, is that of plain training."""
    pipe = clipped(balance=[4])
    pipe.load(folder / mesh)
    train(pipe, joined, STEPS + 1)
    close(final_state(pipe), dict(plain(STEPS + 1, 0.5).state_dict()))


def test_both_coordinates_fetch_files_from_another_host_at_the_same_time(shared):
    """They have one disk per host, so each has to write its copy under a name of its own."""
    assert all("stages" not in result and result["stages files"] == 2 for result in shared)


def test_save_refuses_disks_from_which_a_coordinate_could_not_load(shared):
    """Processes of coordinate 1 are alone on their host, and write nothing."""
    for result in shared:
        assert "processes of the dimension 'tp' of the mesh are on hosts that" in result["parts"]


def test_processes_hold_parts_of_shared_layers(shared):
    """Otherwise nothing would be saved by sharing them."""
    reference = plain(STEPS, clip=0.5)
    for number, result in enumerate(shared):
        assert result["kinds"] == ["DTensor"]
        close(result["output"], reference(batch(number % 2, 0)[0]))


def test_fsdp_is_equal_to_copies_to_the_bit(shared):
    """The sum of two gradients does not depend on who forms it; dropout and recompute included."""
    for name, tensor in shared[0]["whole"].items():
        assert torch.equal(shared[0]["shared"][name], tensor), name


def test_accumulated_gradients_of_tensor_parallel_copies(shared):
    """Gradients of shared parameters that FSDP does not manage are summed over copies once."""
    reference = model()
    optimizer = adam(list(reference.parameters()))
    for step in range(4):
        x, y = joined(step)
        (loss(reference(x), y) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    close(shared[0]["accumulated"], dict(reference.state_dict()))


def test_dropout_is_the_same_on_processes_that_share_layers(shared):
    """It depends on layer, step and micro-batch, so a pipeline of whole layers draws the same."""
    pipe = pipeline(model(dropout=0.3), balance=[4])
    train(pipe, joined, 3)
    close(shared[0]["dropout"], final_state(pipe))


def test_all_ranks_skip_a_step_that_is_not_finite_on_one_copy(shared):
    """The weights are those of the first step."""
    reference = model()
    optimizer = adam(list(reference.parameters()))
    x, y = joined(0)
    loss(reference(x.clamp(max=WORDS - 2)), y).backward()
    optimizer.step()
    close(shared[0]["skipped"], dict(reference.state_dict()))


def test_a_plan_whose_ranks_are_groups_of_devices_runs(shared):
    """The mesh has the groups, and the plan the schedule of their ranks."""
    close(shared[0]["plan"], dict(plain(2).state_dict()))
