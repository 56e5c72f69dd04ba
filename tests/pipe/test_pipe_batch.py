"""Inputs of a `Pipe` are split into micro-batches, and their outputs are joined."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.pipe.pipe import Pipe
from penstock.pipe.pipe_batch import check_input, concatenate_outputs, split_input
from penstock.transport.payload import Payload


class Returning(nn.Module):
    """Whatever the input, it returns this."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, x):
        """Return it."""
        return self.make(x)


@pytest.mark.parametrize(
    ("make", "x", "kind", "says"),
    [
        (
            lambda x: "hello",
            torch.rand(2),
            TypeError,
            "expected Tensor, but got str: the output of the last layer",
        ),
        (
            lambda x: x,
            (torch.rand(2), "hello"),
            TypeError,
            "expected Tensor, but got str: a Pipe takes",
        ),
        (
            lambda x: x[0],
            (torch.rand(4), torch.rand(1)),
            ValueError,
            r"must be the same number of samples in each; these have \(4,\), \(1,\)",
        ),
        (
            lambda x: x[0],
            (torch.rand(4), torch.rand(2)),
            ValueError,
            r"must be the same number of samples in each; these have \(4,\), \(2,\)",
        ),
        (lambda x: x.sum(), torch.rand(4), RuntimeError, "a tensor without dimensions"),
        (lambda x: x.mean(0, True), torch.rand(4, 2), RuntimeError, r"shape \(1, 2\), \(1, 2\)"),
        (
            lambda x: x.transpose(0, 1),
            torch.rand(4, 6, 3),
            RuntimeError,
            r"shape \(6, 2, 3\), \(6, 2, 3\), … for micro-batches of 2, 2, … samples",
        ),
        (lambda x: torch.ones(3, 2), torch.rand(4), RuntimeError, "must index the samples"),
        (lambda x: [x] * int(x[0]), torch.arange(1.0, 5.0), RuntimeError, "nested in another way"),
    ],
)
def test_what_cannot_be_cut_or_joined_is_refused(make, x, kind, says):
    """Micro-batches are cut out of the input and joined to the output."""
    with pytest.raises(kind, match=says):
        Pipe(nn.Sequential(Returning(make)), [1], devices=1, chunks=2)(x)


def test_nested_inputs_boundaries_and_outputs_pass_with_none_and_constants_between():
    """In one process anything may cross; only what is cut or joined must be tensors or None."""
    model = nn.Sequential(
        Returning(lambda x: {"a": x["a"] * 2, "scale": 3.0, "none": x["none"]}),
        Returning(lambda x: (x["a"] * x["scale"], [x["a"], x["none"]])),
    )
    a = torch.randn(5, 2, requires_grad=True)
    tripled, (doubled, none) = Pipe(model, [1, 1], devices=2, chunks=2)({"a": a, "none": None})
    assert none is None
    torch.testing.assert_close((tripled, doubled), (a * 6, a * 2))
    (tripled.sum() + doubled.sum()).backward()
    torch.testing.assert_close(a.grad, torch.full((5, 2), 8.0))


@pytest.mark.parametrize("samples", [1, 2, 7, 8])
def test_batches_of_any_size_are_cut_as_torch_chunk_does(samples):
    """A small last batch has fewer micro-batches."""
    sizes: list[int] = []
    pipe = Pipe(
        nn.Sequential(Returning(lambda x: sizes.append(len(x)) or x)), [1], devices=1, chunks=4
    )
    x = torch.rand(samples, 2)
    torch.testing.assert_close(pipe(x), x)
    assert sizes == [len(part) for part in x.chunk(4)]


def halves(value, chunks=2):
    """The micro-batches of a value."""
    return [micro_batch.value() for micro_batch in split_input(value, chunks)]


