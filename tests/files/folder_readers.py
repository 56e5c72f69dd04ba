"""Readers of folders: of runs, and of weights in the formats of others. One file is damaged."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import torch
import yaml
from torch import Tensor

from penstock.checkpoint.checkpoint_files import write_file
from penstock.checkpoint.checkpoint_index import INDEX, Checkpoint
from penstock.checkpoint.weight_files import load_weights, save_weights
from penstock.cluster.cluster import cluster
from penstock.cluster.write import yaml_of
from penstock.plan.plan import Plan
from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.report.html import write_html
from penstock.report.outcome import Outcome
from penstock.report.run_folder import CLUSTER, CONFIG, METRICS, OUTCOME, PLAN, PROFILE, TIMELINE
from penstock.report.run_report import plan_report, run_report
from penstock.report.timeline_file import save_timeline
from penstock.search.catalogue import plan
from penstock.simulate.plan_costs import simulate_plan
from penstock.training.config import TrainConfig
from penstock.training.data.batches import Dataset
from penstock.training.plan_file import load_plan
from penstock.training.resume import drop_later_metrics, resume_settings
from penstock.training.run_checkpoints import SINGLE_CHECKPOINT
from penstock.training.sources.hugging_face import make_model

#: The file of the only stage of the run's checkpoint, of version 0.1.
STAGE_FILE = "step-00000002-stage-0000-0123456789abcdef.safetensors"

#: Weights of a model of two layers.
WEIGHTS = {"0.weight": torch.ones(2, 3), "0.bias": torch.zeros(2), "1.weight": torch.ones(1, 2)}

#: A model of the transformers library as small as possible.
HUGGING_FACE = {
    "model_type": "gpt2",
    "vocab_size": 16,
    "n_positions": 8,
    "n_embd": 4,
    "n_layer": 1,
    "n_head": 2,
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "tie_word_embeddings": True,
}


@cache
def run_files() -> dict[str, bytes]:
    """The files of a run of two steps, by name."""
    timing = Timing((1, 2), (1.0, 2.0), (0.1, 0.1))
    costs = (timing, timing, timing, timing, 100, 400, 8, 64.5, 16.0)
    layers = tuple(LayerProfile(name, "Linear", *costs) for name in ("stem", "body", "head"))
    profile = Profile(layers, "0123456789ab", 12.0, 4, {"cpu": "test"}, "2.13")
    local = cluster("local:2")
    chosen = plan(profile, local, 4, stages=2, schedules=["1f1b"], micro_batches=2)
    timeline = simulate_plan(chosen, profile, local)
    outcome = Outcome(
        *("runs/a", 2, 0.5, 0.6, 0.9, 0.1, 0.2, 0.3, 0.4, (100, 200), (300, 300), 9.5),
        one_thread_step_s=0.3,
    )
    lines = [{"step": 1, "loss": 2.5, "step_s": 0.1}, {"step": 2, "loss": 2.0}]
    lines.append({"step": 2, "epoch": 1, "test_loss": 0.6, "busy": [0.5, 0.6]})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen.save(folder / PLAN)
        profile.save(folder / PROFILE)
        save_timeline(timeline, folder / TIMELINE)
        (folder / CLUSTER).write_text(yaml_of(local))
        (folder / CONFIG).write_text(TrainConfig(out="runs/a").as_yaml())
        (folder / OUTCOME).write_text(json.dumps(asdict(outcome)))
        (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def in_run(name: str, read: Callable[[Path], object], path: Path) -> object:
    """Read the folder of a run in which the file stands in the place of another one."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for other, content in run_files().items():
            (folder / other).write_bytes(content)
        (folder / SINGLE_CHECKPOINT).mkdir()
        index = Checkpoint(2, "abc", (STAGE_FILE,), schema=1)
        write_file(folder / SINGLE_CHECKPOINT / STAGE_FILE, WEIGHTS, {})
        (folder / SINGLE_CHECKPOINT / INDEX).write_text(json.dumps(asdict(index)))
        (folder / name).write_bytes(path.read_bytes())
        return read(folder)


