"""Is it right? Penstock, ranks as threads on the device, against plain training on the same device,
in float64 or float32.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from kit.section import Section
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.zoo.gpt import gpt, gpt_loss

#: In terms of the largest parameter's change.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
STEPS = 3


@dataclass(frozen=True)
class Case:
    """A schedule on a model.

    Attributes:
        name: of the row.
        model: "mlp", "gpt", "tied gpt", "batch norm" or "dropout".
        words: settings of the pipeline.
        accumulates: held against micro-batches one after the other, not against the whole batch.
    """

    name: str
    model: str = "mlp"
    words: dict[str, object] = field(default_factory=dict)
    accumulates: bool = True


CASES = (
    Case("1f1b", words={"schedule": "1f1b"}),
    Case("gpipe recompute", words={"schedule": "gpipe", "recompute": "always"}),
    Case("zb-h1", words={"schedule": "zb-h1"}),
    Case("chimera", words={"schedule": "chimera"}),
    Case("gpt", model="gpt", words={"schedule": "1f1b"}),
    Case("tied gpt", model="tied gpt", words={"schedule": "1f1b"}),
    Case("batch norm", model="batch norm", words={"schedule": "1f1b"}),
)


def measure(section: Section) -> None:
    """A row for each case: the largest relative error."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    for case in CASES:
        section.attempt(case.name, lambda case=case: _compared(case, section.device))
    section.attempt("pipedream", lambda: _pipedream(section.device))
    section.attempt("dropout, recompute", lambda: _dropout(section.device))
    section.attempt("fp16 and scaler", lambda: _scaler(section.device))
    section.require_right()


def model_of(name: str) -> tuple[list[nn.Module], Tensor, Tensor, object]:
    """Layers, inputs, targets and loss."""
    torch.manual_seed(0)
    if name.endswith("gpt"):
        layers = _flat(gpt(layers=2, width=32, heads=2, tokens=16, vocabulary=64))
        if name == "tied gpt":
            layers[-1].weight = layers[0].token.weight
        tokens = torch.randint(0, 64, (8, 17))
        return layers, tokens[:, :-1], tokens[:, 1:], gpt_loss
    layers = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)]
    if name == "batch norm":
        layers[1:2] = [nn.BatchNorm1d(32)]
    if name == "dropout":
        layers[1:2] = [nn.Dropout(0.5)]
    x, y = torch.randn(16, 16), torch.randint(0, 10, (16,))
    return layers, x, y, functional.cross_entropy


def _flat(model: nn.Sequential) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for child in model:
        layers += _flat(child) if isinstance(child, nn.Sequential) else [child]
    return layers


def _sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def pipeline(
    layers: list[nn.Module], loss: object, device: torch.device, **words: object
) -> ps.Pipeline:
    """Two stages, four micro-batches, threads."""
    middle = len(layers) // 2
    settings: dict[str, object] = {"balance": [middle, len(layers) - middle], "micro_batches": 4}
    settings |= {"executor": "threads", "device": device, "optimizer": _sgd} | words
    return ps.Pipeline(nn.Sequential(*layers), loss=loss, **settings)


def _compared(case: Case, device: torch.device) -> dict[str, object]:
    layers, x, y, loss = model_of(case.model)
    dtype = torch.float64
    model = nn.Sequential(*layers).to(device, dtype)
    plain = copy.deepcopy(model)
    first = {name: value.detach().clone() for name, value in plain.named_parameters()}
    x = x.to(device, dtype if x.is_floating_point() else None)
    y = y.to(device)
    optimizer = _sgd(plain.parameters())
    pipe = pipeline(list(model), loss, device, **case.words)
    losses, plain_losses = [], []
    for _ in range(STEPS):
        losses.append(float(pipe.train_batch(x, y)))
        total = 0.0
        for inputs, targets in zip(x.chunk(4), y.chunk(4), strict=True):
            part = loss(plain(inputs), targets) / 4
            part.backward()
            total += float(part)
        plain_losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    pipe.close()
    error = _error(dict(model.named_parameters()), dict(plain.named_parameters()), first)
    return _verdict(error, dtype) | {"loss": losses[-1], "plain_loss": plain_losses[-1]}


def _error(
    weights: dict[str, Tensor], expected: dict[str, Tensor], first: dict[str, Tensor]
) -> float:
    """The largest difference in terms of the largest change that training made."""
    if weights.keys() != expected.keys():
        raise RuntimeError(f"other parameters: {sorted(weights.keys() ^ expected.keys())}")
    largest = max(float((expected[name] - first[name]).abs().max()) for name in expected)
    off = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
    if largest == 0:
        raise RuntimeError("plain training has changed nothing")
    return off / largest


def _verdict(error: float, dtype: torch.dtype) -> dict[str, object]:
    status = "measured" if error <= TOLERANCE[dtype] else "wrong"
    return {"status": status, "error": error, "dtype": str(dtype)}


def _pipedream(device: torch.device) -> dict[str, object]:
    """Against the same on the CPU: both play the same versions of weights."""
    losses = []
    for place in (device, torch.device("cpu")):
        layers, x, y, loss = model_of("mlp")
        model = nn.Sequential(*layers).to(place, torch.float64)
        pipe = pipeline(list(model), loss, place, schedule="pipedream")
        batch = x.to(place, torch.float64), y.to(place)
        losses.append([float(value) for value in pipe.train([batch] * 4)])
        pipe.close()
    error = max(abs(one - other) for one, other in zip(*losses, strict=True)) / max(losses[1])
    return _verdict(error, torch.float64) | {"losses": losses[0]}


def _dropout(device: torch.device) -> dict[str, object]:
    """With recompute against without: the same numbers are drawn again, to the bit."""
    weights = []
    for recompute in ("never", "always"):
        layers, x, y, loss = model_of("dropout")
        model = nn.Sequential(*layers).to(device)
        pipe = pipeline(list(model), loss, device, schedule="gpipe", recompute=recompute)
        for _ in range(STEPS):
            pipe.train_batch(x.to(device), y.to(device))
        pipe.close()
        weights.append(torch.cat([value.detach().flatten() for value in model.parameters()]))
    error = float((weights[0] - weights[1]).abs().max())
    return {"status": "measured" if error == 0 else "wrong", "error": error}


def _scaler(device: torch.device) -> dict[str, object]:
    """Half precision with a scaler: an overflow skips the step on all stages, and losses fall."""
    layers, x, y, loss = model_of("mlp")
    model = nn.Sequential(*layers).to(device)
    scaler = {"init_scale": 2.0**40, "growth_interval": 1000}
    pipe = pipeline(
        list(model), loss, device, schedule="1f1b", autocast=torch.float16, scaler=scaler
    )
    before = [value.detach().clone() for value in model.parameters()]
    pipe.train_batch(x.to(device), y.to(device))
    after = list(model.parameters())
    skipped = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    losses = [float(pipe.train_batch(x.to(device), y.to(device))) for _ in range(40)]
    pipe.close()
    good = skipped and losses[-1] < losses[0]
    return {
        "status": "measured" if good else "wrong",
        "skipped": skipped,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
