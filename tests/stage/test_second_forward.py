"""A stage compares the forward that it recomputes for the backward with the first one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.stage.test_stage import make_stages, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.batches.batch import make_batch
from penstock.errors import RunError
from penstock.modules.recomputing import is_checkpointing, is_recomputing
from penstock.schedule.recompute import Recompute
from penstock.stage.second_forward import SecondForwards


class Counting(nn.Module):
    """A layer whose output depends on the number of its calls, which no one restores."""

    def __init__(self, last_call_alike: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = [0]
        self.last_call_alike = last_call_alike

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Double the output after the calls that are alike."""
        self.calls[0] += 1
        factor = 1 if self.calls[0] <= self.last_call_alike else 2
        return self.linear(value) * factor


def pipeline_with(layer: nn.Module) -> ps.Pipeline:
    """Return a pipeline of two stages that recompute all; the first has the layer."""
    return ps.Pipeline(
        nn.Sequential(layer, nn.Linear(4, 4)),
        balance=(1, 1),
        schedule="gpipe",
        micro_batches=2,
        loss=nn.functional.mse_loss,
        recompute="always",
        executor="threads",
        device="cpu",
    )


def test_a_forward_that_comes_to_something_else_is_refused():
    """Calls 1 and 2 are the forwards, and calls 3 and 4 recompute them."""
    x = torch.randn(4, 4)
    with pytest.raises(RunError, match="recomputed for the backward, the forward made"):
        pipeline_with(Counting(last_call_alike=2)).train_batch(x, x)
    assert pipeline_with(Counting(last_call_alike=4)).train_batch(x, x).isfinite()


class Stateful(nn.Module):
    """A layer with a buffer and an attribute that change in every forward."""

    def __init__(self, *, buffer: bool = True, attribute: bool = True) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("calls", torch.zeros(1))
        self.factor = 1.0 if attribute else nn.Identity()

    def step(self) -> None:
        """Change the state."""
        if hasattr(self, "calls"):
            self.calls += 1
        if isinstance(self.factor, float):
            self.factor += 1.0

    def state(self) -> tuple[float | None, float | None]:
        """Return the buffer and the attribute."""
        calls = float(self.calls) if hasattr(self, "calls") else None
        return calls, self.factor if isinstance(self.factor, float) else None


@pytest.mark.parametrize(
    ("buffer", "attribute"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_a_second_forward_has_the_state_of_the_first_and_leaves_the_newest(buffer, attribute):
    """Buffers and plain attributes; layers know that it is a recomputation, and copies are dropped."""
    layer = Stateful(buffer=buffer, attribute=attribute)
    second_forwards = SecondForwards([layer], [], "stage 0, layer 0")
    first = second_forwards.first()
    before = layer.state()
    layer.step()
    layer.step()
    newest = layer.state()
    assert not is_recomputing()
    with second_forwards.seeing(first):
        assert is_recomputing()
        assert layer.state() == before
        layer.step()
    assert not is_recomputing()
    assert layer.state() == newest
    assert not first.buffers


def test_buffers_of_modules_beside_the_layers_are_those_of_the_first_forward_too():
    """Such as of an entry; a module that two layers share has its buffers once."""
    shared, entry = Stateful(attribute=False), Stateful(attribute=False)
    layers = [nn.Sequential(shared), nn.Sequential(shared, nn.Tanh())]
    second_forwards = SecondForwards(layers, [entry], "stage 0, layers 0 to 1")
    first = second_forwards.first()
    before = [shared.state(), entry.state()]
    for layer in (shared, shared, entry):
        layer.step()
    newest = [shared.state(), entry.state()]
    with second_forwards.seeing(first):
        assert [shared.state(), entry.state()] == before
        for layer in (shared, entry):
            layer.step()
    assert [shared.state(), entry.state()] == newest


def test_layers_of_torch_alone_have_no_state_and_are_recomputed_all_the_same():
    """Hooks on them may ask whether they are."""
    second_forwards = SecondForwards([nn.Tanh()], [], "stage 0, layer 0")
    first = second_forwards.first()
    assert not first.buffers
    with second_forwards.seeing(first):
        assert is_recomputing()
    assert not is_recomputing()


@pytest.mark.parametrize("deferring", [False, True])
def test_a_comparison_is_read_later_where_the_host_must_not_wait(deferring):
    """Only of values: other shapes are known at once."""
    added = []
    checks = SimpleNamespace(deferring=deferring, add=lambda *check: added.append(check))
    second_forwards = SecondForwards([nn.Identity()], [], "stage 3, layer a", checks)
    first = second_forwards.first()
    second_forwards.check(first, [torch.ones(2)], 4)  # nothing is noted, so nothing is compared
    first.note([torch.ones(2)])
    second_forwards.check(first, [torch.ones(2)], 4)
    assert not any(bool(failed) for failed, _ in added)
    added.clear()
    place = "stage 3, layer a, micro-batch 4: recomputed for the backward, the forward made"
    with pytest.raises(RunError, match=place):
        second_forwards.check(first, [torch.ones(3)], 4)
    added.clear()
    if not deferring:
        with pytest.raises(RunError, match=place):
            second_forwards.check(first, [torch.zeros(2)], 4)
        assert added == []
        return
    second_forwards.check(first, [torch.zeros(2)], 4)
    ((failed, text),) = added
    assert bool(failed)
    assert text.startswith(f"{place} other values")


class Asking(nn.Module):
    """A layer that notes whether its forward will be recomputed, and whether it is a second one."""

    def __init__(self):
        super().__init__()
        self.linear, self.answers = nn.Linear(4, 4), []

    def forward(self, x):
        """Note both."""
        self.answers.append((is_checkpointing(), is_recomputing()))
        return self.linear(x)


@pytest.mark.parametrize("recompute", [Recompute.NEVER, Recompute.ALWAYS])
def test_layers_can_ask_whether_their_forward_is_recomputed(recompute):
    """A layer with side effects has them once; nothing is recomputed in an evaluation."""
    stages, _ = make_stages([Asking(), nn.Tanh()], recompute=recompute)
    x = torch.randn(4, 4)
    for step in range(2):
        train(stages, make_batch(x, x, 2, step=step, training=True), split=False, evicts=False)
    is_repeated = recompute is Recompute.ALWAYS
    batch_answers = [(is_repeated, False)] * 2 + [(False, True)] * 2 * is_repeated
    assert stages[0].layers[0].module.answers == batch_answers * 2
    stages[0].layers[0].module.answers.clear()
    stages[0].forward(make_batch(x, x, 2, step=2, training=False), 0, None)
    assert stages[0].layers[0].module.answers == [(False, False)]


class Checkpointed(nn.Module):
    """A layer that runs its forward again in its backward, by torch's own function."""

    def __init__(self):
        super().__init__()
        self.inner = Asking()

    def forward(self, x):
        """Run the layer inside."""
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("split", [False, True])
def test_a_layer_that_recomputes_by_itself_knows_it_in_all_backwards(split):
    """Whole or in two parts, with and without the fast path."""
    stages, _ = make_stages([Checkpointed(), nn.Tanh()])
    x = torch.randn(4, 4)
    answers = stages[0].layers[0].module.inner.answers
    for step in range(4):
        train(stages, make_batch(x, x, 2, step=step, training=True), split=split, evicts=False)
        assert answers[:2] == [(False, False)] * 2
        assert len(answers) > 3
        assert set(answers[2:]) == {(False, True)}
        answers.clear()
