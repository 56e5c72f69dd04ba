"""The step of all ranks after a program: when there is one, what it skips, and in which order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.runtime.global_run import GRADIENTS, HOLDERS, Run, global_norm
from tests.runtime.scripted import Recorder, replica_group

from penstock.optim.scaling import LossScaler


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_all_ranks_clip_by_the_norm_of_the_whole_model(norm_type):
    """Replicas count once, whichever rank is their home; parameters without gradients do not."""
    run = Run(HOLDERS, GRADIENTS, clip_grad_norm=0.5, clip_norm_type=norm_type)
    for _ in range(2):  # the second time, the lengths of rows are known
        for stage in run.assembly.stages:
            for parameter, gradient in zip(
                stage.update.parameters, GRADIENTS[stage.index], strict=True
            ):
                parameter.grad = None if gradient is None else torch.tensor(gradient)
        results = run.run()
        norms = [norm.item() for norm, _ in results]
        assert norms == pytest.approx([global_norm(norm_type)] * 3)
        assert len(set(norms)) == 1, "all ranks have the same bits"
        for stage in run.assembly.stages:
            for parameter, gradient in zip(
                stage.update.parameters, GRADIENTS[stage.index], strict=True
            ):
                if gradient is not None:
                    clipped = torch.tensor(gradient) * (0.5 / norms[0])
                    torch.testing.assert_close(parameter.grad, clipped, rtol=1e-4, atol=1e-6)
        run.step.record_step(dict(enumerate(results)))
        assert run.step.grad_norm == norms[0]


def test_the_number_of_skipped_steps_is_the_scalers_if_there_is_one():
    """The scaler's is in checkpoints; without a scaler the steps of on_nonfinite="skip" count."""
    scaler = LossScaler({"init_scale": 4.0})
    scaler.skipped = 7
    run = Run([(0,)], [[[1.0, 2.0]]], policy="skip", scaler=scaler)
    run.step.record_step({0: (torch.ones(()), 1.0)})
    assert run.step.skipped == 8
    run.step.record_step({0: (torch.ones(()), 0.0)})
    assert run.step.skipped == 8


@pytest.mark.parametrize("guilty", [0, 1, 2])
@pytest.mark.parametrize("policy", ["skip", "warn"])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(policy, guilty):
    """With the policy that says so, and then no rank sends what it has not updated."""
    run = Run(HOLDERS, GRADIENTS, policy=policy, clip_grad_norm=1.0)
    run.assembly.interpreters[guilty].finite.has_nonfinite = True
    sent = []
    run.assembly.tied = {
        rank: SimpleNamespace(send_weights=lambda rank=rank: sent.append(rank)) for rank in (0, 2)
    }
    results = run.run()
    skipped = policy == "skip"
    assert [nonfinite for _, nonfinite in results] == [float(skipped)] * 3
    for rank, log in enumerate(run.logs):
        stages = [entry[0] for entry in log if entry[0].startswith("update")]
        name = "skip" if skipped else "step"
        held = [index for index, ranks in enumerate(HOLDERS) if rank in ranks]
        assert stages == [f"update {index}.{name}" for index in held]
        assert ("reset",) in log
    assert sorted(sent) == ([] if skipped else [0, 2])
    for number in range(1, 3):
        run.step.record_step(dict(enumerate(results)))
        assert run.step.skipped == skipped * number


def test_without_norms_a_step_is_each_ranks_own():
    """No message is sent, and no norm computed."""
    run = Run(HOLDERS, GRADIENTS)
    assert run.step.step(1) == (None, 0.0)
    assert run.logs[1] == [("update 1.step",), ("reset",)]
    run.assembly.interpreters[1].finite = None
    assert run.step.step(1) == (None, 0.0)
    assert run.step.grad_norm is None
    run.step._norm = torch.tensor(3.0)
    run.step.record_step({1: (None, 0.0)})
    assert run.step.grad_norm == 3.0, "a step that computes no norm does not change the last one"


def test_updates_of_shards_are_all_sent_before_any_is_waited_for():
    """Ranks hold stages in different orders, and would wait for each other."""
    run = Run([(0,), (0,)], [[[1.0, 1.0]], [[1.0, 1.0]]])
    interpreter, log = run.assembly.interpreters[0], run.logs[0]
    interpreter.replicas = {index: replica_group(log, index) for index in (0, 1)}
    run.step.step(0)
    assert not any("updates" in entry[0] for entry in log)
    log.clear()
    run.assembly.zero = True
    run.assembly.tied = {0: SimpleNamespace(send_weights=lambda: log.append(("tied",)))}
    run.step.step(0)
    assert [entry[0] for entry in log] == [
        "update 0.step",
        "update 1.step",
        "reset",
        "replicas 0.send_updates",
        "replicas 1.send_updates",
        "replicas 0.receive_updates",
        "replicas 1.receive_updates",
        "finish",
        "tied",
        "finish",
    ]


