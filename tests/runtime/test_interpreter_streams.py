"""The interpreter in a stream of batches: its parts, micro-batch numbers and weight rules."""

from __future__ import annotations

from types import SimpleNamespace

from tests.runtime.scripted import (
    ALONE,
    Ranks,
    Recorder,
    batch,
    interpreter_of,
)

from penstock.batches.in_flight import BatchesInFlight
from penstock.runtime.interpreter import Interpreter, RunContext
from penstock.schedule.lower import Direction, Message, Transfer
from penstock.schedule.op import Kind, Op


class RecordedWeights:
    """A weight rule that records what it is told."""

    def __init__(self) -> None:
        self.calls = []

    def before_backward(self, number):
        """Note that a backward begins."""
        self.calls.append(("before", number))

    def finished(self, number):
        """Note that a micro-batch reads no version any more."""
        self.calls.append(("finished", number))


def test_a_weight_version_is_in_use_until_b_or_w_and_not_only_until_i():
    """W reads the graph of the forward: its version must not be stepped in place before."""
    weights = RecordedWeights()
    stage = SimpleNamespace(**{name: lambda *_: None for name in ("input_grad", "weight_grad")})
    rank = SimpleNamespace(stages={0: stage}, finite=None)
    context = RunContext(None, weights={0: weights})
    for text in ("0I3", "0W3"):
        Interpreter._compute(rank, Op.parse(text), (None, 3), None, context)
    assert weights.calls == [("before", 3), ("before", 3), ("finished", 3)]


def test_the_next_part_of_a_stream_keeps_marks_and_memory():
    """Only the clock begins anew with every part; a part has no end of its own."""
    interpreter, _, log = interpreter_of(ALONE)
    begun = []
    interpreter.clock.begin = lambda: begun.append(1)
    context = RunContext(BatchesInFlight.alone(batch(2)))
    interpreter.activation_meter.take(8)
    interpreter.run_actions([Op.parse("0F0")], context)
    interpreter.run_actions([Op.parse("0B0")], context)
    assert [str(op) for op in interpreter.marks] == ["0F0", "0B0"]
    assert (len(begun), interpreter.activation_meter.now) == (2, 8)
    assert [entry[:3] for entry in log] == [("F", 0, 0), ("B", 0, 0)]


def test_a_small_batch_of_a_stream_runs_and_sends_only_its_micro_batches():
    """A stream's program has the ops of a whole batch; those that are missing send nothing."""
    ranks = Ranks("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3", ahead=1)
    batches = BatchesInFlight(2)
    batches.add(0, batch(1, step=5))
    batches.add(1, batch(2, step=6))
    context = RunContext(batches)
    forwards = [
        [action for action in program if getattr(action, "kind", None) is Kind.F or
         (isinstance(action, Transfer) and action.message.kind is Kind.F)]
        for program in ranks.programs
    ]  # fmt: skip
    for rank, actions in enumerate(forwards):
        ranks.interpreters[rank].run_actions(actions, context)
    assert ranks.logs[0] == [("F", 0, number, None) for number in (0, 0, 1)]
    arrived = [("F", 0, 0, 5), ("F", 0, 0, 6), ("F", 0, 1, 6)]
    assert [entry[3] for entry in ranks.logs[1]] == arrived
    for interpreter in ranks.interpreters:
        assert not interpreter._values
        assert not interpreter._arrivals
    assert not ranks.exchange._payloads


def test_a_weight_rule_is_told_of_every_op_of_its_own_stage_and_updates_in_place_of_the_stage():
    """Also of the number in the stream, not the one in the batch."""
    ranks = Ranks("0F0 1F0 1B0 0B0 0U1 1U1")
    interpreter, log = ranks.interpreters[0], ranks.logs[0]
    names = ("before_forward", "before_backward", "finished", "update")
    rule = Recorder(log, "rule", **dict.fromkeys(names))
    batches = BatchesInFlight(1)
    batches.add(3, batch(1, step=3))
    context = RunContext(batches, weights={1: rule})
    actions = [Op.parse(text) for text in ("0F3", "1F3", "1B3", "0B3", "1U4", "0U4")]
    probed = []
    interpreter.finite = SimpleNamespace(
        after_backward=lambda stage, batch, number: probed.append((stage.index, number)),
        before_update=lambda *args, **options: probed.append((args[0].index, options)),
    )
    interpreter.run_actions(actions, context)
    # Messages on gradients have the number in the batch.
    assert probed == [(1, 0), (0, 0), (1, {"streaming": True}), (0, {"streaming": True})]
    assert [entry[:3] for entry in log] == [
        ("F", 0, 0),
        ("rule.before_forward", 3),
        ("F", 1, 0),
        ("rule.before_backward", 3),
        ("B", 1, 0),
        ("rule.finished", 3),
        ("B", 0, 0),
        ("rule.update", 4),
        ("step", 0),
    ]


