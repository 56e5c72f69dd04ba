"""Train small models on the CPU and on the stand-in for an accelerator, and compare them.

Run by the fixture in conftest.py, in a process of its own, for the reasons that lookalike.py gives.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tests.devices import lookalike
from tests.time_limits import HANG_S
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.values import structure

# A GPU's tensors are plain ones, the stand-in's are of a class of their own: let them cross too.
structure._DENSE = (*structure._DENSE, lookalike.Lookalike)

#: The third step is the first steady one: losses whose weights depend on values test them before.
STEPS = 3
SAMPLES = 8
MICRO_BATCHES = 4


@dataclasses.dataclass
class Row:
    """What one cell came to.

    Attributes:
        cell: its name.
        losses: of all steps, on the CPU and on the device.
        differences: names of gradients, buffers and parameters that differ after the last step.
        log: copies and waits of the last step, before its loss is looked at.
        lines: the lines of penstock that caused them.
        threads: names of the threads in which ops of the last step ran.
        facts: what a cell shows besides.
        error: the traceback, if the cell raised.
    """

    cell: str
    losses: list[list[str]] = dataclasses.field(default_factory=list)
    differences: list[str] = dataclasses.field(default_factory=list)
    log: dict[str, int] = dataclasses.field(default_factory=dict)
    lines: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    threads: list[str] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str = ""


class Residual(nn.Module):
    """A model that has to be traced: inputs and hidden values are used in several places."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 16)
        self.skip = nn.Linear(8, 16)
        self.third = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return logits of shape (samples, 4)."""
        hidden = torch.relu(self.first(x))
        hidden = hidden + torch.tanh(self.second(hidden))
        hidden = hidden + self.skip(x) * scale
        hidden = hidden + functional.dropout(torch.tanh(self.third(hidden)), 0.2, self.training)
        return self.head(hidden)


def plain_model() -> nn.Module:
    """Return a chain of linear layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.Linear(16, 4),
    )


def random_model() -> nn.Module:
    """Return a chain with batch normalisation and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(16, 16),
        nn.BatchNorm1d(16),
        nn.Dropout(0.3),
        nn.Linear(16, 4),
    )


def tied_model() -> nn.Module:
    """Return a chain whose first and last layer have the same weight."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(8, 16),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 8, bias=False),
    )
    model[7].weight = model[0].weight
    return model


def seeded_residual() -> nn.Module:
    """Return a model that has to be traced."""
    torch.manual_seed(0)
    return Residual()


def traced_model() -> Any:
    """Return a traced model."""
    return ps.chain(seeded_residual(), (torch.randn(2, 8), torch.rand(2, 1)))


def vectors() -> tuple[Any, Any]:
    """Return inputs of shape (SAMPLES, 8) and class indices."""
    torch.manual_seed(1)
    return torch.randn(SAMPLES, 8), torch.randint(0, 4, (SAMPLES,))


def ignored() -> tuple[Any, Any]:
    """Return the same, with targets that do not count, unevenly over micro-batches."""
    x, y = vectors()
    y[torch.tensor([0, 1, 4])] = -100
    return x, y


def tokens() -> tuple[Any, Any]:
    """Return tokens of shape (SAMPLES,) and as many targets."""
    torch.manual_seed(1)
    return torch.randint(0, 8, (SAMPLES,)), torch.randint(0, 8, (SAMPLES,))


def pairs() -> tuple[Any, Any]:
    """Return inputs of shapes (SAMPLES, 8) and (SAMPLES, 1), and class indices."""
    x, y = vectors()
    return (x, torch.rand(SAMPLES, 1)), y


def sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses, and how many count."""
    return functional.cross_entropy(output, target, reduction="sum"), (target >= 0).sum()


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss in which samples see each other."""
    return functional.cross_entropy(output @ output.T, target.argsort())


def custom(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss whose form is found by evaluating it."""
    return (torch.logsumexp(output, 1) - output[torch.arange(len(output)), target]).pow(2).mean()


def penalised(output: Tensor, target: Tensor) -> Tensor:
    """Return a sum of two terms."""
    return functional.cross_entropy(output, target) + 0.01 * output.square().mean()


@dataclasses.dataclass(frozen=True)
class Cell:
    """A model, a batch and a way to train on it.

    Attributes:
        options: of `ps.Pipeline`.
        model: makes the model.
        batch: makes inputs and targets.
        loss: as `ps.Pipeline` takes it.
    """

    options: Mapping[str, Any]
    model: Callable[[], Any] = plain_model
    batch: Callable[[], tuple[Any, Any]] = vectors
    loss: Any = functional.cross_entropy


class ToMapping(nn.Module):
    """A layer that returns a dict, with a tensor that takes no gradient."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        """Return the input, and the place of its largest feature."""
        return {"x": x, "place": x.detach().argmax(1), "scale": 0.5}


class FromMapping(nn.Module):
    """A layer that takes a dict."""

    def forward(self, value: dict[str, Any]) -> Tensor:
        """Return one tensor."""
        return value["x"] + value["scale"] * value["place"].unsqueeze(1)


def mapping_model() -> nn.Module:
    """Return a chain with a dict at the boundary of its first stage."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), ToMapping(), FromMapping(), nn.Dropout(0.2), nn.Linear(16, 4)
    )


