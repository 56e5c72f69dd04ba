"""What has to hold on a GPU. Skipped where there is none; none of these tests has been run on one
yet.

References are computed on the same GPU: convolutions and matrix products differ between a GPU and a
CPU in the last bits, and so do the numbers that dropout draws.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import RunError, StageFailed
from penstock.ranks.processes.launch import launch
from penstock.zoo.gpt import gpt, gpt_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

MICRO_BATCHES = 4

#: Schedules that add up gradients in the order of micro-batches on every stage, so that they agree
#: to the bit.
EXACT = {
    "1f1b": {"schedule": "1f1b"},
    "gpipe": {"schedule": "gpipe"},
    "gpipe, recompute": {"schedule": "gpipe", "recompute": "always"},
    "1f1b, recompute of all but the last": {"schedule": "1f1b", "recompute": "except_last"},
    "zb-h1": {"schedule": "zb-h1"},
}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """To the bit is only what is deterministic; cuBLAS reads its setting when its handle is made."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def cuda():
    """The first GPU, with its index."""
    return torch.device("cuda", 0)


def layers_of(name="linear"):
    """Five layers with the same first weights each time."""
    torch.manual_seed(0)
    middle = {
        "linear": lambda: nn.Linear(32, 32),
        "dropout": lambda: nn.Dropout(0.5),
        "batch norm": lambda: nn.BatchNorm1d(32),
    }[name]()
    return [nn.Linear(16, 32), nn.ReLU(), middle, nn.ReLU(), nn.Linear(32, 10)]


def batch_on(device, samples=16):
    """Inputs and targets on the device."""
    torch.manual_seed(1)
    return torch.randn(samples, 16).to(device), torch.randint(0, 10, (samples,)).to(device)


