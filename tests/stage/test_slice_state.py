"""State that layers pass from slice to slice: exact in every case, or refused."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from tests.conformance.reference import differences, gradients, in_order_of
from tests.conformance.reference_slices import PlainSlices
from tests.conformance.slice_programs import seq1f1b, terapipe
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import RunError, StageFailed
from penstock.schedule.slicing import Slicing
from penstock.stage.slice_state import SliceState, SliceStates, tensors_of

SLICING = Slicing("tokens", ((0.5, 0.25, 0.25), (0.5, 0.25, 0.25)))
LENGTHS = [4, 2, 2]
X, Y = torch.linspace(-1, 1, 5 * 8 * 16).reshape(5, 8, 16), torch.arange(40).reshape(5, 8) % 16

every_way = pytest.mark.parametrize("recompute", ["never", "except_last", "always"])
every_backward = pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])


def loss(out, target):
    """Return the mean over tokens."""
    return functional.cross_entropy(out.flatten(0, 1), target.flatten())


class Recurrent(nn.Module):
    """A gated sum over the tokens so far, passing on every kind of state; see `forward_slice`."""

    def __init__(self):
        super().__init__()
        self.inner, self.gate = nn.Linear(16, 16), nn.Parameter(torch.tensor(0.5))

    def forward_slice(self, value, past):
        """Pass on a state, a count, a constant table, a mask, a flag, the gate itself and an unused
        tensor.
        """
        if past is None:
            past = {
                "state": value.new_zeros(len(value), 16),
                "rest": [torch.arange(16.0), 0],
                "all": self.gate,
            }
        inner = torch.tanh(self.inner(value))
        states = []
        state = past["state"]
        for token in range(value.shape[1]):
            state = state * past["all"] + inner[:, token]
            states.append(state)
        table, count = past["rest"]
        positions = torch.arange(count, count + value.shape[1])
        out = torch.stack(states, dim=1) + 0.01 * table + 0.001 * positions[:, None]
        left = {"state": state, "rest": [table, count + value.shape[1]], "all": past["all"]}
        return out, {**left, "mask": state > 0, "unread": inner[:, -1], "none": None}

    def forward(self, x):
        """Run the layer."""
        return self.forward_slice(x, None)[0]


def recurrent_model():
    """Eight layers, of which one occurs twice and two use earlier slices."""
    torch.manual_seed(0)
    layers = [
        nn.Linear(16, 16),
        Recurrent(),
        nn.Tanh(),
        nn.Dropout(0.2),
        Recurrent(),
        nn.LayerNorm(16),
        nn.Linear(16, 16),
    ]
    return nn.Sequential(*layers, layers[1])


def check_exact(model, lengths, *, recompute="never", split=False):
    """Check that two steps equal plain training on the same slices; return the pipeline."""
    schedule = seq1f1b(len(lengths), SLICING, split)
    plain = PlainSlices(copy.deepcopy(model), loss)
    pipe = ps.Pipeline(
        model,
        loss=loss,
        balance=lengths,
        schedule=schedule,
        recompute=recompute,
        executor="threads",
    )
    for _ in range(2):
        pipe.zero_grad()
        loss_value = pipe.train_batch(X, Y)
        expected, parts = plain.backward_in_parts(X, Y, [(3, LENGTHS), (2, LENGTHS)])
        assert torch.equal(loss_value, expected)
        assert (
            differences(gradients(model), in_order_of(schedule, lengths, plain.model, parts)) == []
        )
    return pipe


@every_way
@every_backward
@pytest.mark.parametrize("lengths", [[8], [3, 5], [1, 1, 2, 4]], ids=str)
def test_any_nest_of_tensors_and_constants_can_be_passed_on(lengths, recompute, split):
    """States, counts, masks, tables, unchanged tensors, parameters and unused tensors, by layer."""
    model = recurrent_model()
    if len(lengths) > 1:
        model[7] = Recurrent()  # a module in two stages is refused elsewhere
    check_exact(model, lengths, recompute=recompute, split=split)


@every_way
@every_backward
@pytest.mark.parametrize("frozen", [(0,), (0, 1), (1,), (4, 5, 6)], ids=str)
def test_frozen_layers_pass_on_state_too(frozen, recompute, split):
    """State without gradients has none to wait for, also before layers that are trained."""
    model = recurrent_model()
    model[7] = nn.Identity()
    for index in frozen:
        model[index].requires_grad_(False)
    check_exact(model, [2, 2, 4], recompute=recompute, split=split)


def test_slices_together_are_what_forward_is_on_the_whole():
    """The reference of this file is right: `forward_slice` of its layers agrees with `forward`."""
    model = recurrent_model()
    model[3] = nn.Identity()
    pipe = ps.Pipeline(
        model, loss=loss, balance=[8], schedule=terapipe(1, SLICING), executor="threads"
    )
    assert torch.allclose(pipe.forward(X), model(X), atol=1e-6)
    assert pipe.compare_with_one_device(X, Y).worst[1] < 1e-6


class Keeps(nn.Module):
    """A layer whose `forward_slice` is a given function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward_slice(self, value, past):
        """Call the function."""
        return self.function(value, past)


