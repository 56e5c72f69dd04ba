"""Law 1 for schedules that cut micro-batches into slices: TeraPipe's and Seq1F1B's of tokens,
AutoPipe's of samples.

Exact means: to the bit what plain training on the same slices gives, all slices of a sequence in
one graph; to float tolerance what the undivided batch gives.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance.catalogue import SLICED
from tests.conformance.models import CASES, lengths_of, made
from tests.conformance.random_programs import random_sliced_schedules
from tests.conformance.reference import differences, gradients, in_order_of, layers_of
from tests.conformance.reference_slices import PlainSlices
from tests.conformance.slice_programs import on_fewer_ranks, seq1f1b, terapipe
from torch import nn

import penstock as ps
from penstock.batches.splitting import sizes_by_share
from penstock.schedule.op import Schedule
from penstock.schedule.slicing import Slicing

RECOMPUTE = ["never", "except_last", "always"]
#: Slice lengths of sequences of 6 tokens, by micro-batch.
WAYS = {
    "1": [[6], [6], [6]],
    "2": [[3, 3], [3, 3], [3, 3]],
    "3 unequal": [[3, 2, 1], [3, 2, 1], [3, 2, 1]],
    "each its own": [[4, 2], [6], [1, 4, 1]],
}
SAMPLES = {1: [10], 3: [4, 3, 3]}


def cuts_of(way, micro_batches):
    """Sizes of micro-batches and slices, for the reference."""
    return list(zip(SAMPLES[micro_batches], WAYS[way], strict=False))


def slicing_of(way, micro_batches):
    """The same for a schedule."""
    return Slicing(
        "tokens", tuple(tuple(length / 6 for length in row) for row in WAYS[way][:micro_batches])
    )


def programs():
    """By name: a program, the way its sequences are cut, its micro-batches."""
    for way, micro_batches, stages in itertools.product(WAYS, (1, 3), (1, 2, 4)):
        slicing = slicing_of(way, micro_batches)
        candidates = [terapipe(stages, slicing)]
        if way != "each its own":
            candidates += [seq1f1b(stages, slicing), seq1f1b(stages, slicing, split=True)]
        if stages == 4:
            candidates += [on_fewer_ranks(candidates[0], 2), on_fewer_ranks(candidates[0], 3)]
        for number, schedule in enumerate(candidates):
            yield (
                f"{schedule.name}-{stages}-{micro_batches}-{way}-{number}",
                schedule,
                way,
                micro_batches,
            )


PROGRAMS = list(programs())
#: Several micro-batches, cut unequally, in every way to recompute; the others in one of the ways.
GRID = [
    pytest.param(schedule, way, micro_batches, recompute, id=f"{name}-{recompute}")
    for number, (name, schedule, way, micro_batches) in enumerate(PROGRAMS)
    for recompute in (
        RECOMPUTE if micro_batches == 3 and way == "3 unequal" else [RECOMPUTE[number % 3]]
    )
]


def pipeline(schedule, name="gpt", recompute="never", samples=10):
    """The case's pipeline in this process, its model, and a batch."""
    case = CASES[name]
    model, x, y = made(case, samples)
    lengths = lengths_of(len(layers_of(model)), schedule.stages)
    return (
        ps.Pipeline(
            model,
            loss=case.loss,
            balance=lengths,
            schedule=schedule,
            recompute=recompute,
            executor="threads",
        ),
        model,
        x,
        y,
    )


def nothing_is_held(pipe):
    """Whether no stage keeps anything of a batch."""
    return all(
        not (
            stage._saved
            or stage._pending
            or stage._slice_states.waiting
            or stage._slice_states._grads
        )
        for stage in pipe._assembly.stages
    )


