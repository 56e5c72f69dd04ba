"""The papers again: what benchmarks/papers simulates by itself, and that its page is what its
results say.
"""

import importlib
import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.cluster.device import Link
from penstock.schedule.op import Kind
from penstock.simulate.gradient_sync import all_reduce_seconds
from penstock.study.paper import one_process

PAPERS = Path(__file__).parents[2] / "benchmarks" / "papers"
MODULES = (
    "side_by_side",
    "common",
    "study",
    "bapipe",
    "pipedream",
    "dapple",
    "gpipe",
    "resnet101",
    "run",
)


@pytest.fixture(scope="module")
def papers():
    """The benchmark's modules; names as plain as theirs are gone again behind the tests."""
    before = set(sys.modules)
    sys.path.insert(0, str(PAPERS))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    sys.path.remove(str(PAPERS))
    for name in set(MODULES) - before:
        sys.modules.pop(name, None)


def results():
    """What the command found when it was run last."""
    return json.loads((PAPERS / "results.json").read_text(encoding="utf-8"))["papers"]


def rows_of(name):
    """The rows of one table of results.json, by case."""
    sections = [section for paper in results().values() for section in paper]
    return {
        row["case"]: row
        for section in sections
        if section["name"] == name
        for row in section["rows"]
    }


SECONDS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@settings(deadline=None, max_examples=40)
@given(forward=SECONDS, micro_batches=st.integers(1, 5), name=st.sampled_from(["gpipe", "1f1b"]))
def test_a_host_without_a_lock_is_a_process_for_each_device(papers, forward, micro_batches, name):
    """Threads that never wait for each other are what our simulator simulates anyway."""
    schedule = ps.schedule(name, stages=len(forward), micro_batches=micro_batches)

    def work(op):
        factor = {Kind.F: 1, Kind.B: 2, Kind.U: 0}[op.kind]
        return one_process.Work(0.0, float(factor * forward[op.stage]))

    costs = ps.Costs(
        forward=[float(seconds) for seconds in forward],
        backward=[2.0 * seconds for seconds in forward],
    )
    assert one_process.makespan(schedule, work) == pytest.approx(
        ps.simulate(schedule, costs).makespan
    )


@settings(deadline=None, max_examples=40)
@given(seconds=SECONDS, micro_batches=st.integers(1, 5), pieces=st.integers(1, 6))
def test_a_host_whose_work_is_all_under_the_lock_does_one_thing_at_a_time(
    papers, seconds, micro_batches, pieces
):
    """That is where single-process libraries stop scaling: the sum of all launches, however many
    devices there are.
    """
    schedule = ps.schedule("gpipe", stages=len(seconds), micro_batches=micro_batches)

    def work(op):
        return one_process.Work(float(seconds[op.stage]) if op.kind is not Kind.U else 0.0, 0.0)

    total = 2 * micro_batches * sum(seconds)
    assert one_process.makespan(schedule, work, pieces) == pytest.approx(total)


def test_a_slow_device_hides_its_host(papers):
    """Kernels are queued: a host that is faster than its devices costs nothing but the first
    launch.
    """
    schedule = ps.schedule("gpipe", stages=3, micro_batches=4)

    def work(op):
        return one_process.Work(0.001, 0.001, 0.0 if op.kind is Kind.U else 1.0)

    assert one_process.makespan(schedule, work) == pytest.approx((4 + 3 - 1) * 2.0, abs=0.05)


def test_a_deadlock_of_threads_is_refused(papers):
    """A program in an order that cannot be played is a mistake of the caller, not a long step."""
    swapped = ps.Schedule.parse("rank 0 | 0F0 0B1 0F1 0B0\nrank 1 | 1F0 1F1 1B0 1B1")
    with pytest.raises(ValueError, match="wait for ever"):
        one_process.makespan(swapped, lambda _: one_process.Work(1.0, 0.0))