class Grower:
    """Neither a tensor nor a constant."""


def write_into(value, past):
    """A cache of fixed size that is written in place, as in inference."""
    cache = torch.zeros(len(value), 8, 16) if past is None else past[0]
    start = 0 if past is None else past[1]
    with torch.no_grad():
        cache[:, start : start + value.shape[1]] = value
    return value, (cache, start + value.shape[1])


WRONG = {
    "one thing": (
        lambda value, past: value,
        r"forward_slice of layer 1 \(Keeps\) returned Tensor: it must return its output, and",
    ),
    "three things": (
        lambda value, past: (value, past, past),
        r"forward_slice of layer 1 \(Keeps\) returned tuple",
    ),
    "an object": (
        lambda value, past: (value, Grower()),
        r"the past of layer 1 \(Keeps\) has a Grower in it: make it of tensors",
    ),
    "in place": (
        write_into,
        (
            r"the past of layer 1 was changed in place: its forward_slice must make new "
            r"tensors \(torch\.cat\)"
        ),
    ),
    "what is changed later": (
        lambda value, past: (value, value),
        r"the past of layer 1 was changed in place: .* layers after it must not",
    ),
}


@every_way
@pytest.mark.parametrize("name", WRONG)
def test_invalid_states_are_refused(name, recompute):
    """Each of these would silently train with wrong gradients."""
    function, message = WRONG[name]
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 16), Keeps(function), nn.ReLU(inplace=True), nn.Linear(16, 16)
    )
    pipe = ps.Pipeline(
        model,
        loss=loss,
        balance=[3, 1],
        schedule=terapipe(2, SLICING),
        recompute=recompute,
        executor="threads",
    )
    for run in (lambda: pipe.train_batch(X, Y), lambda: pipe.forward(X)):
        with pytest.raises(StageFailed, match=message):
            run()


def test_the_last_slices_state_is_not_stored():
    """It is the largest of all: keys and values of the whole sequence."""
    past = SliceState(keeps=False)
    past.run(0, "a", Keeps(lambda value, _: (value, value + 1)), torch.ones(2))
    assert past.outgoing == {}


def test_constants_of_all_kinds_are_passed_on_and_other_objects_are_not():
    """A copy of the stage gets them as they are; the message names the layer and the class."""
    constants = {"mode": "causal", "flag": True, "none": None, "count": 3, "rate": 0.5}
    state = SliceState()
    layer = Keeps(lambda value, past: (value, constants))
    assert state.run(4, "block", layer, torch.ones(2)).tolist() == [1.0, 1.0]
    assert state.outgoing == {4: constants}
    for value, name in ((2j, "complex"), (b"a", "bytes"), ({1}, "set")):
        layer = Keeps(lambda value, past, state=value: (value, [state]))
        with pytest.raises(RunError, match=rf"past of layer block \(Keeps\) has a {name} in it"):
            state.run(4, "block", layer, torch.ones(2))