def test_a_step_of_all_ranks_is_needed_for_norms_and_for_trained_tied_weights():
    """Else a stage steps at its U, in a bubble."""
    plain = Run([(0,)], [[]])
    assert not plain.step.needed
    assert Run([(0,)], [[]], clip_grad_norm=1.0).step.needed
    assert Run([(0,)], [[]], policy="skip").step.needed
    assert not Run([(0,)], [[]], policy="raise").step.needed
    assert Run([(0,)], [[]], scaler=object()).step.needed
    plain.assembly.shared = [SimpleNamespace(name="embedding", trainable=False)]
    assert not plain.step.needed
    plain.step.trained.add("embedding")
    assert plain.step.needed
    plain.step.trained.clear()
    plain.assembly.shared[0].trainable = True
    assert plain.step.needed
    assert (plain.step.exchanges_norms, plain.step.may_skip) == (False, False)


def test_the_policy_is_that_of_any_rank_that_checks():
    """Ranks of this process that have no check do not count; without any, it only warns."""
    run = Run([(0,), (1,)], [[], []], policy="raise")
    run.assembly.interpreters[0].finite = None
    assert run.step.policy == "raise"
    run.assembly.interpreters[1].finite = None
    assert run.step.policy == "warn"


def test_a_batch_begins_with_the_scale_of_its_losses():
    """The factor of accumulated batches times that of the loss scaler."""
    run = Run([(0,), (1,)], [[], []])
    run.step.begin(0.25)
    assert [stage.loss_scale for stage in run.assembly.stages] == [0.25, 0.25]
    assert run.logs == [[("update 0.begin",)], [("update 1.begin",)]]
    run.step.scaler = SimpleNamespace(scale=8.0)
    run.step.begin(0.25)
    assert [stage.loss_scale for stage in run.assembly.stages] == [2.0, 2.0]


def test_the_scaler_learns_of_every_step_and_is_saved_and_restored():
    """Without one there is nothing to save, and a saved one is ignored."""
    log = []
    run = Run([(0,)], [[]])
    assert run.step.state() is None
    run.step.restore({"scale": 4.0})
    run.step.scaler = Recorder(
        log, "scaler", state_dict={"scale": 2.0}, load_state_dict=None, update=None
    )
    assert run.step.state() == {"scale": 2.0}
    run.step.restore(None)
    run.step.restore({"scale": 4.0, "skipped": 2})
    run.step.record_step({0: (torch.tensor(1.0), 1.0)})
    assert log == [
        ("scaler.state_dict",),
        ("scaler.load_state_dict", {"scale": 4.0, "skipped": 2}),
        ("scaler.update", 1.0),
    ]


def test_tied_weights_leave_before_the_rank_goes_on():
    """Only a rank that holds one exchanges anything."""
    run = Run([(0,), (1,)], [[], []])
    log = run.logs[1]
    run.assembly.tied = {1: Recorder(log, "tied", gather=None, send_weights=None)}
    for rank in (0, 1):
        run.step.gather(rank)
        run.step.send_tied_weights(rank)
    assert run.logs[0] == []
    assert log == [("tied.gather",), ("finish",), ("tied.send_weights",), ("finish",)]


@pytest.mark.parametrize("skips", [False, True])
def test_a_skipped_step_has_a_norm_and_sends_no_updates(skips):
    """The norm tells why it was skipped; replicas have nothing new."""
    run = Run([(0,)], [[[1.0, 1.0]]], policy="skip", clip_grad_norm=1.0)
    interpreter, log = run.assembly.interpreters[0], run.logs[0]
    run.assembly.zero = True
    interpreter.replicas = {0: replica_group(log, 0)}
    interpreter.finite.has_nonfinite = skips
    gradient = run.stage(0, 0).update.parameters[0].grad
    gradient.fill_(float("inf") if skips else 3.0)
    results = {0: run.step.step(0)}
    names = [entry[0] for entry in log]
    assert ("replicas 0.send_updates" in names) == (not skips)
    assert ("replicas 0.receive_updates" in names) == (not skips)
    run.step.record_step(results)
    assert run.step.grad_norm == (float("inf") if skips else pytest.approx(18**0.5))


def test_stages_step_with_clipped_gradients_when_the_exchange_has_ended():
    """And not with those from before; the norms have left the rank by then."""
    run = Run(HOLDERS, GRADIENTS, clip_grad_norm=0.5)
    expected = 0.5 / global_norm(2.0)
    stepped = []
    for rank, interpreter in run.assembly.interpreters.items():
        for stage in interpreter.stages.values():

            def step(stage=stage, rank=rank):
                assert ("finish",) in run.logs[rank]
                gradients = [parameter.grad for parameter in stage.update.parameters]
                for gradient, before in zip(gradients, GRADIENTS[stage.index], strict=True):
                    if before is not None:
                        clipped = torch.tensor(before) * expected
                        torch.testing.assert_close(gradient, clipped, rtol=1e-4, atol=1e-6)
                stepped.append(stage.index)

            stage.update.step = step
    run.run()
    assert sorted(stepped) == [0, 1, 1, 2, 3, 3]
    assert [log.count(("finish",)) for log in run.logs] == [1, 1, 1]