def as_cut(slicing, samples):
    """Sizes of micro-batches and slices, for the reference; the same arithmetic as the runtime's,
    which has tests of its own.
    """
    if slicing.along == "samples":
        slices = len(slicing.share)
        return [
            (size, None)
            for size in (
                sizes_by_share(samples, slicing.share) if samples >= slices else [1] * samples
            )
        ]
    count = min(len(slicing.shares), samples)
    sizes = [len(part) for part in torch.arange(samples).tensor_split(count)]
    return [
        (size, sizes_by_share(6, row)) for size, row in zip(sizes, slicing.shares, strict=False)
    ]


@cache
def expected(way, micro_batches):
    """Loss and gradients by slice of two steps of plain training without updates."""
    model, x, y = made(CASES["gpt"])
    plain = PlainSlices(model, CASES["gpt"].loss)
    return [plain.backward_in_parts(x, y, cuts_of(way, micro_batches)) for _ in range(2)]


@cache
def expected_on(name, slicing):
    """Loss and gradients by slice of one step of plain training."""
    model, x, y = made(CASES[name])
    return PlainSlices(model, CASES[name].loss).backward_in_parts(x, y, as_cut(slicing, 10))


@pytest.mark.parametrize(("schedule", "way", "micro_batches", "recompute"), GRID)
def test_losses_and_gradients_equal_those_of_one_graph_over_the_same_slices_to_the_bit(
    schedule, way, micro_batches, recompute
):
    """Gradients of keys and values come from all later slices, dropout's numbers go by slice;
    nothing of a step may stay for the next.
    """
    ps.verify(schedule)
    pipe, model, x, y = pipeline(schedule, recompute=recompute)
    # A second step shows that nothing is left of the first: of several micro-batches, cut unequally.
    steps = 2 if micro_batches == 3 and way == "3 unequal" else 1
    for loss, parts in expected(way, micro_batches)[:steps]:
        pipe.zero_grad()
        assert torch.equal(pipe.train_batch(x, y), loss)
        assert (
            differences(gradients(model), in_order_of(schedule, pipe.setting.lengths, model, parts))
            == []
        )
        assert nothing_is_held(pipe)
    pipe.close()


