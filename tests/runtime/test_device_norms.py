"""The global norm of gradients on devices: places in one vector, agreed on once per epoch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.errors import RunError
from penstock.runtime import device_norms as module
from penstock.runtime.device_norms import DeviceNorms, device_norms


class Collectives:
    """Sums over ranks that take turns in one thread; `others` are the vectors of the other ranks."""

    device = torch.device("cpu")

    def __init__(self, others=()):
        self.others, self.log = list(others), []

    def sum(self, vector):
        """Add what the other ranks contribute."""
        self.log.append(("sum", vector.clone()))
        for other in self.others:
            vector += other
        return "sum"

    def broadcast(self, value, root):
        """Note the value of the root."""
        self.log.append(("broadcast", float(value), root))
        return "broadcast"

    def wait(self, work):
        """Note what is waited for."""
        self.log.append(("wait", work))


def interpreter_of(rank, stages, log=None):
    """Return a rank with stages of parameters of these dtypes."""

    def during(text, call):
        if log is not None:
            log.append(text)
        return call()

    updates = {
        index: SimpleNamespace(
            update=SimpleNamespace(
                parameters=[nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in dtypes]
            )
        )
        for index, dtypes in stages.items()
    }
    return SimpleNamespace(rank=rank, stages=updates, guard=SimpleNamespace(during=during))


def reports_of(monkeypatch, other_values):
    """Let other ranks report these values; return the reports of this rank."""
    reports = []

    def exchange(world, local):
        ((rank, report),) = local.items()
        assert report.rank == rank
        reports.append(report.value)
        others = [SimpleNamespace(value=value) for value in other_values]
        return [SimpleNamespace(value=report.value), *others]

    monkeypatch.setattr(module, "exchange", exchange)
    return reports


def test_every_parameter_has_a_place_in_the_order_of_the_stages(monkeypatch):
    """Stages 0 and 2 live here, 1 and 3 elsewhere; the first place counts what is not finite."""
    reports = reports_of(monkeypatch, [[[[3, 1], [1, 2]], ["float32"]]])
    other = torch.tensor([1.0, 0, 0, 3.0, 4.0, 0, 12.0])
    collectives = Collectives([other])
    log = []
    interpreter = interpreter_of(0, {0: [torch.float32] * 2, 2: [torch.float32]}, log)
    norms = DeviceNorms(SimpleNamespace(world=None), {0: [2, 0], 1: [3, 1]}, 2.0, collectives)
    rows = [torch.tensor([2.0]), torch.tensor([5.0, 1.0])]
    norm, nonfinite = norms.total(interpreter, rows, torch.tensor([1.0]), epoch=0)
    expected = torch.tensor([5.0, 1.0, 3.0, 4.0, 2.0, 12.0]).norm()
    assert float(norm) == pytest.approx(float(expected))
    assert nonfinite.tolist() == [2.0]
    assert nonfinite.dtype == torch.float32
    assert reports == [[[[2, 1], [0, 2]], ["float32", "float32"]]]
    assert collectives.log[0][1].tolist() == [1.0, 5.0, 1.0, 0, 0, 2.0, 0]
    assert [entry[0] for entry in collectives.log] == ["sum", "wait", "broadcast", "wait"]
    assert [entry[1] for entry in collectives.log if entry[0] == "wait"] == ["sum", "broadcast"]
    assert collectives.log[2][2] == 0, "all ranks take the bits of rank 0"
    assert log == ["the norms of all ranks"]


def test_places_are_agreed_on_again_only_in_another_epoch(monkeypatch):
    """Frozen or thawed parameters change their numbers on all ranks at once."""
    reports = reports_of(monkeypatch, [])
    interpreter = interpreter_of(0, {0: [torch.float32] * 3})
    norms = DeviceNorms(SimpleNamespace(world=None), {0: [0]}, 2.0, Collectives())
    zero = torch.zeros(1)
    for epoch in (0, 0, 4, 4):
        count = 3 if epoch == 0 else 2
        interpreter.stages[0].update.parameters = interpreter.stages[0].update.parameters[:count]
        row = torch.full((count,), 2.0)
        norm, _ = norms.total(interpreter, [row], zero, epoch)
        assert float(norm) == pytest.approx(2 * count**0.5)
    assert [value[0] for value in reports] == [[[0, 3]], [[0, 2]]]


@pytest.mark.parametrize(
    ("local", "other", "expected"),
    [
        (torch.float32, "float64", torch.float64),
        (torch.float64, "float32", torch.float64),
        (torch.bfloat16, "float16", torch.float32),
        (torch.bfloat16, "bfloat16", torch.bfloat16),
    ],
)
def test_the_vector_has_a_dtype_that_holds_the_norms_of_all_ranks(
    monkeypatch, local, other, expected
):
    """The same on all ranks, or their sum would fail."""
    reports_of(monkeypatch, [[[[1, 1]], [other]]])
    collectives = Collectives()
    norms = DeviceNorms(SimpleNamespace(world=None), {0: [0], 1: [1]}, 1.0, collectives)
    norms.total(interpreter_of(0, {0: [local]}), [torch.ones(1)], torch.zeros(1), 0)
    assert collectives.log[0][1].dtype == expected


def test_a_model_without_parameters_has_a_norm_of_0(monkeypatch):
    """Its vector is that of `nonfinite` alone."""
    reports_of(monkeypatch, [])
    norms = DeviceNorms(SimpleNamespace(world=None), {0: [0]}, 2.0, Collectives())
    norm, _ = norms.total(interpreter_of(0, {0: []}), [torch.zeros(0)], torch.zeros(1), 0)
    assert float(norm) == 0


def test_a_rank_that_fails_meanwhile_is_reported_by_the_guard(monkeypatch):
    """The exchange runs inside of it."""
    reports_of(monkeypatch, [])
    interpreter = interpreter_of(0, {0: [torch.float32]})

    def during(text, call):
        raise RunError("rank 1 failed")

    interpreter.guard = SimpleNamespace(during=during)
    collectives = Collectives()
    norms = DeviceNorms(SimpleNamespace(world=None), {0: [0]}, 2.0, collectives)
    with pytest.raises(RunError, match="rank 1 failed"):
        norms.total(interpreter, [torch.ones(1)], torch.zeros(1), 0)
    assert collectives.log == []


@pytest.mark.parametrize(
    ("has_collectives", "norm_type", "on_devices"),
    [
        (True, 2.0, True),
        (True, 0.5, True),
        (True, 0.0, False),
        (True, -1.0, False),
        (False, 2.0, False),
    ],
)
def test_norms_go_in_messages_without_collectives_or_with_an_exponent_of_0(
    has_collectives, norm_type, on_devices, monkeypatch
):
    """Such a norm counts parameters without a gradient, which have 0 in the vector."""
    world = SimpleNamespace(collectives=Collectives() if has_collectives else None)
    monkeypatch.setattr(module, "DeviceNorms", lambda *args: args)
    assembly, homes = SimpleNamespace(world=world), {0: [0]}
    norms = device_norms(assembly, homes, norm_type)
    assert norms == ((assembly, homes, norm_type, world.collectives) if on_devices else None)


def test_a_rank_fills_the_places_of_its_own_stages_alone(monkeypatch):
    """All others are 0, and so is the count of what is not finite in them."""
    reports_of(monkeypatch, [[[[0, 2]], ["float32"]]])
    collectives = Collectives()
    norms = DeviceNorms(SimpleNamespace(world=None), {0: [0], 1: [1]}, 2.0, collectives)
    interpreter = interpreter_of(1, {1: [torch.float32]})
    norms.total(interpreter, [torch.tensor([5.0])], torch.tensor([1.0]), 0)
    assert collectives.log[0][1].tolist() == [1.0, 0.0, 0.0, 5.0]