def combinations() -> dict[str, Cell]:
    """Return cells of several options at once, on 2, 3 and 5 stages of unequal lengths."""
    three = {"schedule": "1f1b", "balance": [1, 5, 2], "micro_batches": MICRO_BATCHES}
    five = {"schedule": "gpipe", "balance": [1, 3, 1, 2, 1], "micro_batches": 3}
    two = ps.schedule("1f1b", stages=2, micro_batches=6, replicas=3)
    everything = {**three, "clip_grad_norm": 0.05, "recompute": [1, 2, 3], "accumulate": 2}
    mapping = {"schedule": "zb-h1", "balance": [2, 1, 2], "micro_batches": MICRO_BATCHES}
    cell_of_rule = {
        "tied weights, clipping, layers recomputed, accumulated": Cell(
            everything, tied_model, tokens
        ),
        "5 stages": Cell({**five, "recompute": "except_last"}, random_model),
        "3 copies": Cell({"schedule": two, "balance": [3, 5], "recompute": [1, 2]}),
        "layers recomputed": Cell({**three, "recompute": [2, 3, 6]}, random_model),
        "layers recomputed, split backward": Cell(
            {**five, "schedule": "zb-h1", "recompute": [0, 1, 5]}, random_model
        ),
        "mapping": Cell(mapping, mapping_model),
        "mapping, recomputed": Cell({**mapping, "recompute": [1, 2, 3]}, mapping_model),
        "bfloat16 boundary": Cell({**three, "boundary": "bfloat16"}, random_model),
        "norm of exponent 1": Cell({**three, "clip_grad_norm": 0.05, "clip_norm_type": 1.0}),
        "joint loss, layers recomputed": Cell(
            {**five, "loss_on": "batch", "recompute": [1, 2]}, loss=contrastive
        ),
    }
    for rule in ("double-buffer", "vertical-sync", "wpipe", "pipemare"):
        cell_of_rule[rule] = Cell({**three, "schedule": "pipedream", "weights": rule}, random_model)
    return cell_of_rule


def schedules() -> dict[str, dict[str, Any]]:
    """Return options of `ps.Pipeline` that choose a schedule, for chains of 8 layers."""
    copies = ps.schedule("1f1b", stages=2, micro_batches=MICRO_BATCHES, replicas=2)
    looped = ps.schedule("interleaved", stages=4, micro_batches=MICRO_BATCHES, chunks=2)
    folded = ps.schedule("zb-v", stages=4, micro_batches=MICRO_BATCHES)
    four, two = [2, 2, 2, 2], [4, 4]
    return {
        "1f1b": {"schedule": "1f1b", "balance": four, "micro_batches": MICRO_BATCHES},
        "gpipe": {"schedule": "gpipe", "balance": four, "micro_batches": MICRO_BATCHES},
        "interleaved": {"schedule": looped, "balance": four},
        "zb-h1": {"schedule": "zb-h1", "balance": four, "micro_batches": MICRO_BATCHES},
        "zb-v": {"schedule": folded, "balance": four},
        "chimera": {"schedule": "chimera", "balance": two, "micro_batches": MICRO_BATCHES},
        "copies": {"schedule": copies, "balance": two},
        "bpipe": {"schedule": "bpipe", "balance": four, "micro_batches": MICRO_BATCHES},
        "pipedream": {"schedule": "pipedream", "balance": four, "micro_batches": MICRO_BATCHES},
    }