def test_a_layer_gets_the_state_of_its_own_index():
    """Two layers of a stage pass on one each."""
    state = SliceState({4: 1.0, 7: 2.0})
    layer = Keeps(lambda value, past: (value * past, past + 10))
    assert [float(state.run(index, "a", layer, torch.ones(()))) for index in (7, 4)] == [2.0, 1.0]
    assert state.outgoing == {7: 12.0, 4: 11.0}
    assert state.incoming == {4: 1.0, 7: 2.0}


def test_gradients_of_incoming_state_go_back_by_slice():
    """Slice 2's gradients are for slice 1; a slice without incoming state has none."""
    pasts = SliceStates()
    pasts.store(2, {0: (torch.ones(2), 7), 3: torch.arange(2)}, [True, False])
    state = pasts.waiting.pop(2)
    assert state[0][1] == 7
    assert [leaf.requires_grad for leaf in tensors_of(state)] == [True, False]
    pasts.store_grads(2, [torch.full((2,), 5.0)])
    pasts.store_grads(0, [])
    assert [grad.tolist() for grad in pasts.pop_grads(2)] == [[5.0, 5.0]]
    assert pasts.pop_grads(2) == pasts.pop_grads(None) == []


def test_keys_and_values_are_freed_as_soon_as_their_slices_backward_is_done():
    """The memory promise of token slices: a completed micro-batch leaves nothing behind, whatever
    its neighbours do.
    """
    storages: list[tuple[int, weakref.ref[torch.UntypedStorage]]] = []

    def keep(value, past):
        grown = value * 1 if past is None else torch.cat([past, value], dim=1)
        # The memory, of which further tensors may be views.
        storages.append((grown.shape[1], weakref.ref(grown.untyped_storage())))
        return value + grown.mean(dim=1, keepdim=True), grown

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Keeps(keep))
    pipe = ps.Pipeline(
        model, loss=loss, balance=[2], schedule=seq1f1b(1, SLICING), executor="threads"
    )
    stage = pipe._assembly.stages[0]
    backward, alive = stage.backward, []

    def watched(*args):
        grads = backward(*args)
        gc.collect()
        alive.append([length for length, storage in storages if storage() is not None])
        return grads

    stage.backward = watched
    pipe.train_batch(X, Y)
    # F0 F1 F2 B2, F3 B1, F4 B0, F5 B5, B4, B3: what each slice has left is gone once it has been
    # backward itself
    assert alive == [[4, 6], [4, 4], [4, 6], [4, 6], [4], []]


def test_states_and_gradients_of_a_failed_batch_are_dropped():
    """The next one has slices of the same numbers."""
    states = SliceStates()
    states.store(1, {0: torch.ones(2)}, [True])
    states.store_grads(1, [torch.ones(2)])
    states.clear()
    assert not states.waiting
    assert states.pop_grads(1) == []
    states.store_grads(2, [])
    states.store_grads(3, [None])
    assert (states.pop_grads(2), states.pop_grads(3), states.pop_grads(3)) == ([], [None], [])
    assert states.pop_grads(None) == []


@pytest.mark.parametrize(("recompute", "extra"), [("never", 0), ("except_last", 3), ("always", 6)])
def test_slices_are_recomputed_as_their_micro_batch(recompute, extra):
    """The last micro-batch is exempt with all of its slices, and no other slice."""
    lengths = []

    def keep(value, past):
        lengths.append(value.shape[1])
        return value * 1, None

    model = nn.Sequential(nn.Linear(16, 16), Keeps(keep))
    pipe = ps.Pipeline(
        model,
        loss=loss,
        balance=[2],
        schedule=seq1f1b(1, SLICING),
        recompute=recompute,
        executor="threads",
    )
    pipe.train_batch(X, Y)
    assert len(lengths) == 6 + extra
