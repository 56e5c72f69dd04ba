"""The loss of a whole batch on the outputs of all micro-batches, against one backward."""

from __future__ import annotations

import pytest
import torch

from penstock.batches.batch import make_batch
from penstock.errors import ScheduleError, SettingError
from penstock.losses.call import LossCall
from penstock.losses.joint import JointLosses, check_joint
from penstock.schedule.catalogue import schedule
from penstock.schedule.replicas import pipelines

CPU = torch.device("cpu")


def contrastive(output, target):
    """A loss in which all samples interact."""
    first, second = (output["a"], output["b"]) if isinstance(output, dict) else (output, output)
    return ((first @ second.t()).logsumexp(1) - (first * target).sum(1)).square().mean()


def model(x, weight):
    """Two outputs, and one that the loss does not use; `ids` and `first` have no gradient."""
    value = x @ weight
    return {
        "first": x * 2,
        "a": value.tanh(),
        "b": value.sin(),
        "unused": value * 2,
        "ids": x.long(),
    }


@pytest.mark.parametrize("forward", [[0, 1, 2], [1, 2, 0]])
@pytest.mark.parametrize("backward", [[0, 1, 2], [2, 0, 1]])
@pytest.mark.parametrize("start", [1.0, 0.25])
def test_gradients_are_those_of_one_backward_over_the_batch(forward, backward, start):
    """In whatever order the ops come; the reported loss is there with the last forward."""
    torch.manual_seed(0)
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    joint = JointLosses(LossCall(contrastive, CPU))
    for step in range(2):
        batch = make_batch(x + step, y, 3, step=step, training=True)
        roots, shares = {}, []
        for number in forward:
            root, share = joint.of(batch, number, model(batch.inputs[number], weight))
            roots[number] = root
            shares.append(float(share))
            assert root.item() == 0.0
        expected = contrastive(model(x + step, weight), y)
        assert shares == [0.0, 0.0, pytest.approx(expected.item())]
        (gradient,) = torch.autograd.grad(expected * start, weight)
        total = torch.zeros_like(weight)
        for number in backward:
            (part,) = torch.autograd.grad(roots[number], weight, torch.tensor(start))
            total += part
        torch.testing.assert_close(total, gradient)


def test_a_micro_batch_that_runs_again_adds_nothing():
    """Recomputation asks for its root once more, and the loss is reported once."""
    x = torch.randn(4, 3, requires_grad=True)
    batch = make_batch(x.detach(), torch.randn(4, 3), 2, step=0, training=True)
    joint = JointLosses(LossCall(contrastive, CPU))
    first, _ = joint.of(batch, 0, x[:2] * 1)
    again, share = joint.of(batch, 0, x[:2] * 1)
    assert share.item() == 0.0
    _, share = joint.of(batch, 1, x[2:] * 1)
    assert share.item() != 0.0
    _, share = joint.of(batch, 1, x[2:] * 1)
    assert share.item() == 0.0
    one, two = (torch.autograd.grad(root, x)[0] for root in (first, again))
    assert torch.equal(one, two)


def test_evaluation_has_no_graph_and_keeps_no_batch():
    """Each batch is let go when its loss is there."""
    batch = make_batch(torch.randn(4, 3), torch.randn(4, 3), 2, step=0, training=False)
    joint = JointLosses(LossCall(contrastive, CPU))
    with torch.no_grad():
        parts = [joint.of(batch, number, batch.inputs[number]) for number in batch.numbers]
    assert not any(root.requires_grad for root, _ in parts)
    expected = contrastive(batch.whole[0], batch.whole[1])
    assert [float(share) for _, share in parts] == [0.0, pytest.approx(float(expected))]
    assert joint._current is None


def test_a_sum_with_a_count_is_divided_and_other_results_are_refused():
    """As for losses of micro-batches."""
    batch = make_batch(torch.ones(4, 3), torch.ones(4, 3), 2, step=0, training=True)
    for loss, expected in ((lambda x, y: (x.sum(), 6.0), 2.0), (lambda x, y: x, None)):
        joint = JointLosses(LossCall(loss, CPU))
        joint.of(batch, 0, batch.inputs[0])
        if expected is None:
            with pytest.raises(SettingError, match="the loss must be one number"):
                joint.of(batch, 1, batch.inputs[1])
        else:
            assert joint.of(batch, 1, batch.inputs[1])[1].item() == expected


def test_schedules_whose_last_stage_goes_back_early_are_refused_with_the_number_of_forwards():
    """One micro-batch has nothing to wait for; a last stage on two ranks has parts on each."""
    check_joint(schedule("gpipe", 3, 4))
    check_joint(schedule("1f1b", 3, 1))
    with pytest.raises(ScheduleError, match=r"backwards after 1 of 4 forwards\. Take a schedule"):
        check_joint(schedule("1f1b", 3, 4))
    with pytest.raises(ScheduleError, match="pipedream is asynchronous"):
        check_joint(schedule("pipedream", 2, 2))
    with pytest.raises(ScheduleError, match=r"runs the last stage on ranks 1, 3\. Take"):
        check_joint(pipelines(schedule("gpipe", 2, 2), 2, 4))
