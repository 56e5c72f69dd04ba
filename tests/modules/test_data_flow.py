"""Which named tensors values were computed from, and which were written, read by Python or both."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.modules.data_flow import DataFlow, has_custom_function


@dataclass
class Holder:
    """A value that torch does not search for tensors."""

    content: object


class Doubled(torch.autograd.Function):
    """A user's function with a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        """Return twice the input."""
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        """Return twice the gradient."""
        return 2 * grad


def test_values_depend_on_the_tensors_that_were_read_through_any_number_of_ops():
    """A chain of ops hides the first one; views and constants have no contents of their own."""
    a, b = torch.ones(3), torch.ones(3)
    with DataFlow({"a": a, "b": b}) as flow:
        product = (2 * a).exp().view(3, 1)
        both = product + b
        neither = torch.zeros(3) + 1
    assert flow.names_in(product) == {"a"}
    assert flow.names_in(both) == {"a", "b"}
    assert flow.names_in({"x": [neither, product]}) == {"a"}
    assert flow.names_in(neither) == set()
    assert (flow.written, flow.read_by_python, flow.sparse) == (set(), set(), [])


def test_tensors_that_share_memory_are_read_and_written_together():
    """A write to one is a change of both, also through a view."""
    whole = torch.zeros(4)
    with DataFlow({"whole": whole, "half": whole[:2], "other": torch.zeros(1)}) as flow:
        output = whole + 1
        whole[3:].add_(1)
    assert flow.names_in(output) == {"whole", "half"}
    assert flow.written == {"whole", "half"}


def test_ops_before_and_after_the_context_are_not_followed():
    """Only what runs in it belongs to the forward."""
    a = torch.ones(2)
    flow = DataFlow({"a": a})
    before = a + 1
    with flow:
        a.add_(0)
    after = a + 1
    assert flow.names_in(before) == flow.names_in(after) == set()
    assert flow.names_in(a) == {"a"}


def test_what_is_written_into_a_tensor_becomes_part_of_its_contents():
    """A later forward that reads it reads these, too; they themselves are not written."""
    a, target = torch.ones(3), torch.zeros(3)
    with DataFlow({"a": a, "target": target}) as flow:
        target.add_(a)
        target.add_(1)
        output = 2 * target
    assert flow.written == {"target"}
    assert flow.names_in(output) == {"a", "target"}


@pytest.mark.parametrize(
    ("overwrite", "expected"),
    [
        (lambda buffer, a: buffer.copy_(a), {"a"}),
        (lambda buffer, a: buffer.fill_(0.0), set()),
        (lambda buffer, a: buffer.zero_(), set()),
    ],
    ids=["copy_", "fill_", "zero_"],
)
def test_an_overwritten_tensor_has_lost_its_contents(overwrite, expected):
    """A buffer that each forward fills before it reads it passes nothing on."""
    a, buffer = torch.ones(3), torch.zeros(3)
    with DataFlow({"a": a, "buffer": buffer}) as flow:
        overwrite(buffer, a)
        output = buffer + 1
    assert flow.written == {"buffer"}
    assert flow.names_in(output) == expected


@pytest.mark.parametrize(
    "part",
    [lambda t: t[:2], lambda t: t[::2], lambda t: t.view(2, 2).t()],
    ids=["head", "steps", "t"],
)
def test_a_part_that_is_overwritten_leaves_the_rest(part):
    """Only a contiguous tensor that covers its memory is replaced as a whole."""
    buffer = torch.zeros(4)
    with DataFlow({"buffer": buffer}) as flow:
        part(buffer).fill_(1.0)
        output = buffer + 1
    assert flow.written == {"buffer"}
    assert flow.names_in(output) == {"buffer"}


def test_numbers_of_a_tensor_are_read_by_python():
    """The program may branch on them, so everything after depends on the tensor."""
    a, b = torch.ones(2), torch.ones(2)
    with DataFlow({"a": a, "b": b}) as flow:
        float((a * 2).sum())
        assert flow.read_by_python == {"a"}
        torch.equal(b, a)
    assert flow.read_by_python == {"a", "b"}


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_reads_its_statistics_only_in_evaluation(training):
    """In training it writes them and normalises by the batch."""
    norm = nn.BatchNorm1d(3).train(training)
    with DataFlow(dict(norm.named_buffers())) as flow:
        output = norm(torch.arange(12.0).reshape(4, 3))
    statistics = {"running_mean", "running_var"}
    assert flow.names_in(output) == (set() if training else statistics)
    if training:
        assert flow.written == {*statistics, "num_batches_tracked"}