def report_of_run(folder: Path) -> None:
    """Write the report of a run, as `penstock report` does."""
    write_html(run_report(folder), folder / "report.html")


def report_of_plan(path: Path) -> None:
    """Write the report of a plan's file."""
    write_html(plan_report(path), path.with_suffix(".html"))


def resumed(folder: Path) -> object:
    """Return the settings of a run that is resumed."""
    return resume_settings(folder, {"lr": 0.01})


def run_file(name: str, folder: Path) -> bytes:
    """Return the content of a file of a run."""
    del folder
    return run_files()[name]


def fingerprint() -> str:
    """Return the fingerprint of the model of the run."""
    return Plan.parse(run_files()[PLAN].decode(), PLAN).fingerprint


def weights_as(format_name: str, name: str, folder: Path) -> bytes:
    """Return the content of a file of weights in a format."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        target = Path(temporary) / "weights"
        save_weights(WEIGHTS, target, format_name)
        return (target / name if name else target).read_bytes()


def shard_index(folder: Path) -> bytes:
    """Return the index of a model in two files."""
    del folder
    weight_map = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(WEIGHTS)}
    return json.dumps({"metadata": {"total_size": 44}, "weight_map": weight_map}).encode()


def load_as(file: str, path: Path) -> object:
    """Read the file as a file of weights of a name."""
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary) / file
        target.write_bytes(path.read_bytes())
        return load_weights(target)


def load_in_folder(format_name: str, file: str, path: Path) -> object:
    """Read a folder of weights in a format in which the file stands in the place of another one."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "weights"
        save_weights(WEIGHTS, folder, format_name)
        (folder / file).write_bytes(path.read_bytes())
        return load_weights(folder)


def load_shards(path: Path) -> object:
    """Read a model in two files with the file as its index."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number in range(2):
            tensors: dict[str, Tensor] = dict(list(WEIGHTS.items())[number::2])
            save_weights(tensors, folder / f"model-{number}.safetensors")
        (folder / "model.safetensors.index.json").write_bytes(path.read_bytes())
        return load_weights(folder)


def load_hugging_face(path: Path) -> object:
    """Make the model of a config.json."""
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    data = Dataset("text", tokens, tokens, tokens, tokens, 16, "next_token", "text")
    with torch.device("meta"):
        return type(make_model(str(path), data, {}))


def reports() -> dict[str, tuple[Callable[[Path], bytes], Callable[[Path], object], object]]:
    """By kind: content, reader and parser of the files that the report of a run reads."""
    parsers = {CONFIG: yaml.safe_load, CLUSTER: yaml.safe_load, METRICS: None}
    return {
        f"report: {name}": (
            partial(run_file, name),
            partial(in_run, name, report_of_run),
            parsers.get(name, json.loads),
        )
        for name in (CONFIG, CLUSTER, METRICS, OUTCOME, PLAN, PROFILE, TIMELINE)
    }


#: By kind: a valid file, its reader, and the parser of its values; None if it is no tree.
FOLDER_READERS = {
    **reports(),
    "report of a plan": (partial(run_file, PLAN), report_of_plan, json.loads),
    "plan of a run": (
        partial(run_file, PLAN),
        lambda path: load_plan(str(path), fingerprint()),
        json.loads,
    ),
    "settings of a run": (
        partial(run_file, CONFIG),
        partial(in_run, CONFIG, resumed),
        yaml.safe_load,
    ),
    "metrics of a run": (
        partial(run_file, METRICS),
        partial(in_run, METRICS, lambda folder: drop_later_metrics(folder, 1)),
        None,
    ),
    "safetensors": (
        partial(weights_as, "safetensors", ""),
        partial(load_as, "w.safetensors"),
        None,
    ),
    "state_dict": (partial(weights_as, "state-dict", ""), partial(load_as, "w.pt"), None),
    "index of shards": (shard_index, load_shards, json.loads),
    "metadata of DCP": (
        partial(weights_as, "dcp", ".metadata"),
        partial(load_in_folder, "dcp", ".metadata"),
        None,
    ),
    "config.json": (
        lambda _: json.dumps(HUGGING_FACE).encode(),
        load_hugging_face,
        json.loads,
    ),
}
