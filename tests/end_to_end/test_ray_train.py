"""The example for Ray Train, on a local Ray cluster of two nodes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="needs ray[train]")
pytest.importorskip("ray.train.torch", reason="needs ray[train]")

EXAMPLE = Path(__file__).parents[2] / "examples" / "clusters" / "ray_train.py"


def load_example():
    """Import the example under a name that its pickled function does not refer to."""
    spec = importlib.util.spec_from_file_location("ray_train_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)
    return module


def test_two_nodes_train_with_one_stage_each(tmp_path):
    """Ray connects the workers; the last loss is lower, and the weights are those of all stages."""
    from ray.cluster_utils import Cluster
    from safetensors.torch import load_file

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        nodes.add_node(num_cpus=1)
        ray.init(address=nodes.address)
        first = load_example().train(2, 1, str(tmp_path / "one"))
        third = load_example().train(2, 3, str(tmp_path / "three"))
        assert third.metrics["epoch"] == 2
        assert third.metrics["loss"] < first.metrics["loss"]
        with third.checkpoint.as_directory() as folder:
            weights = load_file(Path(folder) / "weights.safetensors")
        assert sorted(weights) == [
            f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("bias", "weight")
        ]
    finally:
        ray.shutdown()
        nodes.shutdown()