def test_batch_norm_still_reads_what_is_not_a_statistic():
    """Its weight and its input, of which only the statistics are left out."""
    x, weight, mean, var = torch.rand(4, 3), torch.ones(3), torch.zeros(3), torch.ones(3)
    with DataFlow({"x": x, "weight": weight, "mean": mean, "var": var}) as flow:
        output = functional.batch_norm(x, mean, var, weight, None, training=True)
    assert flow.names_in(output) == {"x", "weight"}
    assert {"mean", "var"} <= flow.written
    assert {"x", "weight"}.isdisjoint(flow.written)


def test_ops_write_to_the_tensors_that_they_are_given_by_name():
    """`out=` is an output of the user's."""
    a, out = torch.ones(3), torch.zeros(3)
    with DataFlow({"a": a, "out": out}) as flow:
        torch.add(a, 1, out=out)
    assert flow.written == {"out"}
    assert "a" in flow.names_in(out)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_tables_whose_gradients_are_to_be_sparse_are_listed(kind, sparse):
    """Each look-up says so by itself, whatever the module."""
    table = kind(4, 2, sparse=sparse)
    with DataFlow({}) as flow:
        table(torch.tensor([[0, 1]]))
    assert [entry.data_ptr() for entry in flow.sparse] == [table.weight.data_ptr()] * sparse


def test_a_layout_without_one_memory_counts_as_read():
    """What was computed from the tensor cannot be followed further."""
    a = torch.eye(2)
    with DataFlow({"a": a, "sparse": a.to_sparse()}) as flow:
        sparse = a.to_sparse()
    assert flow.read_by_python == {"a"}
    assert flow.names_in(sparse) == set()


def test_ops_without_a_schema_are_followed_by_what_they_read():
    """Such as torch's higher-order ops: nothing says what they write."""

    def double(x):
        return 2 * x

    a = torch.ones(1)
    flow = DataFlow({"a": a})
    output = flow.__torch_dispatch__(double, (), (a,))
    assert flow.names_in(output) == {"a"}
    assert flow.written == set()


def test_a_write_to_a_layout_without_one_memory_counts_as_read():
    """What was written into it may be read from it unnoticed."""
    a, sparse = torch.ones(2, 2), torch.eye(2).to_sparse()
    with DataFlow({"a": a, "sparse": sparse}) as flow:
        sparse.mul_(a[0, 0])
    assert flow.read_by_python == {"a"}
    assert flow.written == set()


def test_tensors_are_looked_for_in_objects_to_a_limited_depth():
    """Outputs may be of the user's classes; objects that refer to each other must end."""
    a = torch.ones(1)
    with DataFlow({"a": a}) as flow:
        output = a + 1
    assert flow.names_in(Holder([output])) == {"a"}
    assert flow.names_in(UserDict(x=output)) == {"a"}
    nested = output
    for _ in range(4):
        nested = Holder(nested)
    assert flow.names_in(nested) == {"a"}
    assert flow.names_in(Holder(nested)) == set()
    ring = Holder(None)
    ring.content = ring
    assert flow.names_in(ring) == set()
    ring = UserDict()
    ring["self"] = ring
    assert flow.names_in(ring) == set()
    assert flow.names_in(nn.ParameterList([output])) == set(), "modules of torch are not searched"


def test_only_functions_of_the_user_are_custom_ones():
    """They are found at any depth of a graph, and in nested values."""
    x = torch.ones(2, requires_grad=True)
    shared = x * 2
    assert not has_custom_function([shared + shared, torch.ones(1), x])
    assert not has_custom_function(None)
    custom = Doubled.apply(x)
    assert has_custom_function(custom)
    assert has_custom_function({"a": torch.ones(1), "b": (shared.exp(), (custom + shared).sum())})
