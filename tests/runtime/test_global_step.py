"""The step of all ranks after a program: when there is one, what it skips, and in which order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from tests.runtime.scripted import Recorder, replica_group
from torch import nn

import penstock as ps
from penstock.errors import PeerFailed
from penstock.optim.scaling import LossScaler
from penstock.ranks.peer_guard import PeerGuard
from penstock.ranks.status_board import SharedBoard
from penstock.runtime import global_step
from penstock.runtime.global_step import GlobalStep, _without_padding
from penstock.stage.training_options import TrainingOptions
from penstock.transport.in_process import Exchange, MemoryTransport
from penstock.transport.transport import TransportLost

CPU = torch.device("cpu")


def stage_of(index, gradients, log):
    """Return a stage with parameters of these gradients; None is no gradient."""
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = None if gradient is None else torch.tensor(gradient)
        parameters.append(parameter)
    update = Recorder(log, f"update {index}", begin=None, step=None, skip=None)
    update.parameters = parameters
    return SimpleNamespace(index=index, update=update, device=CPU, loss_scale=1.0)


class Run:
    """Ranks in threads; `holders` has by stage the ranks that hold it, `gradients` its gradients."""

    def __init__(self, holders, gradients, *, policy="warn", scaler=None, **options):
        size = 1 + max(rank for ranks in holders for rank in ranks)
        self.logs = [[] for _ in range(size)]
        exchange, board = Exchange(), SharedBoard(size)
        interpreters = {}
        for rank, log in enumerate(self.logs):
            stages = {
                index: stage_of(index, gradients[index], log)
                for index, ranks in enumerate(holders)
                if rank in ranks
            }
            interpreters[rank] = SimpleNamespace(
                rank=rank,
                stages=stages,
                replicas={},
                parallel={},
                transport=MemoryTransport(rank, exchange, 30.0),
                guard=PeerGuard(rank, board.for_rank(rank)),
                finite=SimpleNamespace(
                    policy=policy, has_nonfinite=False, reset=lambda log=log: log.append(("reset",))
                ),
                finish=lambda log=log: log.append(("finish",)),
            )
        self.assembly = SimpleNamespace(
            setting=SimpleNamespace(schedule=SimpleNamespace(ranks_of_stage=holders)),
            world=SimpleNamespace(size=size, collectives=None, device=lambda rank: CPU),
            interpreters=interpreters,
            stages=[stage for rank in interpreters.values() for stage in rank.stages.values()],
            shared=[],
            tied={},
            zero=False,
        )
        self.step = GlobalStep(self.assembly, scaler, TrainingOptions(**options))

    def run(self):
        """Step on all ranks; return their results by rank."""
        with ThreadPoolExecutor(len(self.logs)) as pool:
            return list(pool.map(self.step.step, range(len(self.logs))))

    def stage(self, rank, index):
        """Return a stage."""
        return self.assembly.interpreters[rank].stages[index]


HOLDERS = [(0,), (1, 2), (2,), (2, 0)]
GRADIENTS = [[[3.0, 4.0], None], [[1.0, 2.0]], [None, [2.0, 2.0], [0.0, 1.0]], [[6.0, 0.0]]]


def global_norm(norm_type):
    """Return the norm of all gradients, each stage's once."""
    values = [torch.tensor(row) for stage in GRADIENTS for row in stage if row is not None]
    return torch.linalg.vector_norm(torch.cat(values), norm_type).item()


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
    run.step.restore({"scale": 4.0})
    run.step.record_step({0: (torch.tensor(1.0), 1.0)})
    assert log == [
        ("scaler.state_dict",),
        ("scaler.load_state_dict", {"scale": 4.0}),
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


def test_unscaling_covers_all_stages_of_a_rank_and_reports_an_overflow():
    """Each stage's part is added up, on every rank."""
    overflow = {0: 0.0, 1: 0.0, 2: 1.0, 3: 0.0}
    run = Run(HOLDERS, GRADIENTS)
    index_of = {id(stage.update.parameters): stage.index for stage in run.assembly.stages}
    unscaled = []

    def unscale(parameters, device):
        unscaled.append(index_of[id(parameters)])
        return torch.tensor([overflow[index_of[id(parameters)]]])

    run.step.scaler = SimpleNamespace(unscale=unscale)
    results = run.run()
    assert [nonfinite for _, nonfinite in results] == [1.0] * 3
    assert sorted(unscaled) == [0, 1, 1, 2, 3, 3]
    overflow[2] = 0.0
    assert [nonfinite for _, nonfinite in run.run()] == [0.0] * 3


def test_processes_that_share_layers_agree_on_norms_and_overflows_once():
    """The same processes share all stages of a rank."""
    run = Run([(0,), (0,)], [[[3.0, 0.0]], [[0.0, 4.0]]], policy="skip")
    log = run.logs[0]

    def share(total):
        log.append(("shared", total.item()))
        return total * 2

    parallel = SimpleNamespace(
        sum_over_tensor_ranks=lambda nonfinite: log.append(("summed", nonfinite.item())),
        share_over_tensor_ranks=share,
    )
    run.assembly.interpreters[0].parallel = {0: parallel, 1: parallel}
    ((norm, nonfinite),) = run.run()
    assert (norm.item(), nonfinite) == (10.0, 0.0)
    assert [entry for entry in log if entry[0] in ("summed", "shared")] == [
        ("summed", 0.0),
        ("shared", 5.0),
    ]


def test_padding_is_told_from_norms_by_its_sign_and_nan_stays():
    """A norm of 0 and one that is not a number count."""
    norms = torch.tensor([0.0, 2.0, float("nan"), -1.0, -1.0])
    kept = _without_padding(norms, 2.0)
    assert kept[:2].tolist() == [0.0, 2.0]
    assert kept[2:].isnan().tolist() == [True]


def test_norms_are_added_in_the_order_of_the_stages_whatever_ranks_have_them(monkeypatch):
    """Sums round by their order: the norm would depend on the placement."""
    added = []

    def total_norm(norms, norm_type):
        added.append([len(row) for row in norms])
        return torch.cat(list(norms)).norm()

    monkeypatch.setattr(global_step, "total_norm", total_norm)
    # Every stage has another number of parameters; rank 0 has the first and the last one.
    pipe = ps.Pipeline(
        [nn.Linear(2, 2, bias=False) for _ in range(10)],
        balance=[1, 4, 2, 3],
        schedule=ps.Schedule.parse(
            "0F0 3F0 3B0 0B0 3U1 0U1\n1F0 1B0 1U1\n2F0 2B0 2U1",
        ),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        clip_grad_norm=1.0,
        executor="threads",
        device="cpu",
    )
    pipe.train_batch(torch.ones(2, 2), torch.ones(2, 2))
    assert added == [[1, 4, 2, 3]]


def test_norms_are_those_of_the_parameters_that_are_trained_now():
    """After a freeze or thaw the messages have other lengths, on all ranks at once."""
    run = Run(HOLDERS, GRADIENTS, clip_grad_norm=1e9)
    expected = [global_norm(2.0)]
    assert [norm.item() for norm, _ in run.run()] == pytest.approx(expected * 3)
    for epoch, change in enumerate((7.0, None, 9.0), 1):
        run.step.epoch = epoch
        for stage in run.assembly.stages:
            if stage.index != 1:
                continue
            if change is None:
                stage.update.parameters = stage.update.parameters[:1]
                continue
            parameter = nn.Parameter(torch.zeros(1))
            parameter.grad = torch.tensor([change])
            stage.update.parameters = [*stage.update.parameters[:1], parameter]
        square = global_norm(2.0) ** 2 + (change or 0.0) ** 2
        for _ in range(2):
            norms = [norm.item() for norm, _ in run.run()]
            assert norms == pytest.approx([square**0.5] * 3)


@pytest.mark.parametrize("parallel", [(), (1, 2, 3)])
def test_norms_of_a_stage_are_computed_once_and_by_all_processes_that_share_it(
    parallel, monkeypatch
):
    """Also on a rank that is not its home: a collective operation takes all of them."""
    run = Run(HOLDERS, GRADIENTS, clip_grad_norm=1.0)
    index_of = {id(stage.update.parameters): stage.index for stage in run.assembly.stages}
    stages = {rank: [] for rank in range(3)}
    norms_of = global_step.norms_of
    rank_of = {
        id(stage.update.parameters): rank
        for rank, interpreter in run.assembly.interpreters.items()
        for stage in interpreter.stages.values()
    }

    def recorded_norms_of(parameters, device, norm_type):
        stages[rank_of[id(parameters)]].append(index_of[id(parameters)])
        return norms_of(parameters, device, norm_type)

    monkeypatch.setattr(global_step, "norms_of", recorded_norms_of)
    group = SimpleNamespace(
        sum_over_tensor_ranks=lambda nonfinite: None, share_over_tensor_ranks=lambda total: total
    )
    for interpreter in run.assembly.interpreters.values():
        interpreter.parallel = {index: group for index in interpreter.stages if index in parallel}
    assert [norm.item() for norm, _ in run.run()] == pytest.approx([global_norm(2.0)] * 3)
    homes = {0: [0], 1: [1], 2: [2, 3]}
    shared = {0: [0, 3], 1: [1], 2: [1, 2, 3]}
    assert {rank: sorted(row) for rank, row in stages.items()} == (shared if parallel else homes)


class DeviceRow:
    """Norms on a device, whose values the host does not read."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, name="norms"):
        self.name = name

    def __lt__(self, other):
        return DeviceRow(f"{self.name} < {other}")

    def __invert__(self):
        return DeviceRow(f"not {self.name}")

    def __getitem__(self, mask):
        return f"{self.name}[{mask.name}]"

    def masked_fill(self, mask, value):
        """Return what is filled."""
        return f"{self.name} with {value} where {mask.name}"


def test_padding_on_a_device_becomes_0_where_that_leaves_the_norm_as_it_is():
    """Exponents of 0 and below count entries: there the padding has to go."""
    assert _without_padding(DeviceRow(), 2.0) == "norms with 0.0 where norms < 0"
    for norm_type in (0.0, -1.0):
        assert _without_padding(DeviceRow(), norm_type) == "norms[not norms < 0]"


def test_ranks_that_check_nothing_take_part_in_the_norm():
    """Such as one whose stages have no parameters."""
    run = Run(HOLDERS, GRADIENTS, clip_grad_norm=1.0)
    for rank in (0, 1):
        run.assembly.interpreters[rank].finite = None
    assert [norm.item() for norm, _ in run.run()] == pytest.approx([global_norm(2.0)] * 3)


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


def test_norms_on_devices_are_those_of_the_option_and_of_the_epoch(monkeypatch):
    """No message is sent for them."""
    calls = []

    def device_norms(assembly, homes, norm_type):
        def total(interpreter, rows, nonfinite, epoch):
            calls.append((interpreter.rank, [row.tolist() for row in rows], epoch))
            return torch.tensor(7.0), nonfinite + 1

        calls.append((homes, norm_type))
        return SimpleNamespace(total=total)

    monkeypatch.setattr(global_step, "device_norms", device_norms)
    run = Run(HOLDERS, GRADIENTS, policy="skip", clip_grad_norm=1.0, clip_norm_type=1.0)
    assert calls.pop() == ({0: [0], 1: [1], 2: [2, 3]}, 1.0)
    run.step.epoch = 3
    norm, nonfinite = run.step.step(1)
    assert (norm.item(), nonfinite) == (7.0, 1.0)
    assert calls == [(1, [[3.0]], 3)]
    assert ("finish",) not in run.logs[1]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_is_gone_is_named_by_those_that_wait_for_its_norms(rank):
    """Rank 0 waits for all others, these for rank 0."""
    run = Run(HOLDERS, GRADIENTS, clip_grad_norm=1.0)
    transport = run.assembly.interpreters[rank].transport
    transport.exchange.close("rank 9 ran away")
    with pytest.raises(PeerFailed) as e:
        run.step.step(rank)
    assert e.value.rank == rank
    assert e.value.waited_for == f"rank {0 if rank else 1}"


@pytest.mark.parametrize(("rank", "peer"), [(0, 2), (1, 0), (2, 0)])
def test_a_rank_to_which_nothing_can_be_sent_is_named(rank, peer):
    """Norms go to rank 0, and the answer to all others."""
    run = Run(HOLDERS, GRADIENTS, clip_grad_norm=1.0)
    transport = run.assembly.interpreters[rank].transport

    def send(to_rank, *args):
        if to_rank == peer:
            run.assembly.interpreters[rank].transport.exchange.close("gone")
            raise TransportLost("gone")
        return transport.send(to_rank, *args)

    run.assembly.interpreters[rank].transport = SimpleNamespace(
        post=transport.post, send=send, exchange=transport.exchange
    )
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(run.step.step, number) for number in range(3)]
    with pytest.raises(PeerFailed) as e:
        futures[rank].result()
    assert e.value.waited_for == f"rank {peer}"


@pytest.mark.parametrize(("norm_type", "expected"), [(float("-inf"), 3.0), (0.0, 2.0)])
def test_parameters_without_a_gradient_do_not_count_in_norms_of_small_exponents(
    norm_type, expected
):
    """The smallest absolute value, and the number of parameters with a gradient."""
    gradients = [[[3.0, 4.0]], [None, [5.0, 6.0]]]
    run = Run([(0,), (1,)], gradients, clip_grad_norm=1e9, clip_norm_type=norm_type)
    assert [norm.item() for norm, _ in run.run()] == [expected] * 2
