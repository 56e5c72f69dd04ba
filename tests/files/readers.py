"""Every reader of files, with a valid file for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.files.folder_readers import FOLDER_READERS
from tests.study.grid_text import GRID

from penstock.checkpoint.checkpoint_files import read_header, write_file
from penstock.checkpoint.checkpoint_index import Checkpoint, read_index
from penstock.cli.flags.flag_values import named_values
from penstock.cluster.cluster import cluster
from penstock.errors import FileError, PenstockError
from penstock.explore.state import State, parse_state
from penstock.explore.uploads import state_of_files
from penstock.plan.plan import Plan
from penstock.plan.prediction import Candidate, Prediction
from penstock.profile.counts import LayerCounts, ModelCounts, Work
from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.report.metrics_file import read_metrics
from penstock.report.outcome import Outcome, read_outcome
from penstock.report.timeline_file import load_timeline, save_timeline
from penstock.schedule.catalogue import schedule
from penstock.schedule.torch_csv.files import load_csv, to_csv
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule as simulate
from penstock.study.convergence.experiment import Case, Group
from penstock.study.convergence.records import Measured, Record, RecordFile
from penstock.study.grid import grid_entry
from penstock.training.config import TrainConfig
from penstock.training.run_checkpoints import take_request
from penstock.training.sources.user_settings import load_settings as load_config

STEP_FILE = "step-00000001-stage-0000-0123456789abcdef.safetensors"
NODES = """
name: mixed
nodes:
  - {count: 2, devices: [{name: A100, count: 4}], inside: NVLink}
  - devices:
      - {name: slow A100, like: A100, memory: 30 GB, launch: 20 us, together: 1.1}
      - {name: old, memory: 8 GB, flops: {float32: 8 TFLOP/s}, memory_bandwidth: 320 GB/s}
    inside: {like: PCIe3, shared: true, latency: 2 us, bandwidth: 10 Gb/s}
  - devices: [{name: board, kind: fpga, memory: 4 GB, dsp: 6840, clock: 200 MHz, on_chip: 43 MB}]
between: 25GbE
node_of: [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3]
"""
UNIFORM = """
name: lab
devices_per_node: 2
devices:
  - {name: V100, count: 2}
  - {name: old, memory: 12 GB, kind: gpu, count: 2}
inside: PCIe3
between: {latency: 30 us, bandwidth: 10 Gb/s, source: measured}
"""


def plan_of(name: str, **options: Any) -> Plan:
    """A plan of two stages."""
    pipeline = schedule(name, 2, 4, **options)
    stream = pipeline.stream
    candidate = Candidate(name, 2, 4, "never", (2, 1), 0.5, 2000, "compute of stage 1")
    return Plan(
        "abc",
        ("stem", "body", "head"),
        (2, 1),
        pipeline.name,
        pipeline.lines,
        pipeline.micro_batches,
        16,
        "local:2",
        4,
        Prediction(0.5, 0.2, (1000, 2000), 32.0, 0.9),
        pipeline.options,
        synchronous=stream is None,
        stream=stream,
        slicing=pipeline.slicing,
        weights="flush" if stream is None else stream.weights,
        candidates=(candidate,),
        memory_limits=(10**9, 10**9),
    )


def profile() -> Profile:
    """A profile of one layer."""
    timing = Timing((1, 2), (1.0, 2.0), (0.1, 0.1))
    layer = LayerProfile("stem", "Conv2d", timing, timing, timing, timing, 100, 400, 8, 64.5, 16.0)
    return Profile((layer,), "0123456789ab", 12.0, 2, {"cpu": "test"}, "2.13")


def counts() -> ModelCounts:
    """The counts of one layer."""
    work = Work("addmm", "matrix", 2, 10.0, 100.0, 40.0, 8.0)
    layer = LayerCounts("fc", "Linear", (work,), (work, work), (work,), (), 12, 48, 0, 20.0, 4.0)
    return ModelCounts((layer,), "0123456789ab", 16.0, 12.0, 32)


def record_lines() -> bytes:
    """A file of a study."""
    case = Case("digits", "stash", "pipedream", 2, 1, "sgd", 0.01, 3, 0, (("decay", 0.5),))
    lines = [
        {"record": asdict(Record(case, (2.3, 2.2, 2.1), 0.4, 0.8))},
        {"measured": asdict(Measured(Group("digits", "sgd", "stash", 2, 1), 0.01))},
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def saved(value: Any) -> Callable[[Path], bytes]:
    """What `save` writes of a value."""

    def content(folder: Path) -> bytes:
        value.save(folder / "saved")
        return (folder / "saved").read_bytes()

    return content


def index_of(folder: Path) -> bytes:
    """The index of a checkpoint of version 0.1, which has no checksum."""
    del folder
    index = Checkpoint(3, "abc", (STEP_FILE,), {"scale": 2.0, "steps": 1.0}, ("{}",), 1)
    return json.dumps(asdict(index)).encode()


def tensors_of(folder: Path) -> bytes:
    """A file of tensors with an optimizer's state."""
    torch = pytest.importorskip("torch")
    facts = {"0.weight": {"options": {"lr": 0.1}, "state": {"step": 3.0}, "group": 0}}
    metadata = {"optimizer": json.dumps(facts), "identity": "x", "step": "3"}
    write_file(folder / STEP_FILE, {"model/0.weight": torch.ones(2, 3)}, metadata)
    return (folder / STEP_FILE).read_bytes()


