"""Several pipelines in one job, each in one group of the dimension "pp" of a DeviceMesh."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from penstock.ranks.mesh.pipeline_mesh import PipelineMesh
from penstock.ranks.process_world import join


def model(seed: int) -> nn.Sequential:
    """Return a small model in float64 with weights of a seed."""
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of 8 samples."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(8, 3, generator=generator, dtype=torch.float64)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of these tests."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _run_two_pipelines(folder: str) -> dict[str, object]:
    """Train two pipelines of two ranks on unlike data, with unlike schedules."""
    join()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "replica"))
    number = mesh.get_local_rank("replica")
    results: dict[str, object] = {}
    with pytest.raises(ps.SettingError, match="has the dimension 'pp', then 'dp'"):
        PipelineMesh.of(mesh)
    try:
        ps.Pipeline(
            model(number),
            loss=nn.functional.mse_loss,
            balance=[2, 1, 2],
            micro_batches=2,
            mesh=mesh["pp"],
        )
    except ps.PlanError as error:
        results["refused"] = str(error)
    pipe = ps.Pipeline(
        model(number),
        loss=nn.functional.mse_loss,
        optimizer=sgd,
        balance=[2, 3],
        schedule=["1f1b", "gpipe"][number],
        micro_batches=4,
        clip_grad_norm=1.0,
        mesh=mesh["pp"],
    )
    results["rank"] = pipe.rank
    # One pipeline trains more steps than the other.
    losses = [float(pipe.train_batch(*batch(number + 10 * step))) for step in range(2 + number)]
    results["losses"] = losses
    results["events"] = sorted({event.rank for event in pipe.timeline().events})
    pipe.save(f"{folder}/{number}")
    results["output"] = pipe.forward(batch(number)[0])
    results["state"] = pipe.state_dict()
    pipe.close()
    return results


def _train_alone(number: int) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
    """Train the same in one process."""
    reference = model(number)
    optimizer = sgd(list(reference.parameters()))
    losses = []
    for step in range(2 + number):
        x, y = batch(number + 10 * step)
        loss = nn.functional.mse_loss(reference(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, reference.state_dict(), reference(batch(number)[0])


@pytest.fixture(scope="module")
def two_pipelines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """Return the results of four ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return ps.launch(_run_two_pipelines, 4, str(folder), threads=1)


def test_two_pipelines_train_as_two_models_do(two_pipelines):
    """Messages, norms and losses of one pipeline must not reach the other."""
    for job_rank, result in enumerate(two_pipelines):
        number = job_rank % 2
        losses, state, output = _train_alone(number)
        assert result["rank"] == job_rank // 2
        assert result["losses"] == pytest.approx(losses, rel=1e-6)
        assert result["events"] == [0, 1]
        torch.testing.assert_close(result["output"], output, rtol=1e-12, atol=1e-12)
        if result["rank"] == 0:
            torch.testing.assert_close(dict(result["state"]), dict(state), rtol=1e-12, atol=1e-12)


def test_another_number_of_ranks_is_refused(two_pipelines):
    """The message names the mesh's dimension, not the number of processes of the job."""
    for result in two_pipelines:
        assert "3 ranks, and the dimension 'pp' of the mesh has 2" in str(result["refused"])


@pytest.mark.parametrize("mesh", ["pp", 3])
def test_what_is_no_mesh_is_refused(mesh):
    """The message shows how a mesh is made."""
    with pytest.raises(ps.SettingError, match=re.escape("mesh is a torch DeviceMesh, not")):
        PipelineMesh.of(mesh)