def cells() -> dict[str, Cell]:
    """Return all cells that train, by name."""
    all_cells: dict[str, Cell] = {}
    one = schedules()["1f1b"]
    for number, (name, options) in enumerate(schedules().items()):
        # 1F1B in every way to recompute; of the others, every second one in each.
        other_ways = ("always", "except_last")
        if name != "1f1b":
            other_ways = other_ways[number % 2 :][:1]
        if name == "1f1b":
            all_cells["1f1b, recompute never"] = Cell({**options, "recompute": "never"})
        for recompute in ("never", *other_ways):
            chosen = {**options, "recompute": recompute}
            all_cells[f"{name}, random, recompute {recompute}"] = Cell(chosen, random_model)
        combined_ways = ("never", "always")
        if name != "1f1b":
            combined_ways = combined_ways[number % 2 :][:1]
        for recompute in combined_ways if name != "pipedream" else ():
            everything = {**options, "clip_grad_norm": 0.05, "recompute": recompute}
            combined = f"{name}, tied weights, clipping, recompute {recompute}"
            all_cells[combined] = Cell(everything, tied_model, tokens)
    for recompute in ("never", "always"):
        traced = {**one, "balance": [1, 1, 1, 2], "recompute": recompute}
        all_cells[f"traced, recompute {recompute}"] = Cell(traced, traced_model, pairs)
    all_cells["int8 boundary"] = Cell({**one, "boundary": "int8"})
    all_cells["ignored targets"] = Cell(one, batch=ignored)
    all_cells["sum and count"] = Cell(one, batch=ignored, loss=sum_and_count)
    joint = {**schedules()["gpipe"], "loss_on": "batch"}
    all_cells["loss on batch"] = Cell(joint, loss=contrastive)
    all_cells["custom loss"] = Cell(one, loss=custom)
    all_cells["two terms"] = Cell(one, loss=penalised)
    all_cells["loss module"] = Cell(
        one, loss=nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5, 1.0]))
    )
    weighted = {**one, "loss_weight": lambda target: (target >= 0).sum()}
    all_cells["loss weight"] = Cell(weighted, batch=ignored)
    return all_cells | combinations()


def pipeline(cell: Cell, device: str) -> ps.Pipeline:
    """Return the cell's pipeline, with ranks as threads."""
    return ps.Pipeline(
        cell.model(),
        loss=cell.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
        executor="threads",
        device=device,
        deadline_s=HANG_S,
        **cell.options,
    )


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor's values."""
    return tensor.detach().to("cpu")


def train(cell: Cell, device: str, row: Row) -> dict[str, Tensor]:
    """Train for some steps; return the gradients of another batch, and the state, by name."""
    pipe = pipeline(cell, device)
    x, y = cell.batch()
    losses = [pipe.train_batch(x, y) for _ in range(STEPS - 1)]
    lookalike.clear()
    losses.append(pipe.train_batch(x, y))
    row.log = dict(lookalike.LOG)
    row.lines = {what: dict(counts) for what, counts in lookalike.LINES.items()}
    row.threads = sorted(lookalike.THREADS)
    losses.append(pipe.eval_batch(x, y))
    row.losses.append([float(loss).hex() for loss in losses])
    values = {f"state {name}": tensor for name, tensor in pipe.state_dict().items()}
    if pipe.setting.schedule.name != "pipedream":
        pipe.train_batch(x, y, update=False)
        for name, parameter in pipe.named_parameters():
            values[f"gradient {name}"] = on_host(parameter.grad)
    pipe.close()
    return values


def play(name: str, cell: Cell) -> Row:
    """Train one cell on the CPU and on the device."""
    row = Row(name)
    expected = train(cell, "cpu", row)
    values = train(cell, lookalike.DEVICE, row)
    row.differences = [
        key for key in expected | values if not torch.equal(expected[key], values[key])
    ]
    row.facts["values"] = len(values)
    return row


def pipe_row(
    name: str,
    devices: Sequence[str],
    make_model: Callable[[], nn.Module] = random_model,
    balance: Sequence[int] = (4, 4),
    make_batch: Callable[[], tuple[Any, Any]] = vectors,
) -> Row:
    """Run a `ps.Pipe` with checkpoints and dropout on the CPU and on other devices.

    A model that is no nn.Sequential is traced; partitions on several devices begin and end there.
    """
    row = Row(name)
    results = []
    for places in (("cpu",) * len(devices), devices):
        x, y = make_batch()
        torch.manual_seed(5)
        options = {"devices": places, "chunks": MICRO_BATCHES, "example": x}
        pipe = ps.Pipe(make_model(), balance, **options)
        lookalike.clear()
        loss = functional.cross_entropy(pipe(x), y.to(places[-1]))
        loss.backward()
        row.threads = sorted(lookalike.THREADS)
        row.losses.append([loss.item().hex()])
        row.facts["devices"] = [str(weight.device) for weight in pipe.parameters()]
        results.append({key: on_host(value.grad) for key, value in pipe.named_parameters()})
    expected, values = results
    row.differences = [key for key in expected if not torch.equal(expected[key], values[key])]
    row.facts["values"] = len(values)
    return row