def load_index(path: Path) -> object:
    """Read the file as the index of a checkpoint."""
    (path.parent / "checkpoint.json").write_bytes(path.read_bytes())
    return read_index(path.parent)


def load_tensors(path: Path) -> object:
    """Read the header of the file, and the state in it."""
    name = STEP_FILE
    path.rename(path.parent / name)
    header = read_header(path.parent, name, Checkpoint(3, "abc", (name,), schema=1))
    try:
        return header, header.facts
    except ValueError as error:  # the caller adds the name of the file
        raise FileError(str(error)) from error


def load_records(path: Path) -> object:
    """Read the file as the records of a study."""
    path.rename(path.parent / "records.jsonl")
    return RecordFile(path.parent).records


def timeline_of(folder: Path) -> bytes:
    """The file of a timeline."""
    timeline = simulate(schedule("1f1b", 2, 2), Costs(forward=[1.0, 2.0], activation_bytes=8.0))
    save_timeline(timeline, folder / "saved")
    return (folder / "saved").read_bytes()


def outcome() -> bytes:
    """The outcome of a run."""
    result = Outcome(
        "runs/a",
        3,
        0.5,
        0.6,
        0.9,
        0.1,
        0.2,
        0.3,
        0.4,
        (100, 200),
        (300,),
        9.5,
        one_thread_step_s=0.3,
    )
    return json.dumps(asdict(result)).encode()


def metrics() -> bytes:
    """The metrics of a run of two steps."""
    lines = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.0}, {"step": 2, "epoch": 1}]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def load_upload(path: Path) -> object:
    """Read the file as one that is opened in the page of `penstock explore`."""
    return state_of_files(State(), [("plan", path.read_bytes().decode(errors="surrogateescape"))])


def load_query(path: Path) -> object:
    """Read the file as the query of a link to that page."""
    return parse_state(path.read_bytes().decode(errors="surrogateescape"))


def load_request(path: Path) -> object:
    """Read the file as the request for another number of ranks."""
    path.rename(path.parent / "resize.json")
    return take_request(path.parent)


def load_values(path: Path) -> object:
    """Read the file as the value of an option of the command line."""
    text = path.read_bytes().decode(errors="surrogateescape").replace("\0", "")
    return named_values("option", [f"name={text}"])


@dataclass(frozen=True)
class Reader:
    """A kind of files.

    Attributes:
        content: returns a valid file; it may use a folder.
        load: reads a path.
        parse: returns the plain values of the content; None if it is no tree of values.
    """

    content: Callable[[Path], bytes]
    load: Callable[[Path], object]
    parse: Callable[[bytes], Any] | None = json.loads


READERS = {
    "cluster of nodes": Reader(lambda _: NODES.encode(), cluster, yaml.safe_load),
    "uniform cluster": Reader(lambda _: UNIFORM.encode(), cluster, yaml.safe_load),
    "plan": Reader(saved(plan_of("zb-h1")), Plan.load),
    "asynchronous plan": Reader(saved(plan_of("pipedream")), Plan.load),
    "profile": Reader(saved(profile()), Profile.load),
    "counts": Reader(saved(counts()), ModelCounts.load),
    "configuration": Reader(
        lambda _: TrainConfig(model_options={"layers": 2}, weights="stash").as_yaml().encode(),
        lambda path: load_config(path, {}),
        yaml.safe_load,
    ),
    "option": Reader(lambda _: b"{layers: [1, 2.5, x]}", load_values, yaml.safe_load),
    "study": Reader(lambda _: GRID.encode(), grid_entry, yaml.safe_load),
    "timeline": Reader(timeline_of, load_timeline),
    "outcome": Reader(lambda _: outcome(), read_outcome),
    "metrics": Reader(lambda _: metrics(), read_metrics, None),
    "upload": Reader(saved(plan_of("1f1b")), load_upload),
    "query": Reader(lambda _: State().query.encode(), load_query, None),
    "request": Reader(lambda _: b'{"ranks": 3}', load_request),
    "records": Reader(lambda _: record_lines(), load_records, None),
    "index": Reader(index_of, load_index),
    "tensors": Reader(tensors_of, load_tensors, None),
    "torch's CSV": Reader(
        lambda _: to_csv(schedule("1f1b", 4, 4), communication=True).encode(),
        load_csv,
        None,
    ),
    **{kind: Reader(*parts) for kind, parts in FOLDER_READERS.items()},
}


def run(reader: Reader, content: bytes, folder: Path) -> str | None:
    """Read a content; return the message with which it is refused."""
    path = folder / "file.yaml"
    path.write_bytes(content)
    try:
        str(reader.load(path))
    except PenstockError as error:
        return str(error)
    finally:
        for file in folder.iterdir():
            file.unlink()
    return None
