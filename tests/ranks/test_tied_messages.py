"""Messages about tensors that several ranks hold, between ranks of this process.

Whole pipelines with tied weights are trained in test_tied_weights.py.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.errors import ChainError
from penstock.ranks.tied_weights import Shared, Tied, shared_tensors, tensors_of
from penstock.schedule.catalogue import schedule
from penstock.schedule.lower import Link
from penstock.schedule.replicas import pipelines
from penstock.transport.in_process import Exchange, MemoryTransport


def tied_ranks(rows, *, size=3):
    """What each rank holds of some shared tensors, each on every rank that has it, and the waits.

    Args:
        rows: of each shared tensor its name, ranks, home, whether it is trained, and its shape.
    """
    exchange, waits = Exchange(), []

    def guard(peer, action):
        waits.append(peer)
        return action()

    ranks = []
    for rank in range(size):
        held = []
        for name, holders, home, trainable, shape in rows:
            if rank in holders:
                tensor = torch.full(shape, float(rank), requires_grad=trainable)
                held.append((Shared(name, (0, 1), holders, home, trainable), tensor))
        ranks.append(Tied(rank, held, MemoryTransport(rank, exchange, 5.0), guard))
    return ranks, waits


def run_all(ranks, method):
    """Call a method of all ranks at the same time."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(lambda tied: getattr(tied, method)(), ranks))


@pytest.mark.parametrize("present", list(itertools.product([False, True], repeat=3)))
def test_gradients_are_summed_at_home_in_the_order_of_ranks_and_dropped_elsewhere(present):
    """Whatever ranks have one; a rank without one adds nothing, and none at all stays none."""
    everywhere = [("w", (0, 1, 2), 0, True, (2,)), ("v", (0, 1, 2), 0, True, (3,))]
    # The first tensor of the chain is on the last rank, which does not come first for that.
    ranks, _ = tied_ranks([("u", (0, 2), 0, True, (1,)), *everywhere])
    values = [1e8, 1.0, -1e8]
    for tied, has_grad, value in zip(ranks, present, values, strict=True):
        *_, (_, first), (_, second) = tied.held
        first.grad = torch.full((2,), value) if has_grad else None
        second.grad = torch.full((3,), float(tied.rank + 1))
    run_all(ranks, "gather")
    *_, (_, first), (_, second) = ranks[0].held
    assert second.grad.tolist() == [6.0] * 3
    expected = None
    for has_grad, value in zip(present, values, strict=True):
        if has_grad:
            term = torch.full((2,), value)
            expected = term if expected is None else expected + term
    if expected is None:
        assert first.grad is None
    else:
        assert first.grad.tolist() == expected.tolist()
    for tied in ranks[1:]:
        assert {tensor.grad for _, tensor in tied.held} == {None}


def test_sparse_gradients_are_summed_as_dense_ones():
    """An embedding with sparse=True at home or elsewhere."""
    for sparse in itertools.product([False, True], repeat=2):
        ranks, _ = tied_ranks([("w", (0, 1), 1, True, (2, 2))], size=2)
        for tied, is_sparse in zip(ranks, sparse, strict=True):
            grad = torch.eye(2) * (tied.rank + 1)
            tied.held[0][1].grad = grad.to_sparse() if is_sparse else grad
        run_all(ranks, "gather")
        grad = ranks[1].held[0][1].grad
        assert grad.to_dense().tolist() == [[3.0, 0.0], [0.0, 3.0]]
        assert ranks[0].held[0][1].grad is None


def test_ranks_with_crossing_homes_do_not_wait_for_each_other_in_a_circle():
    """Each sends before it waits, and the tensors of a pair of ranks are in one order."""
    rows = [
        ("a", (0, 1), 0, True, (2,)),
        ("b", (0, 1), 1, True, (3,)),
        ("c", (0, 1, 2), 1, True, (4,)),
        ("d", (1, 2), 2, True, (2,)),
        ("e", (0, 1), 0, True, (5,)),
    ]
    ranks, waits = tied_ranks(rows)
    for tied in ranks:
        for place, (_, tensor) in enumerate(tied.held):
            tensor.grad = torch.full_like(tensor, 10.0 * (tied.rank + 1) + place)
    run_all(ranks, "gather")
    by_name = {(tied.rank, shared.name): tensor for tied in ranks for shared, tensor in tied.held}
    grads = {
        key: None if tensor.grad is None else tensor.grad.unique().tolist()
        for key, tensor in by_name.items()
    }
    assert {key: grad for key, grad in grads.items() if grad is not None} == {
        (0, "a"): [10.0 + 20.0],
        (1, "b"): [21.0 + 11.0],
        (1, "c"): [22.0 + 12.0 + 30.0],
        (2, "d"): [31.0 + 23.0],
        (0, "e"): [13.0 + 24.0],
    }
    assert set(waits) == {0, 1, 2}
    run_all(ranks, "send_weights")
    for name, holders, home, _, _ in rows:
        for rank in holders:
            assert by_name[rank, name].unique().tolist() == [float(home)]