def test_every_tensor_is_split_and_everything_else_is_in_each_micro_batch():
    """Without a graph: the partitions make leaves of their own."""
    weight = torch.ones(3, 2, requires_grad=True)
    first, second = halves({"x": weight * 2, "mask": torch.tensor([1, 2, 3]), "none": None})
    assert (first["x"].shape, second["x"].shape) == ((2, 2), (1, 2))
    assert (first["mask"].tolist(), second["mask"].tolist()) == ([1, 2], [3])
    assert first["none"] is None
    assert second["none"] is None
    assert not first["x"].requires_grad
    assert split_input(weight * 2, 2)[1].wants_grad == (True,)


def test_a_single_micro_batch_may_have_numbers_without_dimensions():
    """Such as the number of targets by which a model divides its loss."""
    (whole,) = halves((torch.ones(3, 2), torch.tensor(7)), chunks=1)
    assert whole[1].item() == 7
    with pytest.raises(ValueError, match="no tensors"):
        halves([None], chunks=1)
    with pytest.raises(ValueError, match=r"these have \(\)"):
        halves(torch.tensor(7), chunks=1)


@dataclass
class Batch:
    """Attributes of objects may be constants."""

    x: torch.Tensor
    scale: float = 2.0


def test_attributes_may_be_constants_and_items_of_containers_may_not():
    """An item is data, which has one entry for each sample."""
    check_input(Batch(torch.ones(2)))
    check_input((torch.ones(2), None))
    for value in ([torch.ones(2), 3.0], {"x": torch.ones(2), "y": "text"}):
        with pytest.raises(TypeError, match=r"expected Tensor, but got (float|str): a Pipe takes"):
            check_input(value)
    with pytest.raises(TypeError, match=r"has a sparse tensor in it.*make it in the first layer"):
        check_input([torch.eye(2).to_sparse()])
    with pytest.raises(TypeError, match="the input of a Pipe cannot be cut into micro-batches: "):
        check_input([torch.ones(2), SimpleNamespace(x=iter([torch.ones(1)]))])


def joined(*values, samples=(2, 1)):
    """The outputs of two micro-batches, joined."""
    return concatenate_outputs([Payload.of(value) for value in values], samples).value()


def test_outputs_are_joined_leaf_by_leaf():
    """Tensors along their first dimension; attributes that are equal constants stay."""
    first, second = Batch(torch.ones(2, 3)), Batch(torch.zeros(1, 3))
    result = joined({"a": first, "b": None}, {"a": second, "b": None})
    assert result["a"].x.tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert (result["a"].scale, result["b"]) == (2.0, None)
    parts = [Batch(torch.ones(rows, 1, requires_grad=True) * 2, float("2.5")) for rows in (2, 1)]
    result = joined(*parts)
    assert (result.scale, result.x.requires_grad) == (2.5, False)


def test_the_output_of_a_single_micro_batch_is_taken_as_it_is():
    """Also without dimensions: nothing is joined."""
    loss = joined(torch.tensor(3.0, requires_grad=True), samples=(4,))
    assert loss.item() == 3.0
    assert not loss.requires_grad


@pytest.mark.parametrize(
    ("first", "second", "kind", "says"),
    [
        (
            [torch.ones(2)],
            [None],
            RuntimeError,
            "returned tensor.* for one micro-batch and None for",
        ),
        ([None], [torch.ones(1)], RuntimeError, "returned None for one micro-batch and tensor"),
        (
            [torch.ones(2), 1],
            [torch.ones(1), 1],
            TypeError,
            "expected Tensor, but got int: the out",
        ),
        (
            Batch(torch.ones(2), 1.0),
            Batch(torch.ones(1), 2.0),
            RuntimeError,
            "returned 1.0 for one micro-batch and 2.0 for another",
        ),
        ([torch.ones(2)], (torch.ones(1),), RuntimeError, "nested in another way"),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), RuntimeError, r"return its to_dense"),
        (torch.ones(2, 2), torch.ones(2, 2), RuntimeError, "must index the samples"),
    ],
)
def test_outputs_that_differ_between_micro_batches_are_refused(first, second, kind, says):
    """The whole output would not be that of the plain model."""
    with pytest.raises(kind, match=says):
        joined(first, second)
