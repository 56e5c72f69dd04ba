"""The forward of a stage: what the layers get, what goes forward, and where backwards begin."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from penstock.errors import RunError
from penstock.modules.side_loss import side_loss
from penstock.stage import graph_builder
from penstock.stage.graph_builder import SIDE_LOSS, GraphBuilder
from penstock.transport.payload import Payload

CPU = torch.device("cpu")


class Layers:
    """Layers that run a function."""

    device = CPU

    def __init__(self, function):
        self.function, self.renewed, self.values = function, 0, []
        self.draws = SimpleNamespace(watches_backward=False)

    def run(self, batch, micro_batch, value, slice_state):
        """Run them."""
        self.values.append(value)
        return self.function(value)

    def renew(self):
        """Count the calls."""
        self.renewed += 1

    def weights(self):
        """Return an address."""
        return frozenset({7})


class Log(list):
    """Notes of what was called, in order."""

    def note(self, name, result=None):
        """Return a function that notes its call."""

        def call(*args, **options):
            self.append((name, *args))
            return result

        return call


def slice_state(log):
    """Return the state of earlier slices, which notes its check."""
    return SimpleNamespace(check_unchanged=log.note("unchanged"))


def batch_of(*, training=True):
    """Return a batch of two forms."""
    return SimpleNamespace(training=training, forms=["x", "y"])


def builder_of(function, *, index=0, loss=None, log=None, autocast=None, meter=None):
    """Return a builder over layers that run a function, and the layers."""
    layers = Layers(function)
    reach = None
    if log is not None:
        reach = SimpleNamespace(check_output=log.note("output"), check_loss=log.note("loss"))
    return GraphBuilder(index, layers, loss, autocast, reach, meter), layers


def build(builder, value, *, training=True, log=None, micro_batch=0):
    """Run the forward of a micro-batch."""
    log = Log() if log is None else log
    return builder.build(
        batch_of(training=training), micro_batch, Payload.of(value), slice_state(log)
    )


def losses_of(value, *, log=None):
    """Return a loss that has this value, and adds the side losses."""
    log = Log() if log is None else log

    def of(batch, micro_batch, output, sides):
        log.append(("loss of", micro_batch, [side.item() for side in sides]))
        return value(output) + sum(sides)

    return SimpleNamespace(of=of, targets=lambda batch, micro_batch: ["target"])


def with_side(value):
    """Double a value, with its sum as a side loss and a constant as another."""
    side_loss(value.sum())
    side_loss(torch.tensor(10.0))
    return 2 * value


def test_side_losses_go_forward_as_a_number_and_begin_a_backward_where_they_are():
    """The number has those of earlier stages; a side loss without a graph begins no backward."""
    x = torch.ones(2, requires_grad=True)
    builder, _ = builder_of(with_side)
    graph = build(builder, {SIDE_LOSS: torch.tensor(5.0), "value": x})
    value = graph.output.value()
    assert value["value"].tolist() == [2.0, 2.0]
    assert float(value[SIDE_LOSS]) == 5 + 2 + 10
    assert not value[SIDE_LOSS].requires_grad
    assert [root.item() for root in graph.loss_roots] == [2.0]
    assert graph.loss is None


def test_without_side_losses_the_output_goes_forward_as_it_is():
    """No stage behind has to unpack a dict; a dict of the model is none of side losses."""
    builder, layers = builder_of(lambda value: value)
    x = {"value": torch.ones(2)}
    graph = build(builder, x)
    assert graph.output.value().keys() == {"value"}
    assert layers.values[0].keys() == {"value"}
    assert graph.loss_roots == []


def test_the_last_stage_reports_a_loss_with_all_side_losses():
    """In the order of the stages; its backward begins at its own side losses and at the loss."""
    log = Log()
    builder, _ = builder_of(with_side, loss=losses_of(lambda y: y.sum(), log=log), log=log)
    x = torch.ones(2, requires_grad=True)
    graph = build(builder, {SIDE_LOSS: torch.tensor(5.0), "value": x}, log=log, micro_batch=1)
    assert ("loss of", 1, [5.0, 2.0, 10.0]) in log
    assert graph.loss.item() == 4 + 17
    assert [root.item() for root in graph.loss_roots] == [2.0, 21.0]
    assert graph.output is None
    assert [entry[0] for entry in log] == ["unchanged", "output", "loss of", "loss"]
    assert log[1][1] == "0/y"


def test_layers_and_checks_get_what_belongs_to_the_micro_batch():
    """The layers its number and the state of the slices before; the checks the model's output."""
    log, calls = Log(), []
    builder, layers = builder_of(None, loss=losses_of(lambda y: y.sum(), log=log), log=log)
    layers.run = lambda *args: calls.append(args) or 2 * args[2]
    batch, state = batch_of(), slice_state(log)
    graph = builder.build(batch, 1, Payload.of(torch.ones(2)), state)
    ((seen, number, value, seen_state),) = calls
    assert (seen, number, value.tolist(), seen_state) == (batch, 1, [1.0, 1.0], state)
    checked = {entry[0]: entry[1:] for entry in log}
    form, output = checked["output"]
    assert (form, output.tolist()) == ("0/y", [2.0, 2.0])
    assert checked["loss"] == (batch, graph.loss, output)


