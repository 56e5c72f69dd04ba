"""Programs as steps of the interpreter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.runtime.program_steps import steps_of
from penstock.schedule.lower import Direction, Message, Transfer, lower
from penstock.schedule.op import Kind, Op, Schedule


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "chimera", "bpipe"]),
    st.sampled_from([2, 4]),
    st.integers(0, 3),
)
def test_steps_have_every_action_once_and_in_order(name, stages, ahead):
    """Receives of a step come before its op, sends after it."""
    schedule = ps.schedule(name, stages=stages, micro_batches=2 * stages)
    for program in lower(schedule, ahead).programs:
        assert in_order(steps_of(program, schedule.stages)) == list(program)
        # A part of a stream may begin or end anywhere, such as with the sends of the op before it.
        for cut in range(0, len(program), 3):
            assert in_order(steps_of(program[cut:], schedule.stages)) == list(program[cut:])
            assert in_order(steps_of(program[:cut], schedule.stages)) == list(program[:cut])


def in_order(steps):
    """Return the actions of some steps."""
    actions = []
    for step in steps:
        actions += [Transfer(Direction.RECV, message, peer) for peer, message in step.posts]
        actions += [step.op] if step.op is not None else []
        actions += [Transfer(Direction.SEND, message, peer) for peer, message in step.sends]
    return actions


def test_a_step_has_the_input_and_output_messages_of_its_op():
    """They are computed once, so that the interpreter need not do it at every op."""
    program = lower(ps.schedule("1f1b", stages=3, micro_batches=1)).programs[1]
    (forward, backward, update) = [step for step in steps_of(program, 3) if step.op is not None]
    assert (forward.text, forward.waits, forward.sends) == (
        "is at 1F0",
        "waits for 0F0",
        ((2, forward.output_message),),
    )
    assert (backward.text, backward.waits, backward.output_message.kind.value) == (
        "is at 1B0",
        "waits for 2B0",
        "B",
    )
    assert update.input_message is update.output_message is None
    assert isinstance(update.op, Op)


def test_the_ends_of_the_pipeline_have_no_messages():
    """The first stage receives no activation, and nobody consumes the output of the last one."""
    forward, last_forward, last_backward, backward = steps_of(
        Schedule.parse("0F0 1F0 1B0 0B0").programs[0], 2
    )
    assert (forward.input_message, forward.maker) == (None, "")
    assert forward.output_message == last_forward.input_message == Message(Kind.F, 0, 0)
    assert (last_forward.output_message, last_backward.input_message) == (None, None)
    assert last_backward.output_message == backward.input_message == Message(Kind.B, 1, 0)
    assert backward.output_message is None


def test_only_the_last_backward_before_an_update_completes_the_gradients():
    """Replicas begin to sum them then, and not before."""
    steps = steps_of(
        Schedule.parse("0F0 1F0 1B0 0B0 0F1 1F1 1I1 0I1 0W1 1W1 0U1 1U1").programs[0], 2
    )
    assert [str(step.op) for step in steps if step.completes] == ["0W1", "1W1"]
    stream = Schedule.parse("0F0 0F1 0B0 0B1 0U1 0F2 0B2 0U2 0F3 0B3").programs[0]
    assert [str(step.op) for step in steps_of(stream, 1) if step.completes] == ["0B1", "0B2"]
    # A forward of the next batch may stand between the last backward and the update.
    mixed = Schedule.parse("0F0 0B0 0F1 0U1 0B1 0U2").programs[0]
    assert [str(step.op) for step in steps_of(mixed, 1) if step.completes] == ["0B0", "0B1"]


def test_messages_of_a_step_keep_their_order():
    """The receiver posts them in the order of the sender; some links match them by it."""
    receives = [Transfer(Direction.RECV, Message(Kind.F, 0, number), 0) for number in (2, 0, 1)]
    sends = [
        Transfer(Direction.SEND, Message(Kind.F, 1, number), peer)
        for number, peer in ((1, 2), (0, 3), (2, 0))
    ]
    (step,) = steps_of([*receives, Op.parse("1F1"), *sends], 3)
    assert [message.micro_batch for _, message in step.posts] == [2, 0, 1]
    assert [(peer, message.micro_batch) for peer, message in step.sends] == [(2, 1), (3, 0), (0, 2)]
    assert (step.kind, step.stage, step.number, step.maker) == (Kind.F, 1, 1, "0F1")
    assert steps_of([], 3) == ()
    # Receives after a send belong to the next step.
    first, second = steps_of([*sends[:1], *receives[:1]], 3)
    assert (first.op, first.posts, second.op, second.sends) == (None, (), None, ())