def sgd(parameters):
    """Momentum, so that a checkpoint has state to keep."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def pipeline(layers, device, **words):
    """Two stages as threads."""
    settings = {
        "balance": [2, len(layers) - 2],
        "schedule": "1f1b",
        "micro_batches": MICRO_BATCHES,
        "executor": "threads",
        "device": device,
        "loss": functional.cross_entropy,
        "optimizer": sgd,
    }
    return ps.Pipeline(nn.Sequential(*layers), **(settings | words))


def accumulated(layers, x, y, steps, loss=functional.cross_entropy):
    """Losses of one device that takes the same micro-batches one after the other; the layers are
    trained in place.
    """
    model = nn.Sequential(*layers)
    optimizer = sgd(model.parameters())
    losses = []
    for _ in range(steps):
        parts = []
        pairs = zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True)
        for inputs, targets in pairs:
            part = loss(model(inputs), targets)
            (part / MICRO_BATCHES).backward()
            parts.append(part.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(torch.stack(parts).mean()))
    return losses


def weights_of(layers):
    """All parameters and buffers in one row, on the CPU."""
    values = nn.Sequential(*layers).state_dict().values()
    return torch.cat([value.detach().double().cpu().flatten() for value in values])


@pytest.mark.parametrize("name", EXACT)
def test_a_pipeline_on_the_gpu_trains_as_accumulation_on_the_gpu_to_the_bit(cuda, name):
    """The law of every synchronous schedule, under deterministic algorithms and without TF32."""
    layers = [layer.to(cuda) for layer in layers_of()]
    plain = copy.deepcopy(layers)
    x, y = batch_on(cuda)
    pipe = pipeline(layers, cuda, **EXACT[name])
    for _ in range(3):
        pipe.train_batch(x, y)
    pipe.close()
    accumulated(plain, x, y, 3)
    assert torch.equal(weights_of(layers), weights_of(plain))


@pytest.mark.parametrize("schedule", ["chimera", "interleaved", "pipedream"])
def test_schedules_that_sum_otherwise_agree_with_the_cpu_in_float64(cuda, schedule):
    """Two copies, several stages per rank, several versions of weights: rounding alone may differ."""
    losses = []
    for device in (cuda, torch.device("cpu")):
        layers = [layer.to(device, torch.float64) for layer in layers_of()]
        x, y = batch_on(device)
        balance = [1, 1, 2, 1] if schedule == "interleaved" else [2, 3]
        pipe = pipeline(layers, device, schedule=schedule, balance=balance)
        losses.append([float(loss) for loss in pipe.train([(x.double(), y)] * 3)])
        pipe.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[0][0] != losses[0][-1]


def test_batch_norm_has_the_statistics_of_micro_batches(cuda):
    """Running statistics move once per micro-batch, in order."""
    layers = [layer.to(cuda) for layer in layers_of("batch norm")]
    plain = copy.deepcopy(layers)
    x, y = batch_on(cuda)
    pipe = pipeline(layers, cuda, schedule="gpipe")
    pipe.train_batch(x, y)
    pipe.close()
    accumulated(plain, x, y, 1)
    assert torch.equal(weights_of(layers), weights_of(plain))


def test_a_gpt_on_the_gpu_trains_as_accumulation(cuda):
    """Attention, layer norm and an embedding, whose backward adds by atomics unless it is told not
    to.
    """
    torch.manual_seed(0)
    model = gpt(layers=2, width=32, heads=2, tokens=16, vocabulary=64).double().to(cuda)
    layers = [model.embedding, *model.blocks, model.norm, model.head]
    plain = copy.deepcopy(layers)
    tokens = torch.randint(0, 64, (8, 17), device=cuda)
    x, y = tokens[:, :-1], tokens[:, 1:]
    pipe = pipeline(layers, cuda, balance=[2, 3], loss=gpt_loss)
    losses = [float(pipe.train_batch(x, y)) for _ in range(3)]
    pipe.close()
    assert losses == pytest.approx(accumulated(plain, x, y, 3, gpt_loss), rel=1e-6)
    assert torch.allclose(weights_of(layers), weights_of(plain), rtol=1e-9, atol=1e-12)


def test_recompute_draws_dropout_again_as_it_was(cuda):
    """The GPU's generator is seeded by layer and micro-batch; a recompute that drew anew would
    train to other numbers.
    """
    weights = []
    for recompute in ("never", "always"):
        layers = [layer.to(cuda) for layer in layers_of("dropout")]
        pipe = pipeline(layers, cuda, schedule="gpipe", recompute=recompute)
        x, y = batch_on(cuda)
        for _ in range(3):
            pipe.train_batch(x, y)
        pipe.close()
        weights.append(weights_of(layers))
    assert torch.equal(*weights)


def test_offload_brings_back_what_it_took_over_three_steps(cuda):
    """From the second step on host memory is used again: a copy that came back too late or too
    early would show.
    """
    weights = []
    for offload in (False, True):
        torch.manual_seed(0)
        layers = [
            nn.Linear(512, 512),
            nn.GELU(),
            nn.Linear(512, 512),
            nn.GELU(),
            nn.Linear(512, 10),
        ]
        layers = [layer.to(cuda) for layer in layers]
        torch.manual_seed(1)
        x = torch.randn(512, 512, device=cuda)
        y = torch.randint(0, 10, (512,), device=cuda)
        pipe = pipeline(layers, cuda, schedule="gpipe", offload=offload)
        for _ in range(3):
            pipe.train_batch(x, y)
        pipe.close()
        weights.append(weights_of(layers))
    assert torch.equal(*weights)


def test_an_overflow_skips_the_step_on_every_stage(cuda):
    """One verdict for all stages: half a step would be a wrong model."""
    layers = [layer.to(cuda) for layer in layers_of()]
    before = weights_of(layers)
    scaler = {"init_scale": 2.0**40}
    pipe = pipeline(layers, cuda, autocast=torch.float16, scaler=scaler)
    x, y = batch_on(cuda)
    pipe.train_batch(x, y)
    assert torch.equal(weights_of(layers), before)
    for _ in range(40):
        pipe.train_batch(x, y)
    pipe.close()
    assert not torch.equal(weights_of(layers), before)


def test_the_device_without_an_index_is_the_current_one(cuda):
    """CUDA's current device belongs to a thread, and ranks are threads: they have to have the
    caller's.
    """
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    with torch.cuda.device(last):
        layers = layers_of()
        pipe = pipeline(layers, "cuda")
        loss = pipe.train_batch(*batch_on("cpu"))
        places = {parameter.device for parameter in pipe.parameters()}
    pipe.close()
    assert places == {last}
    assert torch.isfinite(loss)


def test_without_a_device_a_pipeline_takes_the_gpu_that_is_there():
    """Never the CPU in silence."""
    pipe = pipeline(layers_of(), None, balance=[5], schedule="gpipe")
    pipe.train_batch(*batch_on("cpu"))
    kinds = {parameter.device.type for parameter in pipe.parameters()}
    pipe.close()
    assert kinds == {"cuda"}


def test_no_op_ends_before_it_begins_and_no_rank_is_busy_all_the_time_twice(cuda):
    """Times are those of events in the stream."""
    pipe = pipeline(layers_of(), cuda)
    x, y = batch_on(cuda)
    for _ in range(2):
        pipe.train_batch(x, y)
    timeline = pipe.timeline()
    pipe.close()
    assert all(event.start <= event.end for event in timeline.events)
    assert all(0 < seconds <= timeline.makespan for seconds in timeline.busy)


def test_fifty_steps_need_no_more_memory_than_the_first_ones(cuda):
    """What grows by a step's activations runs out of memory after an hour."""
    pipe = pipeline(layers_of(), cuda)
    x, y = batch_on(cuda)
    for _ in range(5):
        pipe.train_batch(x, y)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(cuda)
    for _ in range(50):
        pipe.train_batch(x, y)
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated(cuda)
    pipe.close()
    assert after == before


