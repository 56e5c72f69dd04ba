"""`penstock study scale`: GPT models of 18 billion to a trillion parameters on up to 10,240 GPUs,
simulated and compared with published throughputs.

Source of configurations and throughputs: Narayanan et al. 2021, Efficient large-scale language
model training on GPU clusters using Megatron-LM (arXiv 2104.04473), table 1; operations by its
equation 3, bytes of pipeline messages by its section 4.1.

Tensor parallelism within a node is not simulated: a group of `tensor` GPUs is one device whose rate
is that of the group. That rate is one constant, fitted to the largest configuration; all other rows
are predictions, too high where the products of small models are less efficient.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.report.document import (
    Chart,
    Column,
    Page,
    Report,
    Section,
    Series,
    Table,
    Text,
    Value,
)
from penstock.search.schedules import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.entry import simulate
from penstock.study.catalogue import register
from penstock.study.cell import Cell, options
from penstock.study.records import Outcome, Record
from penstock.study.settings import Settings
from penstock.study.tables import reason_of

STUDY = "scale"
_SEQUENCE, _VOCABULARY = 2048, 51_200
#: FLOP/s of a GPU inside a stage, tensor parallelism included. Fitted: with it, interleaved 1F1B
#: with two stages per rank takes the published 163 TFLOP/s a GPU at 1,008 billion parameters.
RATE = 183.8e12
#: Bytes per second of a GPU's InfiniBand card (HDR, 200 Gb/s), and latency of a message.
_NETWORK_BYTES_PER_S, _LATENCY_S = 25e9, 10e-6
#: Bytes per second of a GPU's memory, for the optimizer's update (A100, 80 GB).
_MEMORY_BYTES_PER_S = 1.9e12
#: Bytes per parameter that Adam in mixed precision reads and writes in an update.
_UPDATE_BYTES = 44


@dataclass(frozen=True)
class Configuration:
    """A row of the published table.

    Attributes:
        name: billions of parameters.
        layers, hidden: of the model; the sequence has 2,048 tokens.
        tensor, pipeline: GPUs that share a layer, and stages.
        gpus: in all.
        batch: samples per step.
        published: TFLOP/s of a GPU; None: the configuration was not published.
    """

    name: str
    layers: int
    hidden: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    published: float | None

    @property
    def replicas(self) -> int:
        """Data parallelism: number of pipelines."""
        return self.gpus // (self.tensor * self.pipeline)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one sample in each pipeline."""
        return self.batch // self.replicas

    @property
    def parameters(self) -> float:
        """Number of parameters, by equation 2 of the paper."""
        h, layers = self.hidden, self.layers
        return (
            12 * layers * h**2 * (1 + 13 / (12 * h) + (_VOCABULARY + _SEQUENCE) / (12 * layers * h))
        )

    @property
    def step_flops(self) -> float:
        """Operations of a step with recomputed activations, by equation 3 of the paper."""
        h, layers = self.hidden, self.layers
        factor = 1 + _SEQUENCE / (6 * h) + _VOCABULARY / (16 * layers * h)
        return 96 * self.batch * _SEQUENCE * layers * h**2 * factor


CONFIGURATIONS = (
    Configuration("18.4", 40, 6144, 8, 1, 256, 1024, 135),
    Configuration("39.1", 48, 8192, 8, 2, 512, 1536, 138),
    Configuration("76.1", 60, 10240, 8, 4, 1024, 1792, 140),
    Configuration("145.6", 80, 12288, 8, 8, 1536, 2304, 148),
    Configuration("310.1", 96, 16384, 8, 16, 1920, 2160, 155),
    Configuration("529.6", 105, 20480, 8, 35, 2520, 2520, 163),
    Configuration("1008.0", 128, 25600, 8, 64, 3072, 3072, 163),
    Configuration("174.6", 96, 12288, 8, 12, 1536, 1536, None),
    Configuration("1008.0", 128, 25600, 8, 64, 10240, 10240, None),
)
_SCHEDULES = {
    "small": ("1f1b", "interleaved", "zb-h1"),
    "full": ("gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v", "dualpipe-v"),
}
_TWO_STAGES = ("interleaved", "breadth-first", "zb-v", "dualpipe-v")


