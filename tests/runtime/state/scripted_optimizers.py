"""Random models whose stages have optimizers on ranks of several processes, which are threads."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace

import torch
from torch import nn


class Processes:
    """What the threads exchange."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=30)
        self.values = {}


class ScriptedWorld:
    """The end of one process, with some of the ranks."""

    def __init__(self, processes, ranks, size):
        self._processes, self.local_ranks, self.size = processes, ranks, size

    def _all(self, values):
        """Return the values of all ranks."""
        self._processes.values.update(values)
        self._processes.barrier.wait()
        result = dict(self._processes.values)
        self._processes.barrier.wait()
        if 0 in self.local_ranks:
            self._processes.values.clear()
        self._processes.barrier.wait()
        return result

    def broadcast(self, value, source):
        """Return the value of one rank."""
        return self._all({source: value} if source in self.local_ranks else {})[source]

    def gather(self, rows, forms):
        """Return all tensors on the process of rank 0; check the forms of others."""
        gathered = self._all(rows)
        for rank, row in gathered.items():
            shapes = [(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in row]
            assert shapes == [(form.shape, form.dtype) for form in forms[rank]]
        return gathered if 0 in self.local_ranks else {}


class Model:
    """A model in layers, and the order in which it registers its parameters.

    Attributes:
        layers: by name.
        order: names of the parameters.
    """

    def __init__(self, rng):
        torch.manual_seed(rng.randint(0, 999))
        count = rng.randint(2, 5)
        self.layers = {f"layer{n}": nn.Linear(rng.randint(1, 3), 2) for n in range(count)}
        for layer in list(self.layers.values())[1:]:
            layer.weight.requires_grad_(rng.random() < 0.6)
            layer.bias.requires_grad_(rng.random() < 0.6)
        self.order = [
            f"{name}.{part}"
            for name in self.layers
            for part, _ in nn.Linear(1, 1).named_parameters()
        ]
        rng.shuffle(self.order)

    def parameter(self, name):
        """Return a parameter by its name."""
        layer, _, part = name.partition(".")
        return getattr(self.layers[layer], part)

    def trained(self):
        """Return the names of the parameters that are trained."""
        return [name for name in self.order if self.parameter(name).requires_grad]


def optimizer_of(named, group_of, kind):
    """Return an optimizer with two groups, of which one may be empty."""
    groups = [
        {"params": [p for name, p in named if group_of[name] == number], "lr": 0.5 + number}
        for number in range(2)
    ]
    return kind(groups)


def adam(groups):
    """Return an optimizer with tensors of two sorts."""
    return torch.optim.Adam(groups, betas=(0.8, 0.9))


class Counting(torch.optim.Optimizer):
    """An optimizer with plain values beside tensors; parameters may have only these."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.1, "note": "x"})

    def step(self):
        """Count."""
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    if number % 2:
                        state["sum"] = state.get("sum", 0) + parameter.grad


def step(rng, parameters, *optimizers):
    """Give some parameters of several optimizers random gradients, and step."""
    for row in parameters:
        shape, has_grad = row[0].shape, rng.random() < 0.8
        grad = torch.tensor([rng.random() for _ in range(shape.numel())]).reshape(shape)
        for parameter in row:
            parameter.grad = grad.clone() if has_grad else None
    for optimizer in optimizers:
        optimizer.step()


def assemblies(rng, model, group_of, kind):
    """Cut a model into stages with optimizers on ranks of processes; return the assemblies.

    A stage may have a second holder, whose state is another and must not count.
    """
    names = list(model.layers)
    size = rng.randint(1, 4)
    cuts = sorted(rng.sample(range(1, len(names)), rng.randint(0, len(names) - 1)))
    bounds = list(zip([0, *cuts], [*cuts, len(names)], strict=True))
    home = [rng.randrange(size) for _ in bounds]
    owners = sorted(range(size), key=lambda rank: rng.random())
    groups = [owners[:1], owners[1:]] if size > 1 else [owners]
    processes = Processes(len(groups))
    traced = SimpleNamespace(
        parameter_names=lambda: list(model.order),
        first_name=lambda name: name,
        description=SimpleNamespace(
            tensors=[
                SimpleNamespace(name=name, shape=tuple(model.parameter(name).shape))
                for name in sorted(model.order)
            ]
        ),
    )
    result = []
    for ranks in groups:
        stages, at_home = [], []
        for index, (first, end) in enumerate(bounds):
            holders = {home[index], *([rng.choice(ranks)] if rng.random() < 0.3 else [])}
            for rank in holders & set(ranks):
                layers = [SimpleNamespace(name=n, module=model.layers[n]) for n in names[first:end]]
                if rank != home[index]:
                    layers = copy.deepcopy(layers)
                named = [
                    (f"{layer.name}.{part}", parameter)
                    for layer in layers
                    for part, parameter in layer.module.named_parameters()
                    if parameter.requires_grad
                ]
                # As a stage without parameters.
                optimizer = optimizer_of(named, group_of, kind) if named else None
                update = SimpleNamespace(optimizer=optimizer, candidates=[p for _, p in named])
                stage = SimpleNamespace(index=index, layers=layers, update=update, named=named)
                stages.append(stage)
                if rank == home[index]:
                    at_home.append(stage)
        optimizers = [s.update.optimizer for s in stages if s.update.optimizer is not None]
        if not optimizers:
            optimizers = [optimizer_of([], group_of, kind)]
        result.append(
            SimpleNamespace(
                world=ScriptedWorld(processes, tuple(sorted(ranks)), size),
                stages=stages,
                placed=SimpleNamespace(at_home=at_home, home=tuple(home)),
                traced=traced,
                names=lambda stage: {parameter: name for name, parameter in stage.named},
                optimizers=lambda optimizers=optimizers: optimizers,
            )
        )
    return result
