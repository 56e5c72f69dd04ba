"""What the meter counts of the tensors that a graph saves."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from penstock.stage.activation_meter import ActivationMeter, optimizer_bytes


def test_of_an_input_that_is_a_view_only_its_own_bytes_count():
    """A micro-batch is a view of its batch: the others count the rest."""
    meter = ActivationMeter()
    micro_batch = torch.ones(8, 4)[2:4].requires_grad_()
    weight = torch.ones(4, requires_grad=True)
    with meter.measuring("form", [micro_batch], frozenset({weight.data_ptr()})):
        (micro_batch * weight).exp()
    input_bytes = output_bytes = 2 * 4 * 4
    assert meter.size("form") == input_bytes + output_bytes


def saved_by(meter, form="form", *, elements=4, **options):
    """Let a graph save a tensor of so many elements under a form."""
    x = torch.ones(elements, requires_grad=True)
    with meter.measuring(form, [], frozenset(), **options):
        x.exp()  # saves its output


def test_the_meter_counts_what_is_held_now_and_at_most():
    """From 0, and from 0 again with every batch; sizes of forms stay."""
    meter = ActivationMeter()
    assert (meter.now, meter.peak) == (0, 0)
    saved_by(meter)
    for size in (5, -5, 3):
        if size > 0:
            meter.take(size)
        else:
            meter.give(-size)
    assert (meter.now, meter.peak) == (3, 5)
    meter.begin()
    assert (meter.now, meter.peak) == (0, 0)
    assert meter.size("form") == 16


def test_a_form_is_measured_once_unless_its_size_is_not_final():
    """The first graph may be one of copies; the next one is like all later ones."""
    meter = ActivationMeter()
    assert not meter.settled("form")
    saved_by(meter, elements=8, final=False)
    assert not meter.settled("form")
    assert meter.size("form") == 32
    saved_by(meter, elements=4, final=True)
    assert meter.settled("form")
    saved_by(meter, elements=2)
    assert meter.size("form") == 16
    assert not meter.settled("other")
    saved_by(meter, "other", elements=1)
    assert meter.settled("other"), "a size is final by default"
    assert (meter.size("form"), meter.size("other")) == (16, 4)


def test_of_a_saved_target_only_the_micro_batchs_part_counts():
    """It is a view of the batch, and counts only if the graph saves it."""
    meter = ActivationMeter()
    targets = torch.ones(8, 4)[2:4]
    x = torch.ones(2, 4, requires_grad=True)
    with meter.measuring("saved", [x], frozenset(), [targets]):
        (x * targets).sum()
    with meter.measuring("not saved", [x], frozenset(), [targets]):
        (x + targets).sum()
    assert meter.size("saved") == 2 * 2 * 4 * 4
    assert meter.size("not saved") == 2 * 4 * 4


def test_a_tensor_that_two_nodes_save_counts_once_and_a_sparse_one_not_at_all():
    """A storage is held once, however many nodes refer to it."""
    meter = ActivationMeter()
    x = torch.ones(4, requires_grad=True)
    with meter.measuring("twice", [], frozenset()):
        y = x.exp()
        y.exp()
        y[1:].exp()
    # y, its exponential and that of its three elements.
    assert meter.size("twice") == 4 * (4 + 4 + 3)
    sparse = torch.eye(4).to_sparse()
    dense = torch.ones(4, 2, requires_grad=True)
    with meter.measuring("sparse", [dense], frozenset()):
        torch.sparse.mm(sparse, dense)
    assert meter.size("sparse") == dense.nbytes


def test_an_optimizers_tensors_count_and_its_numbers_do_not():
    """Of all parameters; a stage without an optimizer has none."""
    assert optimizer_bytes(None) == 0
    optimizer = SimpleNamespace(
        state={
            "a": {"step": 3, "momentum": torch.ones(5), "average": torch.ones(2).double()},
            "b": {"momentum": torch.ones(7), "step": torch.tensor(3.0)},
        }
    )
    assert optimizer_bytes(optimizer) == 4 * 5 + 8 * 2 + 4 * 7 + 4
    assert optimizer_bytes(SimpleNamespace(state={})) == 0