def measure(cell: Cell, folder: Path) -> Outcome:
    """Simulate one pipeline of the cell's configuration, and add the all-reduce between replicas.

    The pipelines of a job are equal, so that one of them takes the time of all.

    Raises:
        PenstockError: the schedule does not support these numbers.
    """
    del folder
    configuration = _configuration(cell)
    per_rank = 2 if cell.schedule in _TWO_STAGES else 1
    more: dict[str, Any] = (
        {"chunks": 2} if cell.schedule in ("interleaved", "breadth-first") else {}
    )
    stages = per_rank * configuration.pipeline
    started = time.perf_counter()
    timeline = simulate(
        schedule(cell.schedule, stages, cell.micro_batches, **more), _costs(configuration, stages)
    )
    step_s = timeline.makespan + all_reduce_s(configuration)
    return Outcome(
        seconds=(step_s,),
        extra={
            "bubble_ratio": timeline.bubble_ratio,
            "pipeline_s": timeline.makespan,
            "all_reduce_s": all_reduce_s(configuration),
            "peak_in_flight": max(timeline.peak_in_flight),
            "simulation_s": time.perf_counter() - started,
        },
    )


def _costs(configuration: Configuration, stages: int) -> Costs:
    """Return the seconds of the ops of equal stages; the head is on the last stage.

    A layer's forward takes a quarter of equation 3: backward takes two and recompute one.
    """
    c = configuration
    rate = RATE * c.tensor
    layer_flops = 24 * _SEQUENCE * c.hidden**2 * (1 + _SEQUENCE / (6 * c.hidden))
    head_flops = 2 * _SEQUENCE * c.hidden * _VOCABULARY
    layer_s = c.layers / stages * layer_flops / rate
    last_s = layer_s + head_flops / rate
    forward = [layer_s] * (stages - 1) + [last_s]
    # The head is not recomputed.
    input_grad = [2 * layer_s] * (stages - 1) + [2 * layer_s + head_flops / rate]
    # What crosses a boundary in fp16 is scattered over the GPUs of a tensor-parallel group, each of
    # which sends its part through its own network card.
    message_bytes = 2 * _SEQUENCE * c.hidden / c.tensor
    weights = c.parameters / (c.pipeline * c.tensor)
    return Costs(
        forward=forward,
        backward=[grad + first for grad, first in zip(input_grad, forward, strict=True)],
        input_grad=input_grad,
        weight_grad=forward,
        update=_UPDATE_BYTES * weights * c.pipeline / stages / _MEMORY_BYTES_PER_S,
        transfer=_LATENCY_S + message_bytes / _NETWORK_BYTES_PER_S,
    )


def all_reduce_s(configuration: Configuration) -> float:
    """Return the seconds of the ring all-reduce of a rank's fp16 gradients between replicas.

    Not overlapped with the backward, as in the published version.
    """
    replicas = configuration.replicas
    gradient_bytes = 2 * configuration.parameters / (configuration.pipeline * configuration.tensor)
    return 2 * (replicas - 1) / replicas * gradient_bytes / _NETWORK_BYTES_PER_S


def _configuration(cell: Cell) -> Configuration:
    """Return the configuration that a cell measures."""
    return CONFIGURATIONS[int(str(cell.option("configuration")))]


@register(
    STUDY,
    about="What do schedules give at a trillion parameters and 10,000 GPUs, simulated?",
    measure=measure,
    limit_s=120.0,
)
class Scale:
    """Published configurations of Megatron-LM, and larger ones, under several schedules."""

    def cells(self, settings: Settings) -> list[Cell]:
        """Return a cell per configuration and schedule. Simulation is deterministic."""
        cells = []
        for index, configuration in enumerate(CONFIGURATIONS):
            for name in _SCHEDULES[settings.scale]:
                cells.append(
                    Cell(
                        STUDY,
                        "simulated",
                        name,
                        stages=configuration.pipeline,
                        micro_batches=configuration.micro_batches,
                        batch=configuration.batch,
                        options=options(
                            configuration=index,
                            billions=configuration.name,
                            gpus=configuration.gpus,
                        ),
                    )
                )
        return cells

    def report(self, settings: Settings, records: Sequence[Record]) -> Report:
        """Return the table and a chart."""
        rows = tuple(_row(record) for record in records)
        table = Table("scale", "Throughput", _COLUMNS, rows, _CAPTION, ("records.jsonl",))
        sections = (Section("Throughput of a GPU", (Text(_METHOD), table, _chart(records))),)
        command = f"penstock study {STUDY} --scale {settings.scale}"
        title = "GPT models on up to 10,240 GPUs, simulated"
        return Report(title, (Page(STUDY, title, sections, command, _summary(records)),))