def test_a_steady_step_makes_the_host_wait_for_nothing(cuda):
    """By torch's own count: with the batch on the device, the host runs ahead by whole steps."""
    pipe = pipeline(layers_of(), cuda, loss=functional.mse_loss, clip_grad_norm=1.0)
    x = batch_on(cuda)[0]
    y = torch.randn(16, 10, device=cuda)
    for _ in range(4):
        pipe.train_batch(x, y)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = pipe.train_batch(x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pipe.close()
    assert torch.isfinite(loss)


def test_gradients_of_a_captured_batch_are_those_of_an_eager_one(cuda):
    """N14 on a GPU: all stages on one rank, in the caller's thread, as one CUDA graph."""
    layers = [layer.to(cuda) for layer in layers_of()]
    schedule = ps.Schedule.parse("rank 0 | 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 0U1 1U1")
    pipe = pipeline(
        layers, cuda, schedule=schedule, micro_batches=None, loss_weight=len, optimizer=None
    )
    x, y = batch_on(cuda)
    parameters = list(nn.Sequential(*layers).parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            pipe.train_batch(x, y, update=False)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pipe.train_batch(x, y, update=False)
    x.copy_(x.flip(0) * 2)
    gradients = []
    for run in (graph.replay, lambda: pipe.train_batch(x, y, update=False)):
        for parameter in parameters:
            parameter.grad.zero_()
        run()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))
    pipe.close()
    assert gradients[0].abs().max() > 0
    assert torch.equal(*gradients)


def test_two_processes_on_one_card_train_as_two_threads(cuda):
    """NCCL refuses two ranks on a card; their messages go through host memory."""
    expected = train_in_ranks("threads")
    assert expected[-1] < expected[0]
    losses, others = launch(train_in_ranks, 2, "processes", threads=1)
    assert losses == others
    # Processes of their own have not set deterministic algorithms.
    assert losses == pytest.approx(expected, rel=1e-6)


