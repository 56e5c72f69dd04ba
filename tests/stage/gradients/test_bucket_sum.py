"""Buckets: which parameters they hold, when they are sent, and what their sums are."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.errors import SettingError
from penstock.stage.gradients import bucket_sum
from penstock.stage.gradients.bucket_reduction import AllReduce
from penstock.stage.gradients.bucket_sum import BucketSum


class TwoRounds:
    """A reduction that notes its rounds, and completes its first when the test says so."""

    def __init__(self, layout, log):
        self.log, self.number, self.sum = log, len(log), layout.empty().zero_()
        self.nbytes = layout.nbytes
        log.append([])

    def memory(self):
        """Return the memory of the sum."""
        return self.sum

    def begin(self):
        """Start the first round."""
        self.log[self.number].append("begin")
        return self.number, 1

    def advance(self):
        """Start the second round."""
        self.log[self.number].append("advance")
        return self.number, 2

    def finish(self):
        """Return the sum."""
        self.log[self.number].append("finish")
        return self.sum


def test_second_rounds_begin_in_the_order_of_the_buckets_at_polls(monkeypatch):
    """All ranks start them in one order; nothing waits, and no second round begins twice."""
    monkeypatch.setattr(bucket_sum, "BUCKET_BYTES", 1)
    completed, log = set(), []

    def wait(work):
        completed.add(work)

    collectives = SimpleNamespace(
        all_reduce=lambda flags: (flags, 1), is_completed=completed.__contains__, wait=wait
    )
    buckets = BucketSum(
        0, collectives, lambda layout: TwoRounds(layout, log), lambda _, call: call()
    )
    parameters = [weight(5, 5) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    buckets.poll()  # nothing has been started
    buckets.start(parameters)
    buckets.poll()
    assert log == [["begin"]] * 3
    completed.add((1, 1))
    buckets.poll()
    assert log == [["begin"]] * 3, "the first bucket comes first"
    completed.add((0, 1))
    for _ in range(2):
        buckets.poll()
        assert log == [["begin", "advance"], ["begin", "advance"], ["begin"]]
    completed.update({(0, 2), (2, 1)})
    buckets.poll()
    assert log == [["begin", "advance"]] * 3, "the first one is in its second round"
    buckets.finish(parameters)
    assert log == [["begin", "advance", "finish"]] * 3


def test_second_rounds_begin_during_the_backward_too(monkeypatch):
    """Whenever a gradient is there; the last backward then hides both rounds of early buckets."""
    monkeypatch.setattr(bucket_sum, "BUCKET_BYTES", 1)
    log, completed = [], {(0, 1)}
    collectives = SimpleNamespace(is_completed=completed.__contains__, wait=lambda work: None)
    buckets = BucketSum(
        0, collectives, lambda layout: TwoRounds(layout, log), lambda _, call: call()
    )
    parameters = [weight(2), weight(3), weight(4)]
    buckets.watch(parameters)
    parameters[2].sum().backward()
    assert log == [["begin", "advance"], [], []]
    parameters[1].sum().backward()
    completed.add((1, 1))
    assert log == [["begin", "advance"], ["begin"], []]
    parameters[0].sum().backward()
    assert log == [["begin", "advance"], ["begin", "advance"], ["begin"]]
    buckets.forget()


def test_a_later_bucket_is_sent_in_its_turn_though_a_gradient_has_come_twice(monkeypatch):
    """The graph may reach a parameter several times."""
    monkeypatch.setattr(bucket_sum, "BUCKET_BYTES", 1)
    parameters = [weight(2), weight(3)]
    buckets, collectives, _ = alone()
    buckets.watch(parameters)
    for _ in range(2):
        parameters[0].sum().backward()
    assert collectives.started == []
    parameters[1].sum().backward()
    assert collectives.started == [3, 2]
    _, sums = buckets.finish(parameters)
    assert [total[0].item() for total in sums] == [2.0, 1.0]


class Alone:
    """Collective operations of a single replica, which are complete at once."""

    count = 1

    def __init__(self):
        self.started = []

    def all_reduce(self, tensor, *, second=False):
        """Note the size of what is summed."""
        del second
        self.started.append(tensor.numel())
        return tensor

    def is_completed(self, work):
        """It is."""
        return work is not None

    def wait(self, work):
        """Nothing to wait for."""
        assert work is not None


def alone():
    """Return sums of a single replica, its operations, and the layouts of its buckets."""
    collectives, layouts = Alone(), []

    def make(layout):
        layouts.append(layout)
        return AllReduce(collectives, layout)

    return BucketSum(3, collectives, make, lambda _, call: call()), collectives, layouts


def weight(*shape, trained=True, dtype=torch.float32):
    """Return a parameter of ones."""
    return nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=trained)


def test_buckets_hold_parameters_of_one_dtype_from_the_last_to_the_first(monkeypatch):
    """A bucket is closed when it has its bytes; those of other dtypes stay open meanwhile. The same
    parameters have the same buckets again, other ones have new ones.
    """
    monkeypatch.setattr(bucket_sum, "BUCKET_BYTES", 40)
    parameters = [
        weight(1),
        weight(2, 2),
        weight(3, dtype=torch.float64),
        weight(8),
        weight(4),
        weight(2, dtype=torch.float64),
        weight(10),
        weight(),
    ]
    buckets, _, layouts = alone()
    expected = [
        [(), (10,)],
        [(2,), (3,)],
        [(4,), (8,)],
        [(2, 2), (1,)],
    ]
    for _ in range(2):
        buckets.start(parameters)
        counts, sums = buckets.finish(parameters)
        assert counts == [0] * 8
        assert [total.shape for total in sums] == [parameter.shape for parameter in parameters]
        assert [[tuple(shape) for shape in layout.shapes] for layout in layouts] == expected
        assert [layout.dtype.itemsize for layout in layouts] == [4, 8, 4, 4]
    assert buckets.nbytes == 4 * 11 + 8 * 5 + 4 * 12 + 4 * 5
    for other in (parameters[1:], [*parameters[:-1], weight()]):
        layouts.clear()
        buckets.finish(other)
        assert sum(len(layout.shapes) for layout in layouts) == len(other)


def test_a_bucket_that_has_its_bytes_exactly_is_closed(monkeypatch):
    """One byte more would be too late: a bucket is sent when it is full."""
    monkeypatch.setattr(bucket_sum, "BUCKET_BYTES", 40)
    buckets, _, layouts = alone()
    buckets.finish([weight(2), weight(9), weight(4), weight(6)])
    assert [[*map(tuple, layout.shapes)] for layout in layouts] == [[(6,), (4,)], [(9,), (2,)]]


@pytest.mark.parametrize("change", ["replaced", "in place", "dropped", "new"])
def test_the_gradients_at_the_end_are_summed_whatever_was_sent(change):
    """A hook or a second path through the graph may change them after their bucket has left."""
    parameters = [weight(3), weight(2)]
    buckets, collectives, _ = alone()
    buckets.watch(parameters)
    parameters[1].sum().backward()
    if change == "new":
        buckets._missing[0] = 1  # as if the first one were frozen
    parameters[0 if change != "new" else 1].sum().backward()
    assert collectives.started == [5]
    expected = [1.0, 1.0]
    if change == "replaced":
        parameters[1].grad = torch.full((2,), 5.0)
        expected = [1.0, 5.0]
    elif change == "in place":
        parameters[1].grad.mul_(7)
        expected = [1.0, 7.0]
    elif change == "dropped":
        parameters[1].grad = None
        expected = [1.0, 0.0]
    else:
        parameters[0].grad = torch.full((3,), 4.0)
        expected = [4.0, 2.0]
    counts, sums = buckets.finish(parameters)
    assert [float(total[0]) for total in sums] == expected
    assert counts == [1, 0 if change == "dropped" else 1]
    assert collectives.started == [5, 3, 5]


def test_sums_have_the_order_and_strides_of_their_parameters_and_memory_of_their_own():
    """Gradients that are missing count as zeros; how many replicas have one is told."""
    image = nn.Parameter(torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last))
    parameters = [weight(2, 3), image, weight(4), weight(3, dtype=torch.float64)]
    buckets, _, _ = alone()
    taken = []
    for step in (1, 2):
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, float(step * (number + 1)))
        parameters[2].grad = None
        before = [p.grad for p in parameters]
        counts, sums = buckets.finish(parameters)
        assert counts == [1, 1, 0, 1]
        values = [float(total.max()) for total in sums]
        assert values == [step, 2 * step, 0, 4 * step]
        for total, parameter, grad in zip(sums, parameters, before, strict=True):
            assert total.stride() == parameter.stride()
            assert total.dtype == parameter.dtype
            assert not total.requires_grad
            assert grad is None or total.data_ptr() != grad.data_ptr()
            assert parameter.grad is grad
        taken.append(sums)
    assert [float(total.max()) for total in taken[0]] == [1, 2, 0, 4]


def test_sums_that_are_dropped_are_freed():
    """An optimizer sets gradients to None; the bucket keeps no second reference."""
    buckets, _, _ = alone()
    parameter = weight(3)
    parameter.grad = torch.ones(3)
    _, sums = buckets.finish([parameter])
    memory = weakref.ref(sums[0].untyped_storage())
    del sums
    assert memory() is None


def test_buckets_are_sent_in_order_as_soon_as_their_gradients_are_there(monkeypatch):
    """A later bucket that is full waits for the earlier ones; frozen parameters hold none back; the
    rest leaves at the end. No hook is left behind.
    """
    monkeypatch.setattr(bucket_sum, "BUCKET_BYTES", 1)
    parameters = [weight(1), weight(2), weight(3, trained=False), weight(4), weight(5)]
    for end in ("finish", "forget"):
        buckets, collectives, _ = alone()
        buckets.watch(parameters)
        assert collectives.started == []
        parameters[1].sum().backward()
        parameters[3].sum().backward()
        assert collectives.started == []
        parameters[4].sum().backward()
        assert collectives.started == [5, 4, 3, 2]
        if end == "finish":
            counts, sums = buckets.finish(parameters)
            assert collectives.started == [5, 4, 3, 2, 1, 5 + 5]
            assert counts == [0, 1, 0, 1, 1]
            assert [float(total[0]) for total in sums] == [0, 1, 0, 1, 1]
        else:
            buckets.forget()
        collectives.started.clear()
        for parameter in parameters:
            parameter.grad = None
        sum(p.sum() for p in parameters if p.requires_grad).backward()
        assert collectives.started == [], "the next batch is not watched"
        buckets.poll()
        for factor in (1, 2):
            buckets.watch(parameters)
            (2 * parameters[4]).sum().backward()
            assert collectives.started == [5]
            buckets.start(parameters)
            buckets.start(parameters)
            assert collectives.started == [5, 4, 3, 2, 1, 5 + 5], "once"
            counts, sums = buckets.finish(parameters)
            assert [float(total[0]) for total in sums] == [1, 1, 0, 1, 1 + 2 * factor]
            collectives.started.clear()
        for parameter in parameters:
            parameter.grad = None


def test_a_failed_sum_leaves_nothing_to_the_next():
    """Neither rounds that were started nor sums that were not taken."""
    log = []
    collectives = SimpleNamespace(
        all_reduce=lambda flags: (0, 2), is_completed=lambda work: True, wait=lambda work: None
    )
    buckets = BucketSum(
        0, collectives, lambda layout: TwoRounds(layout, log), lambda _, call: call()
    )
    parameters = [weight(2)]
    parameters[0].grad = torch.ones(2)
    buckets.start(parameters)
    buckets.forget()
    buckets.poll()
    assert log == [["begin"]]
    buckets.start(parameters)
    buckets.poll()
    assert log == [["begin", "begin", "advance"]]
    buckets.forget()
    buckets.finish(parameters)
    assert log == [["begin", "begin", "advance", "begin", "advance", "finish"]]


def test_what_is_awaited_is_told_and_reductions_are_reset():
    """A rank that waits says for what; a checkpoint begins without left-out gradients."""
    waits, resets = [], []
    collectives = Alone()

    def make(layout):
        reduction = AllReduce(collectives, layout)
        reduction.reset = lambda: resets.append(layout.size)
        return reduction

    buckets = BucketSum(0, collectives, make, lambda text, call: waits.append(text) or call())
    parameters = [weight(2), weight(3, dtype=torch.float64)]
    buckets.reset()
    buckets.finish(parameters)
    assert waits == ["the other replicas"]
    assert resets == []
    buckets.reset()
    assert resets == [3, 2]


def test_a_sparse_gradient_has_no_place_in_a_bucket():
    """The message names the stage."""
    buckets, _, _ = alone()
    parameter = weight(2, 2)
    parameter.grad = torch.eye(2).to_sparse()
    with pytest.raises(SettingError, match="a gradient of stage 3, of shape"):
        buckets.finish([parameter])