def test_the_fit_recovers_the_constants_behind_synthetic_data(papers):
    """The fit is a deterministic descent; on data that the model itself produced it must find the
    constants.
    """
    coefficients = (3e-4, 2e-3)

    def residual(values):
        return sum(
            (values[0] * a + values[1] * b - coefficients[0] * a - coefficients[1] * b) ** 2
            for a, b in product((1, 5), (1, 7))
        )

    assert papers.study.fit(residual, (1e-4, 1e-3)) == pytest.approx(coefficients, rel=0.02)


def test_the_studys_cells_are_all_there(papers):
    """Two libraries by two balances on four numbers of GPUs at three numbers of micro-batches, and
    eight of DeepSpeed.
    """
    cells = papers.study.published_cells()
    assert len(cells) == 56
    assert sum(cell.library == "deepspeed" for cell in cells) == 8


@pytest.mark.parametrize("case", ["published", "ours"])
def test_the_studys_findings_hold_in_both_columns(case):
    """Per-launch cost: more micro-batches are slower; one process gains up to 4 GPUs and no more, a
    process for each goes on.
    """
    key = "paper" if case == "published" else "ours"
    one, many = rows_of("study"), rows_of("study-deepspeed")
    for gpus in (2, 4, 6, 8):
        seconds = [one[f"torchgpipe by time, M={m}, {gpus} GPUs"][key] for m in (1, 8, 16)]
        assert seconds == sorted(seconds)
    four, eight = (one[f"torchgpipe by size, M=16, {gpus} GPUs"][key] for gpus in (4, 8))
    assert four < eight
    falling = [many[f"deepspeed by uniform, M=16, {gpus} GPUs"][key] for gpus in (2, 4, 6, 8)]
    assert falling == sorted(falling, reverse=True)


def test_the_studys_predicted_cells_stay_as_near_as_they_are():
    """A band that may only tighten: half of what nothing was fitted to is within 6 %; of DeepSpeed's
    eight cells six are within 5 % and those on 6 devices within 11 %.

    All of DeepSpeed's were within 5 % while the model was another one, of 39 million parameters.
    The study's has 140 million and a pooling layer more, which moves the cut on 6 devices.
    """
    off = [abs(row["ratio"] - 1) for row in rows_of("study").values() if not row["fitted"]]
    assert sorted(off)[len(off) // 2] < 0.06
    off = sorted(abs(row["ratio"] - 1) for row in rows_of("study-deepspeed").values())
    assert off[5] < 0.05
    assert off[7] < 0.11


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("dapple_vgg19", 143_667_240),
        ("pipedream_gnmt", 193_765_952),
        ("pipedream_gnmt16", 277_717_568),
    ],
)
def test_profiles_that_others_published_have_the_models_parameters(papers, name, parameters):
    """A slip in a table of bytes would go unseen in seconds: the sums are those of the models."""
    profile = papers.common.table_profile(name, 32)
    # cuDNN's LSTMs have two biases, as PyTorch's; PipeDream's classifier has one.
    assert sum(layer.parameters for layer in profile) == pytest.approx(parameters, rel=2e-4)


def test_dapples_profile_of_vgg19_has_its_published_sums(papers):
    """docs/literature/vgg-19-profile.md: 48.01 and 96.20 ms at 32 samples."""
    profile = papers.dapple.profile("VGG-19")
    assert sum(profile.seconds("forward", 32)) == pytest.approx(48.01e-3, abs=1e-5)
    assert sum(profile.seconds("backward", 32)) == pytest.approx(96.20e-3, abs=1e-4)


