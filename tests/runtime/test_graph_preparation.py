"""Graphs of traced models are built before a batch begins, on all ranks, and not in the middle of
it.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from tests.runtime.preparing import (
    Small,
    anneal,
    chain_of,
    pipeline,
    plain_losses,
    traced_pipeline,
)
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import ChainError
from penstock.ranks.processes.launch import launch
from penstock.ranks.status_board import SharedBoard
from penstock.runtime import graph_preparation
from penstock.runtime.graph_preparation import Preparation
from penstock.tracing import variants


def playing():
    """Whether this thread is inside a batch's program."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "play":
            return True
        frame = frame.f_back
    return False


def test_a_new_form_is_traced_before_the_batch_and_the_status_says_so(monkeypatch):
    """A last batch of odd size has micro-batches of one sample, which need another graph."""
    places, notes = [], []
    original, doing = variants.capture, SharedBoard.for_rank

    def capture(*args, **options):
        places.append(playing())
        return original(*args, **options)

    pipe = traced_pipeline(Small(), torch.randn(4, 4))
    monkeypatch.setattr(variants, "capture", capture)

    def for_rank(self, rank):
        board = doing(self, rank)
        plain = board.doing
        board.doing = lambda what: (notes.append(what), plain(what))[1]
        return board

    monkeypatch.setattr(SharedBoard, "for_rank", for_rank)
    for samples in (4, 2, 3, 2):
        pipe.train_batch(torch.randn(samples, 4), torch.randint(0, 3, (samples,)))
    assert places == [False]
    assert notes.count("traces the model for inputs of (1, 4)") == 2


def test_a_form_whose_layers_differ_is_refused_before_any_op_runs():
    """In the middle of a step the other ranks would wait for a message that is never sent."""
    pipe = traced_pipeline(Small(), torch.randn(4, 4))
    for _ in range(2):  # a form that could not be traced is not taken for a known one
        with pytest.raises(ChainError, match=r"fails on these inputs, also without a trace"):
            pipe.train_batch(torch.randn(4, 5), torch.randint(0, 3, (4,)))
    pipe.train_batch(torch.randn(4, 4), torch.randint(0, 3, (4,)))


def test_processes_trace_at_construction_and_go_by_the_users_model():
    """A chain is sent without its graphs; model and chain that are sent together stay connected."""
    torch.manual_seed(0)
    model = Small()
    expected = plain_losses(model)
    for result in launch(anneal, 2, model, chain_of(model)):
        torch.testing.assert_close(result["losses"], expected)
        assert result["known"]
        # The example's form at construction, then one sample, then the other temperature.
        assert result["inside"] == [False] * 3