def test_frozen_tensors_and_buffers_are_sent_once_at_the_beginning():
    """After a batch only trained weights have changed; no message is left over."""
    rows = [
        ("trained", (0, 1), 0, True, (2,)),
        ("frozen", (0, 1, 2), 2, False, (3,)),
        ("other", (1, 2), 1, False, (2,)),
    ]
    ranks, _ = tied_ranks(rows)
    run_all(ranks, "send_weights")
    values = [[tensor.unique().item() for _, tensor in tied.held] for tied in ranks]
    assert values == [[0.0, 0.0], [0.0, 1.0, 1.0], [2.0, 2.0]]
    run_all(ranks, "begin")
    values = [[tensor.unique().item() for _, tensor in tied.held] for tied in ranks]
    assert values == [[0.0, 2.0], [0.0, 2.0, 1.0], [2.0, 1.0]]
    assert ranks[0].transport.exchange._payloads == {}
    assert all(tensor.is_leaf for tied in ranks for _, tensor in tied.held)


def test_a_weight_that_is_thawed_is_trained_from_then_on():
    """Also where it is frozen again: its last values must reach all ranks."""
    ranks, _ = tied_ranks([("w", (0, 1), 0, False, (2,))], size=2)
    for tied in ranks:
        tied.held[0][1].requires_grad_(True)
        tied.held[0][1].grad = torch.ones(2)
    run_all(ranks, "gather")
    assert ranks[0].held[0][1].grad.tolist() == [1.0, 1.0], "it is not yet trained"
    for tied in ranks:
        tied.held[0][1].grad = torch.ones(2)
        tied.refresh()
        tied.held[0][1].requires_grad_(False)
        tied.refresh()
    run_all(ranks, "gather")
    assert ranks[0].held[0][1].grad.tolist() == [2.0, 2.0]
    run_all(ranks, "send_weights")
    assert ranks[1].held[0][1].tolist() == [0.0, 0.0]


def test_a_weight_that_is_trained_is_sent_also_if_it_is_frozen_from_the_beginning():
    """Its values at home may be others, such as after a checkpoint was loaded there."""
    ranks, _ = tied_ranks([("w", (0, 1), 0, True, (2,))], size=2)
    for tied in ranks:
        tied.held[0][1].requires_grad_(False)
    run_all([Tied(tied.rank, tied.held, tied.transport, tied.guard) for tied in ranks], "begin")
    ranks[0].held[0][1].fill_(7.0)
    run_all(
        [Tied(tied.rank, tied.held, tied.transport, tied.guard) for tied in ranks], "send_weights"
    )
    assert ranks[1].held[0][1].tolist() == [7.0, 7.0]


def test_messages_of_another_number_of_tensors_have_another_signature():
    """Between hosts messages of one signature have one form; a thawed weight changes it."""

    class Links(MemoryTransport):
        """The links of a rank, which note the signatures of what is sent and expected."""

        def send(self, peer, message, payload, signature):
            """Send a message."""
            signatures.append(signature)
            return super().send(peer, message, payload, signature)

        def post(self, peer, message, signature):
            """Expect a message."""
            signatures.append(signature)
            return super().post(peer, message, signature)

    rows = [("w", (0, 1), 0, True, (2,)), ("v", (0, 1), 0, False, (2,))]
    ranks, _ = tied_ranks(rows, size=2)
    exchange, by_count = Exchange(), []
    for _ in range(2):
        signatures = []
        for tied in ranks:
            tied.transport = Links(tied.rank, exchange, 5.0)
        run_all(ranks, "gather")
        run_all(ranks, "send_weights")
        assert len(signatures) == 4, "both ranks, of gradients and of weights"
        assert len(set(signatures)) == 2
        by_count.append(set(signatures))
        for tied in ranks:
            tied.held[1][1].requires_grad_(True)
            tied.refresh()
    assert not by_count[0] & by_count[1]