def catalogue_grid():
    """The largest size of every schedule in every way to recompute; the others by turns."""
    for number, (name, schedule) in enumerate(SLICED.items()):
        is_largest = (schedule.stages, schedule.micro_batches) == (4, 8)
        for recompute in RECOMPUTE if is_largest else [RECOMPUTE[number % 3 - number // 3 % 3]]:
            yield pytest.param(name, recompute, id=f"{name}-{recompute}")


@pytest.mark.parametrize(("name", "recompute"), [*catalogue_grid()])
def test_the_catalogues_schedules_with_slices_are_exact(name, recompute):
    """Those that cut sequences on the one model that is causal, those that cut samples on any; each
    runs in the order it is written.
    """
    schedule = SLICED[name]
    for case in ["gpt"] if schedule.slicing.along == "tokens" else ["gpt", "vgg"]:
        pipe, model, x, y = pipeline(schedule, case, recompute)
        loss = pipe.train_batch(x, y)
        plain, parts = expected_on(case, schedule.slicing)
        assert torch.equal(loss, plain)
        assert (
            differences(gradients(model), in_order_of(schedule, pipe.setting.lengths, model, parts))
            == []
        )
        assert nothing_is_held(pipe)
        events = pipe.timeline().compute
        assert [
            tuple(event.op for event in events if event.rank == rank)
            for rank in range(schedule.ranks)
        ] == list(schedule.first_micro_batches(10).programs)
        assert torch.allclose(pipe.forward(x), model.eval()(x), atol=1e-5)
        pipe.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stages", [1, 4])
def test_gradients_equal_those_of_the_undivided_batch_to_float_tolerance(way, stages):
    """What the papers promise: slices of a causal model change when things are computed, not what."""
    pipe, model, x, y = pipeline(terapipe(stages, slicing_of(way, 3)), "gpt-without-dropout")
    loss = pipe.train_batch(x, y)
    whole, _, _ = made(CASES["gpt-without-dropout"])
    undivided = CASES["gpt-without-dropout"].loss(whole(x), y)
    undivided.backward()
    assert torch.allclose(loss, undivided.detach(), rtol=1e-6)
    scale = max(parameter.grad.abs().max() for parameter in whole.parameters())
    for key, parameter in whole.named_parameters():
        error = (model.get_parameter(key).grad - parameter.grad).abs().max()
        assert error <= 1e-5 * max(parameter.grad.abs().max(), 1e-3 * scale), (
            key
        )  # a bias of keys has gradient 0 but for rounding


@given(random_sliced_schedules("tokens"), st.sampled_from(RECOMPUTE), st.integers(1, 9))
@settings(deadline=None, max_examples=20)
def test_any_sound_program_over_slices_of_tokens_is_exact(schedule, recompute, samples):
    """Several stages on a rank in any order, backwards in two parts, every micro-batch cut its own
    way, batches that are too small.
    """
    ps.verify(schedule)
    pipe, model, x, y = pipeline(schedule, recompute=recompute, samples=samples)
    try:
        loss = pipe.train_batch(x, y)
        actual = gradients(model)
        assert nothing_is_held(pipe)
        plain, parts = PlainSlices(model, CASES["gpt"].loss).backward_in_parts(
            x, y, as_cut(schedule.slicing, samples)
        )
        assert torch.equal(loss, plain)
        assert differences(actual, in_order_of(schedule, pipe.setting.lengths, model, parts)) == []
    finally:
        pipe.close()


@pytest.mark.parametrize("name", ["vgg", "gpt", "mlp"])
def test_any_sound_program_over_slices_of_samples_is_exact(name):
    """AutoPipe's slices are small micro-batches: no model is too entangled for them."""

    @given(random_sliced_schedules("samples"), st.sampled_from(RECOMPUTE), st.integers(1, 12))
    @settings(deadline=None, max_examples=15)
    def holds(schedule, recompute, samples):
        ps.verify(schedule)
        pipe, model, x, y = pipeline(schedule, name, recompute, samples)
        try:
            loss = pipe.train_batch(x, y)
            actual = gradients(model)
            plain, parts = PlainSlices(model, CASES[name].loss).backward_in_parts(
                x, y, as_cut(schedule.slicing, samples)
            )
            assert torch.equal(loss, plain)
            assert (
                differences(actual, in_order_of(schedule, pipe.setting.lengths, model, parts)) == []
            )
        finally:
            pipe.close()

    holds()


COPIES = """rank 0 | 0F0 0F1 0B1 0F4 0F5 0B0 0B5 0B4 0U1
rank 1 | 1F0 1F1 1B1 1B0 1F4 1F5 1B5 1B4 1U1
rank 2 | 0F2 0F3 1F2 1F3 1B3 0B3 1B2 0B2 0U1 1U1"""
EVICT = """rank 0 | 0F0 0F1 0E0 0F2 0F3 0F4 0F5 0B1 0L0 0B0 0B3 0B2 0B5 0B4 0U1
rank 1 | 1F0 1F1 0E0 1F2 1F3 1F4 1F5 1B1 0L0 1B0 1B3 1B2 1B5 1B4 1U1"""


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("programs", [COPIES, EVICT], ids=["copies", "evict"])
def test_slices_go_with_copies_of_stages_and_with_activations_handed_to_a_partner(
    programs, recompute
):
    """Sequences of one micro-batch stay on one copy; what one slice has left stays when its
    activations go.
    """
    schedule = replace(Schedule.parse(programs), slicing=slicing_of("2", 3))
    ps.verify(schedule)
    pipe, model, x, y = pipeline(schedule, recompute=recompute)
    for loss, parts in expected("2", 3):
        pipe.zero_grad()
        assert torch.equal(pipe.train_batch(x, y), loss)
        assert (
            differences(gradients(model), in_order_of(schedule, pipe.setting.lengths, model, parts))
            == []
        )
    assert torch.allclose(pipe.forward(x), model.eval()(x), atol=1e-6)
    pipe.close()


@pytest.mark.parametrize("recompute", ["never", "except_last"])
def test_slices_of_samples_have_the_sizes_of_their_shares(recompute):
    """Half a micro-batch first, so that the last stage begins early; 12 samples in 3 micro-batches
    of 4.
    """
    slicing = Slicing("samples", ((0.5, 0.5), (1.0,), (0.25, 0.75)))
    schedule = replace(ps.schedule("gpipe", 2, 5), slicing=slicing)
    pipe, model, x, y = pipeline(schedule, "vgg", recompute, 12)
    loss = pipe.train_batch(x, y)
    plain, parts = PlainSlices(model, CASES["vgg"].loss).backward_in_parts(
        x, y, [(size, None) for size in (2, 2, 4, 1, 3)]
    )
    assert torch.equal(loss, plain)
    assert (
        differences(gradients(model), in_order_of(schedule, pipe.setting.lengths, model, parts))
        == []
    )


@pytest.mark.parametrize("along", ["tokens", "samples"])
def test_recompute_except_last_spares_all_slices_of_the_last_micro_batch(along):
    """Its backward begins at once; slices of one sequence that were kept in part would gain
    nothing.
    """
    slicing = Slicing(along, ((0.5, 0.5), (0.5, 0.5)))
    schedule = terapipe(2, slicing)
    pipe, _, x, y = pipeline(schedule, recompute="except_last", samples=12)
    forwards = []
    for stage in pipe._assembly.stages:
        build = stage._builder.build
        stage._builder.build = lambda batch, n, *rest, build=build, index=stage.index: (
            forwards.append((index, n)) or build(batch, n, *rest)
        )
    pipe.train_batch(x, y)
    assert sorted(forwards) == [
        (0, 0),
        (0, 0),
        (0, 1),
        (0, 1),
        (0, 2),
        (0, 3),
        (1, 0),
        (1, 0),
        (1, 1),
        (1, 1),
        (1, 2),
        (1, 3),
    ]


@pytest.mark.parametrize(
    ("name", "schedule", "way", "micro_batches"),
    [p for p in PROGRAMS if p[3] == 3 and "seq" not in p[0]],
)
def test_forward_and_eval_batch_equal_the_plain_model(name, schedule, way, micro_batches):
    """Outputs are put together along tokens, then samples; what slices hand on is dropped with the
    last of them.
    """
    pipe, model, x, y = pipeline(schedule)
    pipe_output = pipe.forward(x)
    evaluated = pipe.eval_batch(x, y)
    assert nothing_is_held(pipe)
    with torch.no_grad():
        output = model.eval()(x)
    assert pipe_output.shape == output.shape
    assert torch.allclose(pipe_output, output, atol=1e-6)
    assert torch.allclose(evaluated, CASES["gpt"].loss(output, y), rtol=1e-6)
    pipe.close()


def test_batches_of_changing_size_follow_one_another():
    """Fewer samples fill fewer micro-batches; sequences of another length are cut by the same
    shares.
    """
    schedule = seq1f1b(2, slicing_of("2", 3))
    pipe, model, x, y = pipeline(schedule, samples=16)
    plain = PlainSlices(model, CASES["gpt"].loss)
    for samples, tokens, sizes, lengths in (
        (16, 6, [6, 5, 5], [3, 3]),
        (2, 6, [1, 1], [3, 3]),
        (7, 5, [3, 2, 2], [3, 2]),
        (16, 2, [6, 5, 5], [1, 1]),
    ):
        own_x, own_y = x[:samples, :tokens], y[:samples, :tokens]
        pipe.zero_grad()
        loss = pipe.train_batch(own_x, own_y)
        expected_loss, parts = plain.backward_in_parts(
            own_x, own_y, [(size, lengths) for size in sizes]
        )
        assert torch.equal(loss, expected_loss)
        assert (
            differences(gradients(model), in_order_of(schedule, pipe.setting.lengths, model, parts))
            == []
        )


def test_what_slices_hand_on_is_dropped_when_a_batch_fails():
    """The next batch would begin with keys, or gradients of keys, of this one."""
    pipe, model, x, y = pipeline(on_fewer_ranks(terapipe(2, slicing_of("2", 3)), 1))
    first = pipe._assembly.stages[0]
    plain, parts = PlainSlices(model, CASES["gpt"].loss).backward_in_parts(x, y, cuts_of("2", 3))
    for method, number in (("forward", 1), ("backward", 0)):
        right = getattr(first, method)

        def wrong(batch, n, arrived, right=right, number=number):
            assert n != number, "a planted failure"
            return right(batch, n, arrived)

        setattr(first, method, wrong)
        with pytest.raises(
            ps.PenstockError,
            match=r"failed in 0[FB]\d of step 0: AssertionError: a planted failure",
        ):
            pipe.train_batch(x, y)
        assert nothing_is_held(pipe)
        setattr(first, method, right)
    assert torch.equal(pipe.train_batch(x, y), plain)
    assert (
        differences(
            gradients(model), in_order_of(pipe.setting.schedule, pipe.setting.lengths, model, parts)
        )
        == []
    )


@pytest.mark.parametrize(("name", "tolerance"), [("gpt", 1e-6), ("gpt-without-dropout", 1e-6)])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_the_self_check_finds_nothing_wrong_in_a_sound_model(name, tolerance, recompute):
    """With dropout against slices in one graph, without against whole sequences."""
    pipe, _, x, y = pipeline(seq1f1b(2, slicing_of("3 unequal", 3)), name, recompute)
    comparison = pipe.compare_with_one_device(x, y)
    assert comparison.worst[1] <= tolerance
    assert nothing_is_held(pipe)


class Later(nn.Linear):
    """Every token takes a little of all others, and its author says it does not."""

    per_token = True

    def forward(self, x):
        """Run the layer."""
        return super().forward(x) + x.mean(dim=1, keepdim=True)


class Forgets(nn.Linear):
    """Adds up tokens, and loses them between slices."""

    def forward_slice(self, x, past):
        """Run the layer on the next tokens."""
        return super().forward(x.cumsum(dim=1)), None

    def forward(self, x):
        """Run the layer."""
        return self.forward_slice(x, None)[0]


@pytest.mark.parametrize("wrong", [Later, Forgets])
def test_the_self_check_finds_a_layer_that_is_other_on_slices_than_on_the_whole(wrong):
    """A mark is a promise, and a past can be forgotten: both train without a word, and something
    else.
    """
    model = nn.Sequential(nn.Embedding(11, 8), wrong(8, 8), nn.Linear(8, 11))
    x, y = CASES["gpt"].data(6)
    pipe = ps.Pipeline(
        model,
        loss=CASES["gpt"].loss,
        balance=[1, 2],
        schedule=terapipe(2, slicing_of("2", 3)),
        executor="threads",
    )
    comparison = pipe.compare_with_one_device(x, y)
    assert comparison.gradients["1.weight"] > 1e-3
    assert comparison.gradients["2.bias"] > 1e-6


def test_peaks_in_flight_of_a_run_count_micro_batches_not_slices():
    """As in the simulation: three micro-batches of two slices hold (S - s - 1 + k) / k at most."""
    schedule = seq1f1b(3, slicing_of("2", 3))
    pipe, _, x, y = pipeline(schedule)
    pipe.train_batch(x, y)
    simulated = ps.simulate(schedule, ps.Costs(forward=1.0, backward=2.0))
    assert pipe.timeline().peak_in_flight == simulated.peak_in_flight == (2, 1.5, 1)
