"""`penstock verify --train`: a model of the zoo through a pipeline and through plain training."""

from __future__ import annotations

import json

import pytest

import penstock as ps
from penstock.stage.stage import Stage
from penstock.training.config import TrainConfig
from penstock.training.task import make_task
from penstock.transport.payload import Payload

MLP = ("verify", "--train", "mlp", "--threads", "--batch", "8")


def test_a_sound_pipeline_agrees_and_says_on_what(penstock):
    """The self-check for who has no script yet."""
    result = penstock(*MLP, "--schedule", "zb-h1", "--stages", 3, "--micro-batches", 4)
    assert result.status == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].startswith(
        "pipeline against one device: 16 gradients, 0 buffers, 1 output and the loss; largest relative difference "
    )
    assert lines[-1] == "mlp on 3 ranks trains as one device does: tolerance 0.001"


@pytest.mark.parametrize("executor", [(), ("--threads",)])
def test_more_stages_than_layers_are_refused_before_a_rank_is_started(penstock, executor):
    """Ninety-nine processes that all find out would take minutes to say so."""
    result = penstock("verify", "--train", "mlp", "--stages", 99, *executor)
    assert result.status == 2
    assert "mlp has 15 layers, which make at most as many stages, not 99" in result.err


def test_a_wrong_gradient_is_exit_status_1(penstock, monkeypatch):
    """A check that cannot fail is none; scripts ask for the status."""
    right = Stage.backward

    def wrong(self, batch, micro_batch, arrived):
        sent = right(self, batch, micro_batch, arrived)
        return Payload.flat([leaf * 1.1 for leaf in sent.leaves]) if self.index == 1 else sent

    monkeypatch.setattr(Stage, "backward", wrong)
    result = penstock(*MLP, "--json")
    assert result.status == 1
    content = json.loads(result.out)
    assert (content["agrees"], content["ranks"], content["tolerance"]) == (False, 2, 0.001)
    assert content["relative"] > 0.05
    assert max(content["gradients"], key=content["gradients"].get).startswith("fc")
    assert "NOT as one device does" in penstock(*MLP).out


def test_options_of_the_model_and_of_training_go_along(penstock):
    """What will be trained is what should be checked."""
    words = (
        "--model-option",
        "layers=2",
        "--model-option",
        "width=16",
        "--model-option",
        "heads=2",
        "--recompute",
        "always",
        "--autocast",
        "bfloat16",
    )
    result = penstock("verify", "--train", "gpt", "--threads", "--batch", "8", *words)
    assert result.status == 0, result.err
    assert "29 gradients" in result.out


def test_a_plan_is_checked_as_it_is(penstock, tmp_path):
    """The cut, the schedule and the recomputation that will be run."""
    task = make_task(TrainConfig(model="mlp", data="digits"))
    profile = ps.profile(task.model, task.example()[:8], batch=8, sizes=[4, 8], repeats=1)
    plan = tmp_path / "plan.json"
    ps.plan(
        profile, ps.cluster("local:2"), batch=8, stages=2, schedules=["1f1b"], micro_batches=2
    ).save(plan)
    result = penstock(*MLP, "--plan", plan)
    assert result.status == 0, result.err
    assert "as one device does" in result.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tolerance", 0), "--tolerance must be above 0 and finite, not 0.0"),
        (("--tolerance", "inf"), "--tolerance must be above 0 and finite, not inf"),
        (("--stages", 0), "1f1b needs at least 1 of stages and got 0"),
        (("--micro-batches", 0), "1f1b needs at least 1 of micro-batches and got 0"),
        (("--in-flight-limit", 2), "--in-flight-limit does not go with --train"),
        (
            ("--plan", "plan.json", "--schedule", "gpipe"),
            "--schedule does not go with --plan, which contains its schedule",
        ),
        (("--train", "mlpp"), "no model called 'mlpp'. Did you mean 'mlp'?"),
        (("--autocast", "float8"), "autocast: Input should be 'bfloat16' or 'float16'"),
    ],
)
def test_wrong_words_are_exit_status_2(penstock, words, message):
    """As everywhere on the command line."""
    result = penstock(*MLP, *words)
    assert result.status == 2
    assert message in result.err
