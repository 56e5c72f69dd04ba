"""Checkpoints: training resumes to the bit under any other cut, and incomplete checkpoints are
refused.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conformance.models import CASES, lengths_of, made
from tests.conformance.reference import PlainTraining, differences, gradients, layers_of
from torch import nn

import penstock as ps
from penstock.checkpoint import checkpoint_files
from penstock.errors import FileError, SettingError

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "adam on two groups": lambda params: torch.optim.AdamW(
        [
            {"params": [p for p in params if p.dim() > 1], "lr": 0.02},
            {"params": [p for p in params if p.dim() < 2]},
        ],
        lr=1e-2,
    ),
}
SGD = OPTIMIZERS["sgd"]


def pipeline(name="vgg", lengths=2, schedule="1f1b", optimizer=SGD, *, model=None, **options):
    """Return a pipeline of the case's model in stages of `lengths` layers (or that many equal
    stages).
    """
    case = CASES[name]
    model = model if model is not None else made(case)[0]
    if isinstance(lengths, int):
        lengths = lengths_of(len(layers_of(model)), lengths)
    return ps.Pipeline(
        model,
        loss=case.loss,
        balance=lengths,
        schedule=schedule,
        micro_batches=4,
        optimizer=optimizer,
        executor="threads",
        **options,
    )


def batch(name="vgg", number=0):
    """Return one of the case's batches."""
    with torch.random.fork_rng():
        torch.manual_seed(100 + number)
        return CASES[name].data(10)


def trained(steps, name="vgg", *args, **options):
    """Return a pipeline that has been trained for some steps."""
    pipe = pipeline(name, *args, **options)
    for number in range(steps):
        pipe.train_batch(*batch(name, number))
    return pipe


MODELS = ("vgg", "resnet", "gpt")
OTHER_CUTS = ((3, "gpipe"), (1, "naive"), (4, "1f1b"), (2, "1f1b"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_training_resumes_to_the_bit_under_another_cut_schedule_and_number_of_stages(
    name, optimizer, tmp_path
):
    """A checkpoint belongs to the model, not to the machines; dropout continues with the right
    random numbers. Every model and every optimizer meets every other cut.
    """
    make = OPTIMIZERS[optimizer]
    turn = MODELS.index(name) + list(OPTIMIZERS).index(optimizer)
    whole = trained(5, name, 2, optimizer=make)
    trained(3, name, 2, optimizer=make).save(tmp_path)
    for lengths, schedule in OTHER_CUTS[turn % 2 :: 2]:
        other = trained(
            1, name, lengths, schedule, make
        )  # what it has learned on its own must be gone without a trace
        other.load(tmp_path)
        assert other.step == 3
        for number in (3, 4):
            other.train_batch(*batch(name, number))
        assert differences(other.state_dict(), whole.state_dict()) == []
        # and by another way once more: all optimizer state has moved, too
        again = tmp_path / f"again-{lengths}-{schedule}"
        other.save(again)
        last = pipeline(name, 3, optimizer=make)
        last.load(again)
        assert torch.equal(last.train_batch(*batch(name, 5)), other.train_batch(*batch(name, 5)))


def test_a_checkpoint_holds_what_plain_training_would_hold(tmp_path):
    """Weights, running statistics and momenta have the model's own names, so that other tools can
    read them.
    """
    model, _, _ = made(CASES["resnet"])
    plain = PlainTraining(copy.deepcopy(model), CASES["resnet"].loss)
    optimizer = SGD(list(plain.model.parameters()))
    plain.backward(*batch("resnet"), 4)
    optimizer.step()
    trained(1, "resnet", 3).save(tmp_path)
    index = json.loads((tmp_path / "checkpoint.json").read_text())
    assert (index["step"], len(index["files"]), index["schema"]) == (1, 3, 3)
    tensors = {
        key: value for file in index["files"] for key, value in load_file(tmp_path / file).items()
    }
    expected = {f"model/{key}": value for key, value in plain.model.state_dict().items()}
    for key, parameter in plain.model.named_parameters():
        expected[f"optimizer/{key}/momentum_buffer"] = optimizer.state[parameter]["momentum_buffer"]
    assert differences(tensors, expected) == []


def test_loading_removes_state_that_was_created_after_saving(tmp_path):
    """Momentum of a later, diverged run would spoil the restored weights."""
    pipeline().save(tmp_path)
    pipe = trained(2)
    pipe.load(tmp_path)
    assert pipe.step == 0
    for number in range(2):
        pipe.train_batch(*batch(number=number))
    assert differences(pipe.state_dict(), trained(2).state_dict()) == []


def test_loading_drops_accumulated_gradients(tmp_path):
    """They belong to other weights."""
    model, _, _ = made(CASES["mlp"])
    pipe = pipeline("mlp", 2, optimizer=None, model=model)
    pipe.train_batch(*batch("mlp"))
    pipe.save(tmp_path)
    assert gradients(model)
    pipe.load(tmp_path)
    assert gradients(model) == {}


def test_settings_that_a_scheduler_has_changed_come_back(tmp_path):
    """A learning rate that restarts after every interruption is a common error."""
    made_ones = []

    def remembered(make):
        def factory(params):
            made_ones.append(make(params))
            return made_ones[-1]

        return factory

    pipe = pipeline(lengths=2, optimizer=remembered(OPTIMIZERS["adam on two groups"]))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in made_ones]
    for number in range(2):
        pipe.train_batch(*batch(number=number))
        for scheduler in schedulers:
            scheduler.step()
    made_ones[0].param_groups[0]["betas"] = (0.8, 0.9)
    made_ones[1].param_groups[0]["betas"] = (0.8, 0.9)
    pipe.save(tmp_path)
    made_ones.clear()
    other = pipeline(lengths=3, optimizer=remembered(OPTIMIZERS["adam on two groups"]))
    other.load(tmp_path)
    for optimizer in made_ones:
        assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.0025]
        assert [tuple(group["betas"]) for group in optimizer.param_groups] == [
            (0.8, 0.9),
            (0.9, 0.999),
        ]
    assert torch.equal(other.train_batch(*batch(number=2)), pipe.train_batch(*batch(number=2)))
    assert differences(other.state_dict(), pipe.state_dict()) == []


