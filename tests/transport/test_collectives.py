"""Plain values between ranks."""

from __future__ import annotations

import math
import sys

import cloudpickle
import pytest
import torch.distributed as dist
from pydantic import ValidationError

from penstock.cluster.device import Device
from penstock.ranks.processes.launch import launch
from penstock.transport.collectives import all_gather, broadcast
from penstock.transport.process_group import join

KIND = dict[int, tuple[str, list[float], Device]]


def facts(rank):
    """Of one rank: of other lengths in JSON than the others', with seconds that are not exact in
    decimal.
    """
    seconds = [math.pi / (number + 3) for number in range(rank)]
    return {
        rank: ("é" * rank, seconds, Device(f"number {rank}", 1024, flops=(("float32", math.e),)))
    }


def exchange():
    """What each exchange gives on one rank."""
    join()
    rank = dist.get_rank()
    refused = ""
    try:
        all_gather("text" if rank else 1, int)
    except ValidationError as error:
        refused = str(error)
    return (
        all_gather(facts(rank), KIND),
        broadcast(facts(rank), KIND, 2),
        broadcast([float(rank)], list[float], 0),
        refused,
    )


@pytest.fixture(scope="module")
def ranks():
    """What `exchange` returned on three ranks."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        return launch(exchange, 3, threads=1)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_every_rank_has_the_values_of_all_exactly(ranks):
    """Floats come back to the bit, and integers that are keys as integers."""
    for gathered, sent, numbers, _ in ranks:
        assert [repr(value) for value in gathered] == [repr(facts(rank)) for rank in range(3)]
        assert repr(sent) == repr(facts(2))
        assert numbers == [0.0]


def test_a_value_of_another_type_is_refused_everywhere(ranks):
    """Nothing is taken for what it is not."""
    for *_, refused in ranks:
        assert "valid integer" in refused
