"""Jobs for ranks that do not run the same.

Each scenario's error is caught, and the next one has a new pipeline.
"""

from __future__ import annotations

import copy
import os
import pickle

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import penstock as ps

X, Y = torch.arange(32.0).reshape(8, 4) / 32, torch.ones(8, 4)


def model(seed=0):
    """Five layers, with batch norm."""
    torch.manual_seed(seed)
    layers = (nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    return nn.Sequential(*layers)


class Net(nn.Module):
    """A model that must be traced."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        """Run the two layers."""
        return self.second(torch.relu(self.first(x)))


def pipeline(network=None, lr=0.1, **words):
    """Return a pipeline of two ranks."""
    words = {"balance": [2, 3], "micro_batches": 2, "deadline_s": 60, **words}
    network = model() if network is None else network
    return ps.Pipeline(
        network,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        **words,
    )


def outcome(scenario, *arguments):
    """Return the result of a scenario, or its error as class name and text."""
    try:
        return scenario(*arguments)
    except (ps.PenstockError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def constructions():
    """Construct pipelines that differ between ranks, and train one that works in between and
    afterwards.
    """
    rank = int(os.environ["RANK"])
    other = {"schedule": "gpipe", "micro_batches": 4, "seed": 7, "boundary": "int8"} if rank else {}
    return {
        "settings": outcome(lambda: pipeline(**other)),
        "ranks": outcome(lambda: pipeline(balance=[5] if rank else [2, 3])),
        "weights": outcome(lambda: pipeline(model(rank))),
        "after": outcome(lambda: float(pipeline().train_batch(X, Y))),
        "dtype": outcome(lambda: pipeline(model().double() if rank else model())),
        "failure": outcome(lambda: pipeline(balance=[1, 1] if rank else [2, 3])),
        "optimizer": outcome(lambda: pipeline(lr=0.1 + rank)),
        "factory": outcome(lambda: pipeline(lr=-1.0 if rank else 0.1)),
        "again": outcome(lambda: float(pipeline().train_batch(X, Y))),
    }


def batches():
    """Train different first batches, which must not change the pipeline, and batches as in data
    parallelism.
    """
    rank = int(os.environ["RANK"])
    pipe = pipeline()
    results = {"first": outcome(lambda: float(pipe.train_batch(X, Y)))}
    results["content"] = outcome(lambda: pipe.train_batch(X + rank / 32, Y))
    results["evaluation"] = outcome(lambda: pipe.eval_batch(X[: 8 - rank], Y[: 8 - rank]))
    results["unchanged"] = outcome(lambda: float(pipe.train_batch(X, Y)))
    data = TensorDataset(
        torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.ones(64, 4)
    )
    parts = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    results["sampler"] = outcome(lambda: list(pipe.train(parts)))
    shuffled = pipeline()
    torch.manual_seed(rank)
    results["shuffled"] = outcome(
        lambda: list(shuffled.train(DataLoader(data, batch_size=8, shuffle=True)))
    )
    torch.manual_seed(5)
    seeded = DataLoader(data, batch_size=8, shuffle=True)
    results["seeded"] = outcome(lambda: len([*shuffled.train(seeded), *shuffled.train(seeded)]))
    return results


def trained(**words):
    """Return a pipeline after the first batches, which are compared completely."""
    pipe = pipeline(**words)
    for number in range(20):
        pipe.train_batch(X + number, Y)
    return pipe


def later():
    """Differ in the steady state, where ranks do not wait for the comparison; each time the
    pipeline ends.
    """
    rank = int(os.environ["RANK"])

    def content():
        pipe = trained()
        for number in range(4):
            pipe.train_batch(X + (rank if number == 1 else 0), Y)

    def shapes():
        pipe = trained()
        pipe.train_batch(X[: 8 - rank], Y[: 8 - rank])

    def loader():
        for _ in trained().train([(X, Y)] * (8 - 4 * rank)):
            pass

    def one_rank():
        pipe = trained()
        if rank == 0:
            pipe.state_dict()
        pipe.train_batch(X, Y)

    def output():
        trained().forward(X + rank)

    def asynchronous():
        pipe = pipeline(schedule="pipedream")
        for _ in pipe.train([(X + i, Y) for i in range(20)]):
            pass
        for _ in pipe.train([(X + i + (rank if i == 7 else 0), Y) for i in range(20)]):
            pass

    def copied():
        network = nn.Sequential(model()[0], nn.Linear(8, 4))
        pipe = pipeline(
            network,
            balance=[2],
            schedule=ps.schedule("gpipe", 1, 2, replicas=2),
            micro_batches=None,
        )
        for number in range(12):
            pipe.train_batch(X + number / 20 + (rank if number == 9 else 0), Y)

    scenarios = (content, shapes, loader, one_rank, output, asynchronous, copied)
    return {scenario.__name__: outcome(scenario) for scenario in scenarios}


def readings(read):
    """Read a model in each way; return the beginning of the error for each, or an empty text."""
    return {
        name: str(outcome(action))[:50] if outcome(action) is not None else ""
        for name, action in read.items()
    }


def evaluated(network):
    """Run a model without changing its buffers."""
    network.eval()
    try:
        network(X)
    finally:
        network.train()


def models():
    """Read the user's own model after training, on every rank."""
    network = model()
    pipe = pipeline(network)
    ways = {
        "state_dict": lambda: network.state_dict() and None,
        "forward": lambda: evaluated(network),
        "pickle": lambda: pickle.dumps(network) and None,
        "copy": lambda: copy.deepcopy(network) and None,
    }
    results = {"fresh": readings(ways)}
    snapshot = copy.deepcopy(network)
    pipe.train_batch(X, Y)
    average = pipe.ema(0.5)
    average.update()
    results["stale"] = readings(ways)
    results["snapshot"] = readings({"state_dict": lambda: snapshot.state_dict() and None})
    results["check"] = pipe.compare_with_one_device(X, Y).relative
    results["again"] = outcome(lambda: float(pipeline(network).train_batch(X, Y)))
    results["moved"] = outcome(lambda: pipeline(network, balance=[3, 2]))
    results["threads"] = outcome(lambda: pipeline(network, executor="threads"))
    state = pipe.model_state()
    pipe.load_into(network)
    results["filled"] = readings(ways)
    results["equal"] = all(
        torch.equal(state[name], tensor) for name, tensor in network.state_dict().items()
    )
    pipe.train_batch(X, Y)
    average.update()
    results["average"] = average.model_state()
    pipe.close()
    results["closed"] = readings(ways)
    net = Net()
    pipe = pipeline(ps.chain(net, X), balance=[1, 1])
    pipe.train_batch(X, Y)
    results["traced"] = readings({"state_dict": net.state_dict, "forward": lambda: net(X)})
    pipe.load_into(net)
    # By micro-batches: the sums of a layer may have another order for another number of samples.
    parts = X.tensor_split(pipe.setting.schedule.micro_batches)
    results["traced output"] = torch.equal(
        torch.cat([net(part) for part in parts]), pipe.forward(X)
    )
    layers = list(model())
    pipe = pipeline(layers)
    pipe.train_batch(X, Y)
    results["list"] = [str(outcome(layer.state_dict))[:8] for layer in layers]
    return results
