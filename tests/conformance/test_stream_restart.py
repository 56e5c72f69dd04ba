"""A stream that is interrupted goes on exactly: by checkpoints, evaluation, flushes, short batches,
and those who stop asking.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tests.conformance.async_cases import LEARNING, Case, assert_same, save_half_way
from tests.conformance.reference import differences

import penstock as ps
from penstock.errors import RunError
from penstock.ranks.processes.launch import launch

#: One case of every rule, three stages deep (WPipe: six), with optimizers that keep something.
EVERY = {
    case.rule: case
    for case in (
        Case("stash", 3, 1, "momentum", updates=12),
        Case("vertical-sync", 3, 2, "adam", updates=12),
        Case("double-buffer", 3, 4, "adam", schedule="2bw", updates=12),
        Case("none", 3, 1, "adam", updates=12),
        Case("spectrain", 3, 1, "momentum", updates=12),
        Case("xpipe", 3, 2, "adam", schedule="xpipe", updates=12),
        Case("pipeoptim", 3, 1, "sgd", updates=12),
        Case("pipemare", 3, 1, "momentum", options={"annealing": 8.0}, updates=12),
        Case("wpipe", 3, 4, "momentum", schedule="wpipe", updates=12),
        Case(
            "avgpipe",
            3,
            2,
            "momentum",
            schedule="avgpipe",
            making={"pipelines": 3},
            reference={"pipelines": 3},
            updates=14,
        ),
        Case(
            "hetpipe",
            2,
            1,
            "momentum",
            schedule="hetpipe",
            making={"virtual_workers": 2, "in_flight": 3, "distance": 1},
            reference={"virtual_workers": 2, "in_flight": 3, "distance": 1},
            updates=19,
        ),
    )
}
STASH = EVERY["stash"]
every_rule = pytest.mark.parametrize("case", EVERY.values(), ids=list(EVERY))


def interrupted(case, what, after=3, **options):
    """Train on all batches, and call `what(pipe)` when `after` losses are there.

    Returns losses, state, how many batches had been fed by then, and what `what` returned.
    """
    pipe = case.pipeline(**options)
    losses, fed, value = [], None, None
    for loss in pipe.train(case.batches()):
        losses.append(loss)
        if len(losses) == after:
            fed = pipe.step
            value = what(pipe)
            assert pipe.step == fed
    return losses, pipe.state_dict(), fed, value


def assert_equal(actual, expected):
    """Losses and state, to the bit."""
    assert torch.equal(torch.stack(list(actual[0])), torch.stack(list(expected[0])))
    assert differences(actual[1], expected[1]) == []


@every_rule
def test_a_checkpoint_taken_in_mid_stream_resumes_to_the_bit_in_a_new_pipeline(case, tmp_path):
    """It drains first, so all that a run has is in it: weights, optimizers, and what the rule keeps
    besides.
    """
    losses, state, fed, _ = interrupted(case, lambda pipe: pipe.save(tmp_path), 5)
    assert 5 <= fed < case.updates
    other = case.pipeline()
    other.load(tmp_path)
    assert other.step == fed
    actual = list(other.train(case.batches()[fed:])), other.state_dict()
    assert_equal(actual, (losses[fed:], state))


@every_rule
def test_a_drain_in_mid_stream_is_that_of_the_papers_equation_counted_anew(case):
    """After it the first batches find nothing stale, as at the very beginning; optimizers and
    corrections go on.
    """
    losses, state, fed, _ = interrupted(case, lambda pipe: pipe.flush(), 4)
    assert_same((losses, state), case.expected(drains=[fed]), case)


@every_rule
def test_evaluation_in_mid_stream_sees_the_newest_weights_and_does_no_more_than_drain(case):
    """It must not leave a prediction, a copy or an old version in the weights, nor take one for the
    model.
    """
    x, y = case.batches()[0]
    look = lambda pipe: (  # noqa: E731
        pipe.eval_batch(x, y),
        pipe.forward(x),
        pipe.state_dict(),
        pipe.eval_batch(x, y),
    )
    losses, state, fed, (loss, output, state_at_evaluation, again) = interrupted(case, look)
    assert_equal((losses, state), interrupted(case, lambda pipe: pipe.flush()))
    model = case.build_model().eval()
    model.load_state_dict(state_at_evaluation)
    torch.testing.assert_close(output, model(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        loss.double(), LEARNING[case.model].loss(model(x), y).detach(), rtol=2e-7, atol=0
    )
    assert torch.equal(loss, again)
    _, expected = case.expected(case.batches()[:fed])
    torch.testing.assert_close(state_at_evaluation, expected, rtol=1e-9, atol=1e-11)


@every_rule
def test_a_comparison_with_one_device_in_mid_stream_is_of_the_newest_weights_and_updates_nothing(
    case,
):
    """Both run whole batches on one version: there is no staleness in a batch alone, and none may
    be left behind.
    """
    x, y = case.batches()[0]
    losses, state, _, comparison = interrupted(
        case, lambda pipe: pipe.compare_with_one_device(x, y)
    )
    assert max(comparison.gradients.values()) < 1e-12
    assert comparison.loss < 1e-6  # it is handed out in single precision
    assert_equal((losses, state), interrupted(case, lambda pipe: pipe.flush()))


@every_rule
def test_who_stops_asking_loses_only_what_he_did_not_ask_for(case):
    """Breaking out of the loop leaves batches under way; the next loop goes on with them, full as
    the pipeline is.
    """
    pipe = case.pipeline()
    first = list(itertools.islice(pipe.train(iter(case.batches())), 4))
    fed = pipe.step
    losses = list(pipe.train(case.batches()[fed:]))
    whole = case.run()
    assert_equal(
        ([*first, *losses], pipe.state_dict()), ([*whole[0][:4], *whole[0][fed:]], whole[1])
    )


def test_a_loss_comes_as_soon_as_its_batch_is_done_and_an_endless_loader_is_read_no_further_than_that():
    """Three stages: when batch 0 has come back, two more are under way, and no list of batches is
    ever made.
    """
    batches_read = []

    def endless():
        for number in itertools.count():
            batches_read.append(number)
            yield batches[number % len(batches)]

    batches = STASH.batches()
    pipe = STASH.pipeline()
    for number, loss in enumerate(pipe.train(endless())):
        assert loss.dim() == 0
        assert not loss.requires_grad
        assert len(batches_read) == number + 3 == pipe.step
        if number == 30:
            break
    pipe.flush()
    assert len(batches_read) == pipe.step == 33


def test_flushing_twice_is_flushing_once():
    """Nothing is under way the second time, so nothing may happen."""
    once = interrupted(STASH, lambda pipe: pipe.flush())
    twice = interrupted(STASH, lambda pipe: (pipe.flush(), pipe.flush()))
    assert_equal(twice, once)
    pipe = STASH.pipeline()
    pipe.flush()
    assert_equal((list(pipe.train(STASH.batches())), pipe.state_dict()), STASH.run())


@every_rule
def test_train_batch_drains_after_every_batch(case):
    """It returns the batch's own loss, so the batch has to be done. Where nothing is predicted,
    that is synchronous training.
    """
    pipe = case.pipeline()
    losses = [pipe.train_batch(x, y) for x, y in case.batches()]
    actual = losses, pipe.state_dict()
    assert_same(actual, case.expected(drains=range(case.updates)), case)
    if case.rule in ("stash", "vertical-sync", "double-buffer", "none", "wpipe"):
        assert_same(actual, case.synchronous(), case)


@every_rule
def test_epochs_may_end_in_short_batches_and_be_of_any_length(case):
    """The last batch is as long as it is, with fewer samples than micro-batches even; each epoch
    ends drained.
    """
    sizes = [[8, 8, 8, 8, 3], [8], [], [1], [8, 5, 8], [8] * 7]
    batches = case.batches([size for epoch in sizes for size in epoch])
    pipe, losses, rest = case.pipeline(), [], iter(batches)
    for epoch in sizes:
        epoch_losses = list(pipe.train(itertools.islice(rest, len(epoch))))
        assert len(epoch_losses) == len(epoch)
        losses += epoch_losses
    ends = list(itertools.accumulate(map(len, sizes)))
    assert pipe.step == len(batches) == ends[-1]
    assert_same((losses, pipe.state_dict()), case.expected(batches, drains=ends), case)


@every_rule
def test_a_short_batch_in_mid_stream_is_like_any_other(case):
    """Loaders over several files have them; its missing micro-batches are left out of every
    program.
    """
    batches = case.batches([8, 8, 8, 2, 8, 8, 1, 1, 8, 7, 8, 8])
    pipe = case.pipeline()
    assert_same((list(pipe.train(batches)), pipe.state_dict()), case.expected(batches), case)


def test_an_empty_loader_changes_nothing():
    """Not at the beginning, and not after batches either."""
    pipe = STASH.pipeline()
    before = pipe.state_dict()
    assert list(pipe.train([])) == []
    assert differences(pipe.state_dict(), before) == []
    list(pipe.train(STASH.batches()))
    before = pipe.state_dict()
    assert list(pipe.train(iter(()))) == []
    assert differences(pipe.state_dict(), before) == []
    assert pipe.step == STASH.updates


def test_a_loader_that_fails_leaves_what_was_fed_to_be_finished():
    """A file that cannot be read is no reason to lose the batches before it."""

    def failing():
        yield from STASH.batches()[:7]
        raise OSError("disk on fire")

    pipe, losses = STASH.pipeline(), []
    with pytest.raises(OSError, match="disk on fire"):
        losses.extend(pipe.train(failing()))
    assert (len(losses), pipe.step) == (5, 7)
    expected_losses, expected = STASH.expected(STASH.batches()[:7])
    assert_same((losses, pipe.state_dict()), (expected_losses[:5], expected), STASH)


@every_rule
def test_loading_in_mid_stream_drops_what_is_under_way(case, tmp_path):
    """Its gradients would be of weights that are gone; what had been sent by then must not be taken
    for what comes later.
    """
    pipe = case.pipeline()
    pipe.save(tmp_path)
    list(itertools.islice(pipe.train(iter(case.batches())), 3))
    pipe.load(tmp_path)
    assert pipe.step == 0
    assert_equal((list(pipe.train(case.batches())), pipe.state_dict()), case.run())


def test_loading_weights_in_mid_stream_leaves_optimizers_alone():
    """As it does for any schedule; the stream begins anew from the weights that were given."""
    case = Case("none", 3, 1, "sgd", updates=9)
    pipe = case.pipeline()
    start = pipe.state_dict()
    list(itertools.islice(pipe.train(iter(case.batches())), 3))
    pipe.load_state_dict(start)
    assert differences(pipe.state_dict(), start) == []
    assert_equal((list(pipe.train(case.batches())), pipe.state_dict()), case.run())


def test_a_checkpoint_of_a_stream_goes_on_under_another_cut_with_flushes_too(tmp_path):
    """It is the model's, drained: asynchrony is a way to run, not a kind of model."""
    _, _, fed, state = interrupted(
        STASH, lambda pipe: (pipe.save(tmp_path), pipe.state_dict())[1], 5
    )
    later = STASH.batches()[fed:]
    options = {
        "loss": LEARNING["mlp"].loss,
        "optimizer": lambda ws: torch.optim.SGD(ws, lr=0.05, momentum=0.9),
        "executor": "threads",
    }
    results = []
    for balance, schedule in (([4, 5], "1f1b"), ([9], "pipedream")):
        pipe = ps.Pipeline(
            STASH.build_model(), balance=balance, schedule=schedule, micro_batches=2, **options
        )
        pipe.load(tmp_path)
        assert differences(pipe.state_dict(), state) == []
        results.append((list(pipe.train(later)), pipe.state_dict()))
    assert_equal(*results)