@pytest.mark.parametrize("loss", [None, torch.tensor(3.0)], ids=["no targets", "constant"])
def test_a_loss_without_a_graph_begins_no_backward(loss):
    """An evaluation without targets has none; a constant has no gradient."""
    builder, _ = builder_of(
        lambda value: value, loss=SimpleNamespace(of=lambda *args: loss, targets=None)
    )
    graph = build(builder, torch.ones(2, requires_grad=True))
    assert graph.loss is loss
    assert graph.loss_roots == []


def test_an_evaluation_begins_no_backward_at_side_losses_and_checks_no_reach():
    """Its outputs have no gradients to lead anywhere."""
    log = Log()
    builder, _ = builder_of(with_side, log=log)
    graph = build(builder, torch.ones(2, requires_grad=True), training=False, log=log)
    assert graph.loss_roots == []
    assert [entry[0] for entry in log] == ["unchanged"]
    assert builder.in_place.known(training=False)
    assert not builder.in_place.known(training=True), "layers may do other things in training"


def test_layers_that_change_their_input_get_a_copy():
    """The stage before may still read it; the first forward tells, and every later one knows."""
    builder, layers = builder_of(lambda value: value.add_(1))
    for _ in range(2):
        x = torch.zeros(2)
        assert build(builder, x).output.value().tolist() == [1.0, 1.0]
        assert x.tolist() == [0.0, 0.0]
    assert builder.in_place.known(training=True)
    assert not builder.in_place.known(training=False)
    assert layers.renewed == 0
    builder.renew()
    assert layers.renewed == 1
    assert not builder.in_place.known(training=True), "other layers may have come"


def test_layers_that_change_nothing_get_the_input_itself_from_the_second_forward_on():
    """And are refused when they change it then after all."""
    changes = []

    def function(value):
        return value.add_(1) if changes else value + 1

    builder, layers = builder_of(function)
    x = torch.zeros(2)
    for _ in range(2):
        build(builder, x)
    assert layers.values[0] is not x
    assert layers.values[1] is x
    changes.append(True)
    with pytest.raises(RunError, match="changed in place what their stage was given"):
        build(builder, x)


def test_outputs_on_another_device_do_not_leave():
    """The next stage would silently get them on its own."""
    builder, _ = builder_of(lambda value: torch.ones(2, device="meta"))
    with pytest.raises(RunError, match="crosses the boundary behind a stage on cpu"):
        build(builder, torch.ones(2))


@pytest.mark.parametrize(
    ("autocast", "dtype"),
    [(None, torch.float32), (torch.bfloat16,) * 2, (torch.float16,) * 2],
)
def test_layers_and_loss_run_in_mixed_precision_if_requested(autocast, dtype):
    """The context ends with the forward."""
    seen = []

    def function(value):
        seen.append((value @ value).dtype)
        return value

    def loss(output):
        seen.append((output @ output).dtype)
        return output.sum()

    builder, _ = builder_of(function, loss=losses_of(loss), autocast=autocast)
    build(builder, torch.ones(2, 2))
    assert seen == [dtype] * 2
    assert builder.mixed == (autocast is not None)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_backward_in_which_layers_draw_is_seeded_for_its_micro_batch(weights_only, monkeypatch):
    """By its part, since a W draws other numbers than the backward before it."""
    log = Log()
    builder, layers = builder_of(lambda value: value)
    monkeypatch.setattr(graph_builder, "Place", lambda batch, number: ("place", batch, number))
    context = contextlib.nullcontext()
    layers.draws.backward = lambda place, *, weights_only: (
        log.append((place, weights_only)) or context
    )
    batch = batch_of()
    plain = builder.backward_context(batch, 1, weights_only=weights_only)
    assert log == []
    assert plain is not context
    layers.draws.watches_backward = True
    assert builder.backward_context(batch, 1, weights_only=weights_only) is context
    assert log == [(("place", batch, 1), weights_only)]


def test_a_form_is_measured_until_its_size_is_final():
    """Stages have forms of their own; the first graph may be of copies, and is not final."""
    log, settled = Log(), set()
    meter = SimpleNamespace(settled=settled.__contains__, measuring=log.note("measuring"))
    builder, _ = builder_of(
        lambda value: value, index=3, loss=losses_of(lambda y: y.sum()), meter=meter
    )
    inputs = Payload.of(torch.ones(2))
    builder.measuring(batch_of(), 1, inputs)
    build(builder, torch.ones(2))
    builder.measuring(batch_of(), 1, inputs)
    builder.measuring(batch_of(training=False), 0, inputs)
    assert [(entry[1], entry[5]) for entry in log] == [
        ("3/y", False),
        ("3/y", True),
        ("3/x", False),
    ]
    assert [entry[2:5] for entry in log] == [(inputs.tensors, frozenset({7}), ["target"])] * 3
    settled.add("3/y")
    builder.measuring(batch_of(), 1, inputs)
    assert len(log) == 3