@settings(deadline=None, max_examples=30)
@given(bandwidth=st.floats(1e7, 1e11), samples=st.integers(1, 64))
def test_overlapped_data_parallelism_takes_between_its_longest_part_and_the_sum(
    papers, bandwidth, samples
):
    """Overlap hides at most the shorter of backward and gradient synchronisation."""
    profile = papers.dapple.profile("VGG-19")
    whole = ps.cluster("DAPPLE-B")
    cluster = ps.cluster("DAPPLE-B").on(range(16))
    cluster = type(whole)("c", cluster.devices, 1, whole.inside, Link(0.0, bandwidth))
    compute = sum(profile.step_seconds(samples))
    network = all_reduce_seconds(
        range(16), sum(layer.parameter_bytes for layer in profile), cluster
    )
    overlapped = papers.common.data_parallel_s(profile, cluster, samples)
    bare = papers.common.data_parallel_s(profile, cluster, samples, overlap=False)
    assert max(compute, network) * (1 - 1e-9) <= overlapped <= bare * (1 + 1e-9)
    assert bare == pytest.approx(compute + network)


def test_a_balance_of_torchgpipes_resnet_maps_to_layers_of_penstock(papers):
    """Boundaries go to the nearest residual block, and no layer is lost."""
    assert papers.resnet101.cut((135, 235), 40) == [16, 24]
    assert sum(papers.resnet101.cut((26, 22, 33, 44, 44, 66, 66, 69), 40)) == 40


def test_boards_are_cut_where_the_slowest_is_least(papers):
    """Against all cuts of a small chain over three boards of different speed."""
    work = [5.0, 1.0, 4.0, 2.0, 2.0, 6.0]
    pace = (1.0, 2.0, 1.0)
    stages = [
        {
            (i, j): (p * sum(work[i:j]), p * sum(work[i:j]), 0.0)
            for i in range(6)
            for j in range(i + 1, 7)
        }
        for p in pace
    ]
    best = min(
        max(sum(stages[n][r][:2]) for n, r in enumerate(((0, a), (a, b), (b, 6))))
        for a in range(1, 5)
        for b in range(a + 1, 6)
    )
    cut = papers.bapipe.best_cut(stages, 6)
    assert max(sum(costs[bounds][:2]) for costs, bounds in zip(stages, cut, strict=True)) == best


def test_berts_memory_by_schedule_is_the_published_one(papers):
    """Two numbers set weights and activations of a micro-batch; that DAPPLE's peak does not grow
    with M is the schedule's doing.
    """
    weights, activations = papers.dapple._fit_bytes()
    for micro_batches in (2, 8, 16):
        assert papers.dapple.bert_bytes(
            "1f1b", micro_batches, weights, activations
        ) == pytest.approx(10.6)
    assert papers.dapple.bert_bytes("gpipe", 8, weights, activations) > 16


def test_a_chain_of_equal_stages_has_gpipes_speed_up(papers):
    """K = 8, M = 32 against M = 1: 8 x 32 / 39, whatever is recomputed."""
    step = papers.gpipe.chain_step
    for recompute in ("never", "always"):
        ratio = step([1.0], 1, recompute) / step([1 / 8 / 32] * 8, 32, recompute)
        assert ratio == pytest.approx(8 * 32 / 39)


def test_the_page_shows_the_results(papers):
    """Tables are written by the command alone: a number that was typed in would be gone with the
    next run, and not be missed.
    """
    sections = [
        papers.side_by_side.Section.of(data) for paper in results().values() for data in paper
    ]
    text = (PAPERS / "README.md").read_text(encoding="utf-8")
    assert papers.run.rewritten(text, papers.run.page(sections)) == text


def test_a_section_reads_back_from_its_data(papers):
    """`--only` keeps the other papers' tables, which it knows from results.json alone."""
    side = papers.side_by_side
    rows = (side.Row("a", 2.0, 3.0, "how", fitted=True), side.Row("b", None, 1.0))
    section = side.Section("n", "Title", "s", rows, ("p",), ("a",), ("f",), ("m",))
    assert side.Section.of(section.data()) == section


def test_fitted_rows_do_not_count_as_predicted(papers):
    """A row that was used to fit a constant is no test of the model."""
    side = papers.side_by_side
    section = side.Section(
        "n", "t", "s", (side.Row("a", 1.0, 1.0, fitted=True), side.Row("b", 1.0, 2.0))
    )
    assert section.predicted == [2.0]
    assert "off by 100%" in section.summary()