def train_in_ranks(executor):
    """Losses of three batches, in this rank, on the first card."""
    device = torch.device("cuda", 0)
    pipe = pipeline(layers_of(), device, executor=executor)
    x, y = batch_on(device)
    losses = [float(pipe.train_batch(x, y)) for _ in range(3)]
    pipe.close()
    return losses


def test_a_checkpoint_from_the_gpu_goes_on_there_and_under_another_cut(cuda, tmp_path):
    """Weights, momentum and step, by name."""
    x, y = batch_on(cuda)
    first = pipeline([layer.to(cuda) for layer in layers_of()], cuda)
    for _ in range(2):
        first.train_batch(x, y)
    first.save(tmp_path)
    expected = [float(first.train_batch(x, y)) for _ in range(2)]
    first.close()
    other = pipeline([layer.to(cuda) for layer in layers_of()], cuda, balance=[3, 2])
    other.load(tmp_path)
    losses = [float(other.train_batch(x, y)) for _ in range(2)]
    other.close()
    assert losses == expected


class Hungry(nn.Module):
    """Wants more memory than any card has, when it is told to."""

    hungry = False

    def forward(self, x):
        """The input, or an error of the allocator."""
        if self.hungry:
            torch.empty(2**50, dtype=torch.uint8, device=x.device)
        return x * 1


def test_out_of_memory_names_the_stage_and_the_op(cuda):
    """Which stage is too large is what a user has to know; and after the error the pipeline goes
    on.
    """
    layers = [nn.Linear(16, 32), nn.ReLU(), Hungry(), nn.ReLU(), nn.Linear(32, 10)]
    pipe = pipeline(layers, cuda)
    x, y = batch_on(cuda)
    pipe.train_batch(x, y)
    layers[2].hungry = True
    with pytest.raises(StageFailed, match=r"stage 1\) failed in .*F0.*out of memory"):
        pipe.train_batch(x, y)
    layers[2].hungry = False
    assert torch.isfinite(pipe.train_batch(x, y))
    pipe.close()


class Failing(nn.Module):
    """Raises in the forward of the micro-batch that it is told."""

    def __init__(self):
        super().__init__()
        self.calls_left = -1

    def forward(self, x):
        """The input, until it is time."""
        self.calls_left -= 1
        if self.calls_left == 0:
            raise ValueError("on purpose")
        return x * 1


def test_a_failure_in_the_middle_of_a_step_ends_it_on_all_stages_and_leaves_no_memory(cuda):
    """Work of other stages that is still queued on the GPU is let go as well."""
    layers = [nn.Linear(16, 32), nn.ReLU(), Failing(), nn.ReLU(), nn.Linear(32, 10)]
    pipe = pipeline(layers, cuda)
    x, y = batch_on(cuda)
    for _ in range(3):
        pipe.train_batch(x, y)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(cuda)
    layers[2].calls_left = 3
    with pytest.raises(RunError, match="on purpose"):
        pipe.train_batch(x, y)
    pipe.train_batch(x, y)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(cuda) <= before + 2**20
    pipe.close()


def test_pipe_on_one_gpu_has_the_gradients_of_the_plain_module(cuda):
    """All partitions on one card, with and without recompute."""
    x, y = batch_on(cuda)
    plain = nn.Sequential(*layers_of()).double().to(cuda)
    functional.cross_entropy(plain(x.double()), y).backward()
    for checkpoint in ("never", "except_last", "always"):
        module = nn.Sequential(*layers_of()).double()
        pipe = ps.Pipe(module, [2, 3], devices=[cuda] * 2, chunks=4, checkpoint=checkpoint)
        functional.cross_entropy(pipe(x.double()), y).backward()
        pairs = zip(pipe.parameters(), plain.parameters(), strict=True)
        assert all(torch.allclose(one.grad, other.grad, rtol=1e-9) for one, other in pairs)
