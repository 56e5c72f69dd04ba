"""Inputs of a `Pipe` are split into micro-batches, and their outputs are joined."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.pipe.pipe import Pipe


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