def chain_of(tied, *, layers=6, frozen=()):
    """The part of a chain that is read: layers that are numbered, and who uses which tensor."""

    def stage_bounds(lengths):
        ends = list(itertools.accumulate(lengths))
        return list(zip([0, *ends[:-1]], ends, strict=True))

    return SimpleNamespace(
        tied=tied,
        layers=[SimpleNamespace(name=f"l{number}") for number in range(layers)],
        stage_bounds=stage_bounds,
        tensor=lambda name: SimpleNamespace(trainable=name not in frozen),
    )


def test_tensors_of_several_stages_are_shared_by_all_ranks_that_hold_these():
    """The home is the first rank of the first stage; uses within one stage need no message."""
    chain = chain_of(
        {"embed": (5, 0), "inner": (2, 3), "pair": (1, 2, 5), "buffer": (0, 3)}, frozen={"buffer"}
    )
    shared = shared_tensors(chain, [2, 2, 2], schedule("1f1b", 3, 2))
    assert shared == (
        Shared("embed", (0, 2), (0, 2), 0, True),
        Shared("pair", (0, 1, 2), (0, 1, 2), 0, True),
        Shared("buffer", (0, 1), (0, 1), 0, False),
    )
    copies = pipelines(schedule("1f1b", 3, 2), 2, 4)
    assert [one.ranks for one in shared_tensors(chain, [2, 2, 2], copies)] == [
        (0, 2, 3, 5),
        (0, 1, 2, 3, 4, 5),
        (0, 1, 3, 4),
    ]
    interleaved = schedule("interleaved", 4, 4)
    (one,) = shared_tensors(chain_of({"w": (1, 3)}, layers=4), [1, 1, 1, 1], interleaved)
    assert (one.stages, one.ranks, one.home) == ((1, 3), (1,), 1)
    assert one.links == set()


def test_links_of_a_shared_tensor_are_between_its_home_and_the_others():
    """The others do not exchange it with each other."""
    links = Shared("w", (0, 1), (0, 2, 3), 2, True).links
    assert links == {Link(2, 0), Link(0, 2), Link(2, 3), Link(3, 2)}


@pytest.mark.parametrize("name", ["norm.running_mean", "running_var", "a.num_batches_tracked"])
def test_running_statistics_in_two_stages_are_refused_by_their_names(name):
    """Each use continues from the one before. A weight of such a name in one stage is fine."""
    chain = chain_of({name: (1, 2)})
    message = (
        f"{name} is used by layers l1, l2, which this cut puts into stages 0, 1. It is a runni"
    )
    with pytest.raises(ChainError, match=message):
        shared_tensors(chain, [2, 4], schedule("1f1b", 2, 2))
    assert shared_tensors(chain, [3, 3], schedule("1f1b", 2, 2)) == ()
    assert shared_tensors(chain_of({f"{name}.w": (1, 2)}), [2, 4], schedule("1f1b", 2, 2))


def test_asynchronous_stages_may_share_only_what_is_not_trained():
    """There is no moment at which their gradients could be added up."""
    chain, stream = chain_of({"w": (0, 5)}), schedule("pipedream", 2, 1)
    with pytest.raises(ChainError, match=r"pipedream is asynchronous: .* Move the cut"):
        shared_tensors(chain, [3, 3], stream)
    frozen = chain_of({"w": (0, 5)}, frozen={"w"})
    assert len(shared_tensors(frozen, [3, 3], stream)) == 1


def test_live_tensors_are_found_by_their_first_names_in_the_first_layer_that_has_them():
    """Buffers too; a tensor under two names has the first one."""
    first, second = nn.Linear(2, 2), nn.BatchNorm1d(2)
    third = nn.Linear(2, 2)  # of another stage, which has a copy of the weight
    traced = SimpleNamespace(first_name=lambda name: {"2.weight": "0.weight"}.get(name, name))
    tensors = tensors_of(traced, [("0", first), ("1", second), ("2", third)])
    assert tensors["0.weight"] is first.weight
    assert "2.weight" not in tensors
    assert tensors["1.running_mean"] is second.running_mean
    assert tensors["2.bias"] is third.bias
    assert len(tensors) == 8
