"""torchgpipe's and FairScale's balance."""

import ast
import importlib

import pytest
import torch
from torch import nn

from penstock.export.catalogue import export, exported
from penstock.schedule.catalogue import schedule

LINEAR = (4, 4, 4, 3)


@pytest.mark.parametrize("library", ["torchgpipe", "fairscale"])
def test_the_balance_is_a_python_list_of_the_lengths(plan_of, library):
    """fairseq, too, reads it by literal_eval."""
    assert ast.literal_eval(export(plan_of(schedule("gpipe", 4, 8), LINEAR), library)) == [
        4,
        4,
        4,
        3,
    ]


def test_stages_that_share_a_device_export_as_repeated_devices(plan_of):
    """torchgpipe allows repeated devices: the V shape of a zero-bubble plan is a list of devices."""
    result = exported(
        plan_of(schedule("zb-v", 8, 8), (2, 2, 2, 2, 2, 2, 2, 1), recompute="except_last"),
        "torchgpipe",
    )
    assert "devices=[0, 1, 2, 3, 3, 2, 1, 0], chunks=8, checkpoint='except_last'" in result.use


def test_pipelines_side_by_side_are_a_process_each(plan_of):
    """DistributedDataParallel around it has the rest; the number of micro-batches is one
    pipeline's.
    """
    result = exported(plan_of(schedule("gpipe", 4, 8, replicas=2), LINEAR), "torchgpipe")
    assert "devices=[0, 1, 2, 3], chunks=4" in result.use
    assert any(note.startswith("2 pipelines: one process for each") for note in result.left_out)


@pytest.mark.parametrize(
    ("library", "front_door"),
    [("torchgpipe", ("torchgpipe", "GPipe")), ("fairscale", ("fairscale.nn", "Pipe"))],
)
def test_the_library_accepts_the_balance_and_computes_the_models_output_and_gradients(
    plan_of, library, front_door
):
    """Loaded by the peer itself, where it is installed: all on one CPU, which is what `devices`
    repeats.
    """
    module, name = front_door
    pytest.importorskip(module)
    names = tuple(map(str, range(5)))
    chosen_plan = plan_of(schedule("gpipe", 3, 4, backward_order="reverse"), (2, 1, 2), names)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
        )
        x = torch.randn(8, 6)
    expected = model(x)
    expected.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    balance = ast.literal_eval(export(chosen_plan, library))
    pipe = getattr(importlib.import_module(module), name)(
        model,
        balance=balance,
        devices=["cpu"] * 3,
        chunks=chosen_plan.micro_batches,
        checkpoint=chosen_plan.recompute,
    )
    out = pipe(x)
    out.square().sum().backward()
    torch.testing.assert_close(out, expected)
    assert [len(partition) for partition in pipe.partitions] == list(chosen_plan.lengths)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