_METHOD = (
    "One pipeline is simulated op by op; the all-reduce between pipelines follows it. Stages are "
    f"equal but for the head. A GPU computes {RATE / 1e12:.0f} TFLOP/s inside a stage, tensor "
    "parallelism included: one constant, fitted to interleaved 1F1B at 1,008 billion parameters on "
    "3,072 GPUs. All other rows are predictions."
)
_CAPTION = (
    "Operations are counted with recompute, as in the paper. The published rows are of "
    "Megatron-LM's interleaved schedule."
)
_COLUMNS = (
    Column("parameters, billions", "number", 1),
    Column("GPUs", "number", 0),
    Column("schedule"),
    Column("S", "number", 0, "ranks of a pipeline"),
    Column("pipelines", "number", 0, "data parallelism"),
    Column("M", "number", 0, "micro-batches of each pipeline"),
    Column("step", "seconds"),
    Column("bubble", "percent", 1),
    Column("TFLOP/s a GPU", "number", 0, "simulated"),
    Column("published", "number", 0, "TFLOP/s a GPU, Narayanan et al. 2021, table 1"),
    Column("simulated in", "seconds"),
    Column("note"),
)


def throughput(record: Record) -> float:
    """Return the TFLOP/s of a GPU."""
    configuration = _configuration(record.cell)
    return configuration.step_flops / record.outcome.seconds[0] / configuration.gpus / 1e12


def _row(record: Record) -> tuple[Value, ...]:
    """Return the row of a simulated configuration, beside its published figure."""
    cell, configuration, extra = record.cell, _configuration(record.cell), record.outcome.extra
    return (
        float(configuration.name),
        configuration.gpus,
        cell.schedule,
        cell.stages,
        configuration.replicas,
        cell.micro_batches,
        record.outcome.seconds[0] if record.ok else None,
        extra.get("bubble_ratio"),
        throughput(record) if record.ok else None,
        configuration.published if cell.schedule == "interleaved" else None,
        extra.get("simulation_s"),
        reason_of([record]),
    )


def _chart(records: Sequence[Record]) -> Chart:
    """Return simulated and published throughput over the number of GPUs."""
    points: dict[str, dict[int, float]] = {}
    for record in records:
        configuration = _configuration(record.cell)
        if record.ok and configuration.published is not None:
            points.setdefault(record.cell.schedule, {})[configuration.gpus] = throughput(record)
            points.setdefault("published", {})[configuration.gpus] = configuration.published
    series = []
    for name, by_gpus in points.items():
        gpus = sorted(by_gpus)
        series.append(Series(name, tuple(map(float, gpus)), tuple(by_gpus[n] for n in gpus)))
    return Chart(
        "scale-chart",
        "Throughput of a GPU",
        "GPUs",
        "TFLOP/s",
        tuple(series),
        log_x=True,
        caption="Published: Narayanan et al. 2021, table 1.",
    )


def _summary(records: Sequence[Record]) -> tuple[str, ...]:
    """Return the largest deviation from the published rows, and the fastest schedule at the top."""
    sentences = []
    deviations = []
    for record in records:
        published = _configuration(record.cell).published
        if record.ok and published and record.cell.schedule == "interleaved":
            deviations.append((throughput(record) / published - 1, record))
    if deviations:
        worst, record = max(deviations, key=lambda pair: abs(pair[0]))
        sentences.append(
            f"Simulated throughput deviates from {len(deviations)} published values by at most "
            f"{abs(worst):.0%}, at {record.cell.option('billions')} billion parameters."
        )
    largest = [record for record in records if record.ok and record.cell.option("gpus") == 10_240]
    if largest:
        best = max(largest, key=throughput)
        sentences.append(
            f"On 10,240 GPUs {best.cell.schedule} is the fastest: {throughput(best):.0f} TFLOP/s a "
            "GPU."
        )
    return tuple(sentences)