def test_a_layer_that_is_replaced_later_is_refused():
    """The stages hold the layers that the model had; the new one would stay as it is."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 2)))
    pipe = ps.Pipeline(
        model,
        loss=functional.mse_loss,
        optimizer=torch.optim.Adam,
        balance=[1, 2],
        micro_batches=2,
        executor="threads",
    )
    x, y = torch.ones(4, 3), torch.ones(4, 2)
    pipe.train_batch(x, y)
    head, model[1][1] = model[1][1], nn.Linear(3, 2)
    with pytest.raises(ChainError, match="the layers of Sequential are others than when it was"):
        pipe.train_batch(x, y)
    model[1][1] = head
    pipe.train_batch(x, y)


class ScriptedVariants:
    """The graphs of a model by form; all calls go to a log."""

    def __init__(self, log, example="example", *, is_known=False):
        self.log, self.example, self.is_known = log, example, is_known
        self.current, self.changes_stages, self.version = True, True, 0
        self.drawing, self.draws = frozenset(), {}
        self.graphs, self.dtypes = set(), []

    def is_current(self, training):
        """Whether the model is the one that was traced."""
        return self.current

    def refresh(self, training):
        """Note that the model has changed."""
        self.log.append(("refresh", training))
        self.current = True
        return self.changes_stages

    def state(self, training):
        """Return the version of the model."""
        return self.version

    def has(self, form, training):
        """Whether there is a graph."""
        self.log.append(("has", form.name, training))
        self.dtypes.append(autocast_dtype())
        return (form.name, training) in self.graphs

    def find(self, form, training):
        """Trace a graph."""
        self.log.append(("trace", form.name, training, autocast_dtype()))
        self.graphs.add((form.name, training))
        self.drawing = self.draws.get(form.name, self.drawing)


def autocast_dtype():
    """Return the dtype of mixed precision; None without it."""
    enabled = torch.is_autocast_enabled("cpu")
    return torch.get_autocast_dtype("cpu") if enabled else None


def form_of(name):
    """Return the form of inputs."""
    return SimpleNamespace(name=name, tensors=[torch.ones(2, 3), torch.ones(1)])


@pytest.fixture
def prepare(monkeypatch):
    """Return a preparation of two ranks, its graphs and its log."""

    def make(*, autocast=None, chain=False, **options):
        log = []
        graphs = None if chain else ScriptedVariants(log, **options)
        monkeypatch.setattr(graph_preparation, "Form", SimpleNamespace(of=form_of))
        monkeypatch.setattr(
            graph_preparation, "check_needs", lambda assembly, batch: log.append(("needs",))
        )

        def watch(roots):
            log.append(("watch", roots))
            return SimpleNamespace(check=lambda: log.append(("containers",)))

        monkeypatch.setattr(graph_preparation, "ContainerWatch", watch)
        stages = [SimpleNamespace(renew=lambda n=n: log.append(("renew", n))) for n in range(2)]
        world = SimpleNamespace(
            local_ranks=(3, 4),
            device={3: torch.device("cpu")}.get,
            board=lambda rank: SimpleNamespace(doing=lambda text: log.append((rank, text))),
        )
        traced = SimpleNamespace(variants=graphs, roots=["root"])
        assembly = SimpleNamespace(world=world, stages=stages, traced=traced)
        preparation = Preparation(assembly, autocast, lambda: log.append(("settle",)))
        assert log.pop() == ("watch", ["root"] if chain else ())
        return preparation, graphs, log

    return make


def batch_of(*inputs, signature="form", training=True):
    """Return a batch."""
    return SimpleNamespace(inputs=inputs, signature=signature, training=training)


CHECKS = [("needs",), ("containers",)]
TEXT = "traces the model for inputs of (2, 3), (1,)"


def test_a_chain_has_nothing_to_trace(prepare):
    """Its batches are checked alone, and keep their signatures."""
    preparation, _, log = prepare(chain=True)
    preparation.begin()
    batch = batch_of("a")
    assert preparation.prepare(batch) is batch
    assert (batch.signature, log) == ("form", CHECKS)


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_the_example_is_traced_first_unless_its_graph_came_with_the_chain(
    prepare, is_known, autocast
):
    """That graph is one without mixed precision."""
    preparation, graphs, log = prepare(is_known=is_known, autocast=autocast)
    graphs.example = form_of("example")
    preparation.begin()
    traces = [entry for entry in log if entry[0] == "trace"]
    expected = autocast is not None or not is_known
    assert traces == [("trace", "example", True, autocast)] * expected
    assert graphs.dtypes == [autocast] * expected, "it is looked up as it would be traced"
    preparation, graphs, log = prepare(example=None, autocast=autocast)
    preparation.begin()
    assert log == []


def test_every_micro_batch_of_a_new_batch_is_looked_up_and_traced_once(prepare):
    """All ranks of the process say what they do; the next batch of this form costs nothing."""
    preparation, _, log = prepare()
    for _ in range(2):
        log.clear()
        preparation.prepare(batch_of("a", "b", "a"))
        if len(log) == 2:
            break
        assert log == [
            *CHECKS,
            ("has", "a", True),
            (3, TEXT),
            (4, TEXT),
            ("trace", "a", True, None),
            ("has", "b", True),
            (3, TEXT),
            (4, TEXT),
            ("trace", "b", True, None),
            ("has", "a", True),
        ]
    assert log == CHECKS
    preparation.prepare(batch_of("a", training=False, signature="evaluation"))
    assert log[-1] == ("trace", "a", False, None)


def test_a_batch_may_have_known_forms_and_new_ones(prepare):
    """Such as the last one of an epoch, whose first micro-batches are as large as before."""
    preparation, _, log = prepare()
    preparation.prepare(batch_of("a", "a"))
    log.clear()
    preparation.prepare(batch_of("a", "b", signature="other"))
    assert [entry[1] for entry in log if entry[0] == "trace"] == ["b"]


def test_an_evaluation_goes_by_the_model_in_evaluation_mode(prepare):
    """Its state and its changes are others than those of training."""
    preparation, graphs, log = prepare()
    graphs.state = lambda training: 0 if training else 5
    graphs.is_current = lambda training: training
    for training, signature in ((True, "form"), (False, "form/5")):
        log.clear()
        batch = preparation.prepare(batch_of("a", training=training))
        assert batch.signature == signature
        refreshed = [entry for entry in log if entry[0] == "refresh"]
        assert refreshed == ([] if training else [("refresh", False)])


def test_the_example_is_traced_when_the_pipeline_is_constructed(monkeypatch):
    """In mixed precision it has another graph than the one that came with the chain."""
    chain = chain_of(Small())
    captures = []
    capture = variants.capture

    def recorded(*args, **options):
        captures.append(autocast_dtype())
        return capture(*args, **options)

    monkeypatch.setattr(variants, "capture", recorded)
    pipeline(chain, executor="threads", autocast=torch.bfloat16)
    assert captures == [torch.bfloat16]


def test_graphs_depend_on_the_model_and_on_the_settings_of_torch(prepare):
    """Each of them is part of what a prepared batch is known by."""
    preparation, graphs, log = prepare()

    def is_looked_up(**options):
        log.clear()
        preparation.prepare(batch_of("a", **options))
        return ("has", "a", True) in log

    assert is_looked_up()
    assert not is_looked_up()
    assert is_looked_up(signature="other")
    graphs.version = 1
    assert is_looked_up()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert is_looked_up()
            assert not is_looked_up()
    torch.set_default_dtype(torch.float64)
    try:
        assert is_looked_up()
    finally:
        torch.set_default_dtype(torch.float32)
    assert not is_looked_up()


def test_messages_between_different_graphs_have_different_signatures(prepare):
    """A model that has not changed leaves the signature alone."""
    preparation, graphs, _ = prepare()
    for version, signature in ((0, "form"), (1, "form/1"), (2, "form/2")):
        graphs.version = version
        for _ in range(2):
            assert preparation.prepare(batch_of("a")).signature == signature


@pytest.mark.parametrize("changes_stages", [False, True])
def test_batches_in_flight_are_finished_before_the_graphs_change(prepare, changes_stages):
    """They belong to the earlier ones; stages begin anew only if these differ."""
    preparation, graphs, log = prepare()
    preparation.prepare(batch_of("a"))
    log.clear()
    graphs.current, graphs.changes_stages = False, changes_stages
    preparation.prepare(batch_of("a"))
    assert log == [
        *CHECKS,
        ("settle",),
        ("refresh", True),
        *[("renew", 0), ("renew", 1)] * changes_stages,
    ]
    graphs.current, graphs.is_known = False, True
    log.clear()
    preparation.begin()
    assert log[:2] == [("settle",), ("refresh", True)]


def test_stages_begin_anew_when_other_layers_draw_random_numbers(prepare):
    """Which layers do is known from the graphs."""
    preparation, graphs, log = prepare()
    graphs.draws = {"b": frozenset([1]), "d": frozenset([2])}
    for names, renews in (("a", 0), ("b", 1), ("c", 0), ("de", 1), ("f", 0)):
        log.clear()
        preparation.prepare(batch_of(*names, signature=names))
        assert [entry for entry in log if entry[0] == "renew"] == [
            ("renew", 0),
            ("renew", 1),
        ] * renews


def test_the_number_of_prepared_forms_has_a_limit(prepare, monkeypatch):
    """Data of ever new shapes must not fill the memory; what was dropped is looked up again."""
    monkeypatch.setattr(graph_preparation, "_MAX_KEYS", 3)
    preparation, _, log = prepare()
    for number in range(9):
        preparation.prepare(batch_of("a", signature=str(number)))
        assert len(preparation._prepared) <= 4
        log.clear()
        preparation.prepare(batch_of("a", signature=str(number)))
        assert log == CHECKS, "the last one is there"
    preparation.prepare(batch_of("a", signature="0"))
    assert ("has", "a", True) in log