def test_a_failed_op_in_mid_stream_is_named_and_the_pipeline_does_not_go_on_with_half_a_batch():
    """Some stages have had updates that others have not; only loading weights makes it whole again."""
    pipe = STASH.pipeline()
    start = pipe.state_dict()
    batches = STASH.batches()
    wrong = batches[4][0][:, :3], batches[4][1]
    with pytest.raises(ps.PenstockError, match=r"0F4"):
        list(pipe.train([*batches[:4], wrong, *batches[5:]]))
    with pytest.raises(RunError, match="cannot go on after a batch that failed"):
        pipe.train_batch(*batches[5])
    pipe.load_state_dict(start)
    assert torch.equal(pipe.train_batch(*batches[0]), STASH.pipeline().train_batch(*batches[0]))


@pytest.mark.parametrize(
    ("ranks", "tried"), [(3, ["stash", "pipemare", "avgpipe"]), (4, ["hetpipe"])]
)
def test_a_checkpoint_of_processes_goes_on_there_and_in_threads_to_the_bit(ranks, tried, tmp_path):
    """Every rank writes and reads what is its own; who carries the tensors makes no difference. It
    is also loaded in mid-stream.
    """
    cases = [EVERY[rule] for rule in tried]
    folders = [Path(tmp_path, rule) for rule in tried]
    by_rank = launch(save_half_way, ranks, cases, folders, threads=1)
    for number, (case, folder) in enumerate(zip(cases, folders, strict=True)):
        fed, losses, state = by_rank[0][number][:3]
        assert all(
            results[number][0] == fed and torch.equal(results[number][1], losses)
            for results in by_rank
        )
        assert_equal(by_rank[0][number][3:], (losses[fed:], state))
        pipe = case.pipeline()
        pipe.load(folder)
        assert_equal(
            (list(pipe.train(case.batches()[fed:])), pipe.state_dict()), (losses[fed:], state)
        )
