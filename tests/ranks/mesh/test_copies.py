"""Copies of a pipeline in the dimension "dp" of a mesh, each of which reads its own batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import penstock as ps
from penstock.errors import RanksDiffer
from penstock.ranks.process_world import join

WORDS = 11


class TokenLoss(nn.Module):
    """The mean over the tokens that are not ignored."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        tokens = output.flatten(0, 1)
        return nn.functional.cross_entropy(tokens, target.flatten(), ignore_index=-1)


def model(*, tied: bool = False) -> nn.Sequential:
    """Return a language model of four layers in float64."""
    torch.manual_seed(0)
    layers = [nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WORDS, bias=False)]
    if tied:
        layers[-1].weight = layers[0].weight
    return nn.Sequential(*layers).double()


def batch(copy: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of one copy: copies have other numbers of samples and ignored tokens."""
    generator = torch.Generator().manual_seed(copy + 10 * step)
    samples = 5 + 2 * copy
    x = torch.randint(0, WORDS, (samples, 4), generator=generator)
    y = torch.randint(-1, WORDS, (samples, 4), generator=generator)
    y[: copy + 1] = -1
    return x, y


def joined(step: int) -> tuple[Tensor, Tensor]:
    """Return the batches of both copies as one."""
    x, y = zip(batch(0, step), batch(1, step), strict=True)
    return torch.cat(x), torch.cat(y)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of these tests."""
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


class SumAndCount:
    """The sum over the tokens that are not ignored, and their number."""

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return sum and count."""
        losses = nn.functional.cross_entropy(
            output.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum"
        )
        return losses, (target != -1).sum()


def _pipeline(mesh, **options) -> ps.Pipeline:
    """Return a pipeline of two stages."""
    options = {"loss": TokenLoss(), "micro_batches": 3, **options}
    return ps.Pipeline(
        options.pop("network", None) or model(),
        optimizer=sgd,
        balance=[2, 2],
        mesh=mesh,
        **options,
    )


def _train(folder: str) -> dict[str, object]:
    """Train two copies of a pipeline of two stages."""
    join()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    copy = mesh.get_local_rank("dp")
    pipe = _pipeline(mesh, clip_grad_norm=0.5)
    results: dict[str, object] = {"rank": pipe.rank}
    results["losses"] = [float(pipe.train_batch(*batch(copy, step))) for step in range(5)]
    results["output"] = pipe.forward(batch(copy, 0)[0])
    results["evaluation"] = float(pipe.eval_batch(*batch(copy, 0)))
    pipe.save(folder)
    results["state"] = pipe.state_dict()
    x, y = batch(copy, 0)
    with pytest.raises(RanksDiffer, match="pad the batches of all copies to the same shape"):
        pipe.train_batch(x[:, : 4 - copy], y[:, : 4 - copy])
    with pytest.raises(RanksDiffer, match=r"processes \[\d, \d\] of copy 0 .* different batches"):
        pipe.train_batch(x, y.clamp(max=9 - mesh.get_local_rank("pp")))
    pipe.close()

    pipe = _pipeline(
        mesh,
        network=model(tied=True),
        loss=SumAndCount(),
        accumulate=2,
        on_nonfinite="skip",
        schedule="gpipe",
    )
    for step in range(4):
        pipe.train_batch(*batch(copy, step))
    results["tied"] = pipe.state_dict()
    data = TensorDataset(*joined(9))
    sampler = DistributedSampler(data, 2, copy, shuffle=False)
    results["stream"] = [float(loss) for loss in pipe.train(DataLoader(data, 3, sampler=sampler))]
    pipe.close()
    pipe = _pipeline(mesh)
    dist.barrier()  # the failure below also ends the constructors that are still running
    text = "at least 1" if copy else "stopped|closed|at least 1"
    with pytest.raises(ps.PenstockError, match=text):
        pipe.train_batch(x[: 5 - 5 * copy], y[: 5 - 5 * copy])
    pipe.close()
    for options, text in (
        ({"schedule": "pipedream"}, "is asynchronous, and the dimension 'dp' of the mesh has 2"),
        ({"balance": [1, 1, 2]}, "for 3 ranks, and the dimension 'pp' of the mesh has 2"),
        (
            {"schedule": ps.schedule("1f1b", stages=2, micro_batches=2, replicas=2)},
            "the schedule has copies of stages",
        ),
    ):
        arguments = {"balance": [2, 2], "loss": TokenLoss(), "mesh": mesh, **options}
        with pytest.raises(ps.PenstockError, match=text):
            ps.Pipeline(model(), **arguments)
    return results


@pytest.fixture(scope="module")
def two_copies(tmp_path_factory: pytest.TempPathFactory):
    """Return the results of four ranks, and the folder of their checkpoint."""
    folder = str(tmp_path_factory.mktemp("copies"))
    return ps.launch(_train, 4, folder, threads=1), folder


def _steps(reference: nn.Sequential, steps: range, clip: float = 1e9) -> list[float]:
    """Train a model on the joined batches, and return the losses."""
    optimizer = sgd(list(reference.parameters()))
    losses = []
    for step in steps:
        x, y = joined(step)
        optimizer.zero_grad()
        loss = TokenLoss()(reference(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_copies_train_as_one_model_on_the_joined_batch(two_copies):
    """Tokens weigh alike, though copies have other numbers of samples and ignored tokens."""
    reference = model()
    losses = _steps(reference, range(5), clip=0.5)
    for number, result in enumerate(two_copies[0]):
        assert result["rank"] == [0, 2, 1, 3][number]
        assert result["losses"] == pytest.approx(losses, rel=1e-6)
        expected = reference(batch(number % 2, 0)[0])
        torch.testing.assert_close(result["output"], expected, rtol=1e-12, atol=1e-12)
        loss = TokenLoss()(reference(joined(0)[0]), joined(0)[1]).item()
        assert result["evaluation"] == pytest.approx(loss, rel=1e-6)
    state = two_copies[0][0]["state"]
    torch.testing.assert_close(dict(state), dict(reference.state_dict()), rtol=1e-12, atol=1e-13)


def test_one_device_continues_from_the_checkpoint_of_copies(two_copies):
    """It has the whole model once, and the state of the optimizers."""
    reference = model()
    _steps(reference, range(5), clip=0.5)
    pipe = ps.Pipeline(model(), loss=TokenLoss(), optimizer=sgd, balance=[4])
    pipe.load(two_copies[1])
    assert pipe.step == 5
    torch.testing.assert_close(
        dict(pipe.state_dict()), dict(reference.state_dict()), rtol=1e-12, atol=1e-13
    )
    pipe.close()


def test_tied_weights_and_accumulated_gradients_of_copies(two_copies):
    """Two batches count as one step, and a weight that two stages use has both gradients."""
    reference = model(tied=True)
    optimizer = sgd(list(reference.parameters()))
    for step in range(4):
        x, y = joined(step)
        (TokenLoss()(reference(x), y) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    state = two_copies[0][0]["tied"]
    torch.testing.assert_close(dict(state), dict(reference.state_dict()), rtol=1e-12, atol=1e-13)
    assert len({tuple(result["stream"]) for result in two_copies[0]}) == 1
    assert len(two_copies[0][0]["stream"]) == 2