def comparison_row(recompute: str) -> Row:
    """Compare a pipeline with dropout with one device."""
    row = Row(f"comparison, recompute {recompute}")
    options = {**schedules()["1f1b"], "recompute": recompute}
    devices: set[str] = set()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy, and note where it is computed."""
        if (
            not output.is_meta
        ):  # where it shows how much micro-batches count, targets may be on the host
            devices.update((output.device.type, target.device.type))
        return functional.cross_entropy(output, target)

    for device in ("cpu", lookalike.DEVICE):
        pipe = pipeline(Cell(options, random_model, loss=loss), device)
        devices.clear()
        comparison = pipe.compare_with_one_device(*vectors())
        parts = (comparison.gradients, comparison.buffers, comparison.outputs)
        row.losses.append([max(max(part.values()) for part in parts).hex()])
        row.facts[f"loss of {device}"] = comparison.loss
        row.facts[device] = str(comparison)
        pipe.close()
    row.facts["reference"] = comparison.device
    row.facts["loss devices"] = sorted(devices - {"meta"})
    return row


class Unsteady(nn.Module):
    """A layer that adds 1 in one of its calls: a second forward that differs from the first."""

    def __init__(self, call: int) -> None:
        """Choose the call, counted from 0."""
        super().__init__()
        self.calls, self.call = [0], call

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, or more."""
        self.calls[0] += 1
        return torch.tanh(x + 1.0 if self.calls[0] == self.call + 1 else x)


def late_row(name: str) -> Row:
    """Let a check fail in the third batch, whose checks are read later."""
    row = Row(name)
    options = {"schedule": "gpipe", "balance": [2, 1], "micro_batches": MICRO_BATCHES}
    count_calls = [0]

    def lying(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return a sum, and in one call of the third batch another count."""
        if not output.is_meta:
            count_calls[0] += 1
        wrong = name.endswith("count") and count_calls[0] == 3 * MICRO_BATCHES
        total, count = sum_and_count(output, target)
        return total, count + 1 if wrong and not output.is_meta else count

    def run(action: Callable[[ps.Pipeline], Any]) -> str:
        """Train three batches; return what the action says then."""
        count_calls[0] = 0
        # Two calls for each micro-batch: the last one of the third batch.
        call = -1 if name.endswith("count") else 3 * 2 * MICRO_BATCHES - 1
        model = nn.Sequential(nn.Linear(8, 8), Unsteady(call), nn.Linear(8, 4))
        recompute = {"late: recomputed stage": "always", "late: recomputed layer": [1]}
        chosen = {**options, "recompute": recompute.get(name, "never")}
        pipe = pipeline(Cell(chosen, lambda: model, loss=lying), lookalike.DEVICE)
        row.facts["passed"] = 0
        for _ in range(3):
            pipe.train_batch(*vectors())
            row.facts["passed"] += 1
        try:
            action(pipe)
        except ps.PenstockError as error:
            return str(error)
        return ""

    row.facts["words"] = "is divided by another number" if "count" in name else "other values"
    row.facts["next batch"] = run(lambda pipe: pipe.train_batch(*vectors()))
    row.facts["state_dict"] = run(lambda pipe: pipe.state_dict())
    row.facts["close"] = run(lambda pipe: pipe.close())
    return row


def guarded(name: str, action: Callable[[], Row]) -> Row:
    """Run a cell; what it raises stands in its row."""
    try:
        return action()
    except Exception:
        return Row(name, error=traceback.format_exc())


def all_rows(words: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run all cells, or those with one of these words in their names. Returns a dict of each row."""
    actions: dict[str, Callable[[], Row]] = {
        name: lambda name=name, cell=cell: play(name, cell) for name, cell in cells().items()
    }
    on_device, from_cpu = (lookalike.DEVICE,) * 2, ("cpu", lookalike.DEVICE)
    actions["pipe"] = lambda: pipe_row("pipe", on_device)
    actions["pipe on two devices"] = lambda: pipe_row("pipe on two devices", from_cpu)
    for places in (from_cpu, from_cpu[::-1]):
        name = f"traced pipe on {' and '.join(places)}"
        actions[name] = lambda name=name, places=places: pipe_row(
            name, places, seeded_residual, (2, 3), pairs
        )
    for name in ("late: recomputed stage", "late: recomputed layer", "late: count"):
        actions[name] = lambda name=name: late_row(name)
    for recompute in ("never", "always"):
        name = f"comparison, recompute {recompute}"
        actions[name] = lambda recompute=recompute: comparison_row(recompute)
    return [
        dataclasses.asdict(guarded(name, action))
        for name, action in actions.items()
        if not words or any(word in name for word in words)
    ]