def test_ops_of_a_stream_have_the_number_in_their_batch_and_rules_the_one_in_the_stream():
    """For values, losses, checks and messages: micro-batch 5 of batches of two is the second one."""
    ranks = Ranks("0F0 0I0 0W0 0U1", loss="a loss")
    interpreter, log = ranks.interpreters[0], ranks.logs[0]
    stage = interpreter.stages[0]
    batches = BatchesInFlight(2)
    one = batch(2, step=2)
    batches.add(2, one)
    checks = []
    interpreter.finite = SimpleNamespace(
        after_loss=lambda *args: checks.append(("loss", *args)),
        after_backward=lambda *args: checks.append(("gradients", *args)),
    )
    names = ("before_forward", "before_backward", "finished")
    rule = Recorder(log, "rule", **dict.fromkeys(names))
    ops = [Op.parse(text) for text in ("0F5", "0I5", "0W5")]
    interpreter.run_actions(ops, RunContext(batches, weights={0: rule}))
    assert checks == [("loss", stage, one, 1, ops[0]), ("gradients", stage, one, 1)]
    assert [entry[:3] for entry in log] == [
        ("rule.before_forward", 5),
        ("F", 0, 1),
        ("rule.before_backward", 5),
        ("I", 0, 1),
        ("rule.before_backward", 5),
        ("W", 0, 1),
        ("rule.finished", 5),
    ]


def test_a_rank_holds_evicted_activations_of_several_batches():
    """Each goes back for its own micro-batch, although their numbers in the batches are equal."""
    ranks = Ranks("0F0 0E0 0L0 0B0\n0E0 0L0 1F0 1B0", ahead=0)
    batches = BatchesInFlight(1)
    for index in range(2):
        batches.add(index, batch(1, step=index))
    owner, holder = ranks.interpreters
    context = RunContext(batches)
    for number in range(2):
        evict = Message(Kind.E, 0, number)
        owner.run_actions([Op.parse(f"0E{number}"), Transfer(Direction.SEND, evict, 1)], context)
        holder.run_actions([Transfer(Direction.RECV, evict, 0), Op.parse(f"0E{number}")], context)
        assert ranks.logs[0][-1] == ("E", 0, 0, None)
    for number in range(2):
        load = Message(Kind.L, 0, number)
        holder.run_actions([Op.parse(f"0L{number}"), Transfer(Direction.SEND, load, 0)], context)
        owner.run_actions([Transfer(Direction.RECV, load, 1), Op.parse(f"0L{number}")], context)
        assert ranks.logs[0][-1] == ("L", 0, 0, ("E", 0, 0, number))


def test_a_part_of_a_stream_may_begin_with_the_sends_of_the_op_before_it():
    """And end with receives of the op after it."""
    ranks = Ranks("0F0 0F1\n1F0 1F1", ahead=0)
    batches = BatchesInFlight(2)
    batches.add(0, batch(2))
    context = RunContext(batches)
    message = Message(Kind.F, 0, 1)
    parts = [
        (0, [Op.parse("0F1")]),
        (0, [Transfer(Direction.SEND, message, 1), Op.parse("0F0")]),
        (1, [Transfer(Direction.RECV, message, 0)]),
        (1, [Op.parse("1F1")]),
    ]
    for rank, actions in parts:
        ranks.interpreters[rank].run_actions(actions, context)
    assert ranks.logs[1] == [("F", 1, 1, ("F", 0, 1, 0))]
