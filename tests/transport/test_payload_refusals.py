"""Values that a payload refuses, and headers that are read strictly."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.transport.payload import Header, Payload

ONE = torch.ones(1)


@dataclass
class Record:
    """A dataclass that torch does not know how to take apart."""

    x: Tensor


class Handle:
    """An object that has a say in how it ends."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __del__(self):
        pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            (ONE, {ONE}),
            r"^a set cannot cross a stage boundary, because there may be tensors in it.*\(at \[1\]\)$",
        ),
        ({"a": [iter([ONE])]}, r"^a list_iterator cannot cross.*\(at \['a'\]\[0\]\)$"),
        (Record(Handle(ONE)), r"^a Handle cannot cross.*pass the tensors themselves.*\(at \.x\)$"),
        (
            (ONE, ONE.expand(2, 1).to_sparse_csr()),
            r"^a tensor of layout torch.sparse_csr cannot cross.*to_sparse_coo\(\) \(at \[1\]\)$",
        ),
        (
            torch.quantize_per_tensor(ONE, 0.1, 0, torch.qint8),
            r"^a quantized tensor cannot cross.*dequantize",
        ),
        (
            torch.nested.nested_tensor([ONE, ONE], layout=torch.jagged),
            r"^a NestedTensor cannot cross.*subclass of Tensor",
        ),
        (
            ONE.as_subclass(type("Image", (Tensor,), {})),
            r"^a Image cannot cross a stage boundary, because it is a subclass of Tensor",
        ),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:.*quantize_per_tensor", "ignore:The PyTorch API of nested"
)
def test_what_may_hide_a_gradient_is_refused_at_the_sender_with_its_place(value, message):
    """Inside one process, too: passed as it is, its gradient would be lost without a word."""
    with pytest.raises(RunError, match=message):
        Payload.of(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            (ONE, len),
            r"^a builtin_function_or_method cannot cross a stage boundary between processes.*Send the arguments it is made from",
        ),
        ((ONE, np.ones(2)), r"^a ndarray cannot cross.*torch.from_numpy"),
        ((ONE, object()), r"^an object cannot cross a stage boundary between processes"),
        (
            defaultdict(lambda: 3, a=ONE),
            r"^a defaultdict cannot cross a stage boundary between processes with .*lambda",
        ),
    ],
)
def test_what_holds_no_tensor_passes_within_a_process_and_is_refused_between_them(value, message):
    """Plain PyTorch passes the object itself; so does a rank that is a thread."""
    payload = Payload.of(value)
    assert payload.value() == value
    with pytest.raises(RunError, match=message):
        payload.header()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "of version 1 and not 2: all ranks need the same version"),
        (
            {
                "structure": {
                    "kind": "object",
                    "class": "antigravity:Unknown",
                    "context": [],
                    "children": [],
                }
            },
            "a Unknown of antigravity crosses a stage boundary, and this rank does not find that class",
        ),
        (
            {
                "structure": {
                    "kind": "object",
                    "class": "subprocess:Popen",
                    "context": [],
                    "children": [],
                }
            },
            "that class is of another kind",
        ),
        (
            {"structure": {"kind": "object", "class": "os:system", "context": [], "children": []}},
            "does not find that class",
        ),
        ({"structure": {"kind": "call", "class": "os:system"}}, "no structure of a value"),
        ({"leaves": [{"constant": {"call": ["os", "system"]}}]}, "no constant of a known kind"),
        (
            {"leaves": [{"shape": [], "dtype": "load", "wants_grad": False, "stride": None}]},
            "torch.load, which is no dtype",
        ),
        (
            {
                "structure": {
                    "kind": "default",
                    "class": None,
                    "context": [{"tuple": []}, {"tuple": []}, {"class": "subprocess:Popen"}],
                    "children": [],
                }
            },
            "a defaultdict cannot cross a stage boundary between processes with .*Popen",
        ),
    ],
)
def test_a_header_is_read_strictly(change, message):
    """Headers come from other processes: they make plain values and classes that are here, and call
    nothing.
    """
    header = {"version": 2, "structure": "*", "leaves": [], "shared": []} | change
    with pytest.raises(RunError, match=message):
        Header.parse(json.dumps(header))


def test_a_header_without_a_version_is_of_another_version():
    """The first versions wrote none."""
    text = json.dumps({"structure": "*", "leaves": [], "shared": []})
    with pytest.raises(RunError, match="of version None and not 2: all ranks need the same"):
        Header.parse(text)