def test_a_learning_rate_that_is_a_tensor_comes_back_as_one(tmp_path):
    """torch needs it for compiled optimizers."""
    rates = []

    def factory(params):
        rates.append(torch.tensor(0.1))
        return torch.optim.Adam(params, lr=rates[-1], foreach=False)

    pipe = pipeline("mlp", 2, optimizer=factory)
    for rate in rates:
        rate.fill_(0.025)
    pipe.train_batch(*batch("mlp"))
    pipe.save(tmp_path)
    optimizers = []

    def other_factory(params):
        optimizers.append(torch.optim.Adam(params, lr=torch.tensor(0.1), foreach=False))
        return optimizers[-1]

    other = pipeline("mlp", 3, optimizer=other_factory)
    other.load(tmp_path)
    assert [optimizer.param_groups[0]["lr"].item() for optimizer in optimizers] == pytest.approx(
        [0.025] * 3
    )
    assert torch.equal(other.train_batch(*batch("mlp", 1)), pipe.train_batch(*batch("mlp", 1)))


def test_saving_again_keeps_only_the_newest(tmp_path):
    """Files of earlier checkpoints are deleted, and foreign files stay."""
    pipe = trained(1, "vgg", 4)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-00000000-stage-0000-left.partial").write_text("of a save that was killed")
    pipe.save(tmp_path)
    pipe.save(tmp_path)
    pipe.train_batch(*batch(number=1))
    pipe.save(tmp_path)
    index = json.loads((tmp_path / "checkpoint.json").read_text())
    assert {file.name for file in tmp_path.iterdir()} == {
        "checkpoint.json",
        "notes.txt",
        *index["files"],
    }
    assert index["step"] == 2
    assert len(index["files"]) == 4


def test_saving_over_a_checkpoint_of_another_cut_at_the_same_step_mixes_nothing(tmp_path):
    """Of four files of one run and two of another, all of step 2, only the two are the new
    checkpoint.
    """
    trained(2, "vgg", 4, seed=1).save(tmp_path)
    pipe = trained(2, "vgg", 2, seed=2)
    pipe.save(tmp_path)
    other = pipeline("vgg", 3)
    other.load(tmp_path)
    assert differences(other.state_dict(), pipe.state_dict()) == []
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_a_save_that_fails_leaves_the_checkpoint_before_whole(tmp_path, monkeypatch):
    """The disk fills up while the second stage writes: the previous checkpoint must still be
    complete.
    """
    pipe = trained(1, "vgg", 3)
    pipe.save(tmp_path)
    before = pipe.state_dict()
    pipe.train_batch(*batch(number=1))

    def full(tensors, path, metadata):
        if "stage-0001" in path.name:
            raise OSError(28, "No space left on device")
        save_file(tensors, path, metadata)

    monkeypatch.setattr(checkpoint_files, "save_file", full)
    with pytest.raises(FileError, match=r"cannot write the checkpoint .*: No space left on device"):
        pipe.save(tmp_path)
    other = pipeline("vgg", 2)
    other.load(tmp_path)
    assert other.step == 1
    assert differences(other.state_dict(), before) == []
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 4, "what was written of it is taken back"
    pipe.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    """A file has the name of the folder."""
    (tmp_path / "ckpt").write_text("")
    with pytest.raises(FileError, match=r"cannot write the checkpoint .*ckpt"):
        pipeline().save(tmp_path / "ckpt")


def test_a_checkpoint_without_optimizer_state_starts_the_optimizer_anew(tmp_path):
    """Its weights were trained elsewhere, or by an optimizer of the user's own."""
    trained(1, "mlp", 2, optimizer=None).save(tmp_path)
    pipe = trained(2, "mlp", 3, optimizer=OPTIMIZERS["adam"])
    pipe.load(tmp_path)
    fresh = pipeline("mlp", 1, optimizer=OPTIMIZERS["adam"])
    fresh.load(tmp_path)
    assert torch.equal(pipe.train_batch(*batch("mlp")), fresh.train_batch(*batch("mlp")))
    assert differences(pipe.state_dict(), fresh.state_dict()) == []


def test_optimizer_state_that_a_checkpoint_cannot_hold_is_refused_when_it_is_saved(tmp_path):
    """If it were silently left out, training would resume with other numbers."""

    class Hoarder(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["past"] = [parameter.detach().clone()]

    pipe = trained(1, "mlp", 2, optimizer=lambda params: Hoarder(params, lr=0.1))
    with pytest.raises(
        SettingError,
        match=r"Hoarder keeps a list as 'past' of fc\d\.weight: a checkpoint can hold tensors and",
    ):
        pipe.save(tmp_path)
    assert not (tmp_path / "checkpoint.json").exists()


def test_tied_frozen_and_half_trained_parameters_come_back(tmp_path):
    """A tied weight has two names and one state; frozen weights and those without a gradient so far
    have none.
    """

    def model():
        torch.manual_seed(0)
        made_model = nn.Sequential(
            nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 5)
        )
        made_model[2].weight = made_model[0].weight
        made_model[3].bias.requires_grad_(False)
        made_model[1].register_parameter("unused", nn.Parameter(torch.ones(3)))
        return made_model

    pipe = trained(2, "mlp", [3, 1], optimizer=OPTIMIZERS["adam"], model=model())
    pipe.save(tmp_path)
    other = pipeline("mlp", [4], optimizer=OPTIMIZERS["adam"], model=model())
    other.load(tmp_path)
    assert torch.equal(other.train_batch(*batch("mlp", 2)), pipe.train_batch(*batch("mlp", 2)))
    assert differences(other.state_dict(), pipe.state_dict()) == []


def test_states_in_bfloat16_and_double_come_back_in_their_own_dtype(tmp_path):
    """safetensors stores them without conversion."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 5).to(torch.bfloat16)

        def forward(self, x):
            return self.linear(x.to(torch.bfloat16)).float()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Half())
    pipe = trained(2, "mlp", [1, 1], model=copy.deepcopy(model))
    pipe.save(tmp_path)
    other = pipeline("mlp", [2], model=model)
    other.load(tmp_path)
    assert torch.equal(other.train_batch(*batch("mlp", 2)), pipe.train_batch(*batch("mlp", 2)))
    assert other.state_dict()["1.linear.weight"].dtype == torch.bfloat16
