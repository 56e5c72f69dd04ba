"""The forms in which a model can be written."""

from __future__ import annotations

import json

import pytest
import torch
from tests.training.user_modules import MODEL, write_module
from torch import nn

from penstock.errors import FileError, SettingError, UnknownName
from penstock.training.config import TrainConfig
from penstock.training.data.batches import Dataset
from penstock.training.data.catalogue import dataset
from penstock.training.sources.model_sources import default_data, parse_loss, parse_model
from penstock.training.task import make_task

GPT2 = {
    "model_type": "gpt2",
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "vocab_size": 128,
}


#: Changes of the configuration that make it that of an encoder.
BERT = {
    "model_type": "bert",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
}


@pytest.fixture
def module(monkeypatch, tmp_path):
    """The name of a module with a model and a data set."""
    return write_module(MODEL, monkeypatch, tmp_path)


def user_config(module, **settings):
    """A run of the user's model on the user's data."""
    return TrainConfig(model=f"{module}:make", data=f"{module}:load", batch=8, **settings)


def test_a_factory_gets_the_sizes_of_the_data_and_the_options(module):
    """Numbers of features and classes come from the data, not from the command line."""
    task = make_task(user_config(module, model_options={"width": 6}, data_options={"samples": 20}))
    assert isinstance(task.model, nn.Module)
    assert (task.model.stem.in_features, task.model.head.out_features) == (4, 4)
    assert task.model.stem.out_features == 6
    assert len(task.data.train_inputs) == 18
    assert [layer.name for layer in task.chain] == ["stem", "body", "head"]


def test_every_process_makes_the_same_weights_and_leaves_random_numbers_alone(module):
    """Each rank calls the factory; they depend on the seed alone."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = make_task(user_config(module, seed=3)).model.state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    second = make_task(user_config(module, seed=3)).model.state_dict()
    other = make_task(user_config(module, seed=4)).model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["stem.weight"], other["stem.weight"])


def test_a_factory_that_returns_no_module_is_refused(module):
    """Two words are exchanged easily."""
    with pytest.raises(SettingError, match=r"load returned a tuple, and must return an nn\.Module"):
        make_task(TrainConfig(model=f"{module}:load", data=f"{module}:load"))


def test_a_model_in_evaluation_mode_is_refused(monkeypatch, tmp_path):
    """A script would call train(), which is not possible here; without dropout the results differ."""
    text = (
        MODEL
        + "\ndef trained(features, classes):\n    return nn.Linear(features, classes).eval()\n"
    )
    name = write_module(text, monkeypatch, tmp_path)
    with pytest.raises(SettingError, match=r"trained returned a model in evaluation mode, .* call"):
        make_task(TrainConfig(model=f"{name}:trained", data=f"{name}:load"))


def test_a_list_of_modules_is_a_model(monkeypatch, tmp_path):
    """As for `ps.chain`."""
    text = MODEL + "\ndef layers(features, classes):\n    return [nn.Linear(features, classes)]\n"
    name = write_module(text, monkeypatch, tmp_path)
    task = make_task(TrainConfig(model=f"{name}:layers", data=f"{name}:load"))
    assert len(task.chain) == 1


def test_data_at_hand_is_known_for_all_but_the_users_models():
    """A default data set for a user's model would be a guess."""
    assert (default_data("mlp"), default_data("hf:config.json")) == ("digits", "text")
    with pytest.raises(SettingError, match="--model my_model:make needs --data"):
        default_data("my_model:make")
    with pytest.raises(UnknownName, match="no model called 'my_model'"):
        default_data("my_model")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mlp", "mlp"),
        ("pack.age:make", "pack.age-make"),
        ("hf:../models/gpt2/config.json", "hf-models-gpt2-config"),
    ],
)
def test_names_can_be_names_of_folders(text, name):
    """A run's folder is named after its model."""
    assert parse_model(text).name == name


def test_losses_are_those_of_torch_or_of_the_user(monkeypatch, tmp_path):
    """A function, or a module's class."""
    text = (
        "from torch import nn\n\ndef f(output, target):\n    return 1\n\nclass L(nn.L1Loss): ...\n"
    )
    name = write_module(text, monkeypatch, tmp_path)
    assert parse_loss("l1_loss") is nn.functional.l1_loss
    assert parse_loss(f"{name}:f")(0, 0) == 1
    assert isinstance(parse_loss(f"{name}:L"), nn.L1Loss)
    with pytest.raises(SettingError, match="Did you mean 'mse_loss'"):
        parse_loss("mse_los")
    with pytest.raises(SettingError, match="is not a function but of type str"):
        parse_loss(f"{name}:__name__")


class TestHuggingFace:
    """Models of transformers from a file."""

    @pytest.fixture(autouse=True)
    def transformers(self):
        """The library."""
        return pytest.importorskip("transformers")

    @staticmethod
    def write(folder, **changes):
        """Write a config.json, and return the model's text."""
        path = folder / "config.json"
        path.write_text(json.dumps({**GPT2, **changes}))
        return f"hf:{path}"

    @staticmethod
    def make(text, tokens=16, **options):
        """Make the model for the text that comes with Python."""
        return parse_model(text).make(dataset("text", tokens=tokens), options, 0)

    def test_a_config_file_is_a_model_with_random_weights(self, tmp_path):
        """They depend on the seed; options change the configuration."""
        source_model = self.make(self.write(tmp_path), n_layer=1)
        assert len(source_model.network.transformer.h) == 1
        tokens = source_model.data.train_inputs[:2]
        loss = source_model.loss(source_model.network(tokens), source_model.data.train_targets[:2])
        assert loss.shape == ()
        again = self.make(self.write(tmp_path), n_layer=1)
        weight = source_model.network.transformer.wte.weight
        assert torch.equal(weight, again.network.transformer.wte.weight)

    def test_an_encoder_that_sees_the_next_token_is_refused(self, tmp_path):
        """Transformers makes a language model of it, which would learn to copy its input."""
        text = self.write(tmp_path, **BERT)
        with pytest.raises(SettingError, match="makes a BertLMHeadModel whose predictions"):
            self.make(text)
        assert type(self.make(text, is_decoder=True).network).__name__ == "BertLMHeadModel"

    def test_sequences_with_classes_train_a_classifier(self, tmp_path):
        """The sizes are those of the data, and each sequence has one class."""
        tokens, classes = torch.arange(24).reshape(4, 6), torch.tensor([0, 1, 2, 1])
        rows = (tokens, classes)
        data = Dataset("mine", *rows, *rows, classes=3, task="classify", description="")
        source_model = parse_model(self.write(tmp_path, **BERT)).make(data, {}, 0)
        assert type(source_model.network).__name__ == "BertForSequenceClassification"
        assert source_model.network(tokens).logits.shape == (4, 3)
        assert source_model.loss(source_model.network(tokens), classes).shape == ()
        with pytest.raises(
            SettingError, match="data mine has 24: set --model-option vocab_size=24"
        ):
            parse_model(self.write(tmp_path, **BERT, vocab_size=23)).make(data, {}, 0)

    def test_a_folder_with_weights_is_a_trained_model(self, tmp_path):
        """As `save_pretrained` writes it."""
        network = self.make(self.write(tmp_path)).network
        folder = tmp_path / "saved"
        with torch.no_grad():
            network.transformer.wte.weight.fill_(0.25)
        network.save_pretrained(folder)
        loaded = self.make(f"hf:{folder}").network
        assert torch.equal(loaded.transformer.wte.weight, network.transformer.wte.weight)
        assert all(part.training for part in loaded.modules()), "with dropout"

    @pytest.mark.parametrize(
        ("changes", "options", "tokens", "message"),
        [
            ({"vocab_size": 9}, {}, 16, "vocabulary of 9 tokens, and data text has"),
            ({}, {}, 17, "16 positions, and the sequences of data text have 17 tokens"),
            ({}, {"layers": 2}, 16, "has no option 'layers'; it has"),
            ({"n_layer": 10**9}, {}, 16, "has 1,000,000,000 layers, more than 10,000"),
            ({"n_embd": 10**7}, {}, 16, "has weights of .*, and .* of memory are free"),
            ({"n_head": 0}, {}, 16, "transformers cannot make this model: ZeroDivisionError"),
            ({}, {"n_layer": "two"}, 16, "--model-option: .*n_layer"),
        ],
    )
    def test_a_model_that_does_not_fit_is_refused(
        self, changes, options, tokens, message, tmp_path
    ):
        """An index error of an embedding would come much later."""
        with pytest.raises(SettingError, match=message):
            self.make(self.write(tmp_path, **changes), tokens, **options)

    def test_a_model_for_other_data_is_refused(self, tmp_path):
        """GPT-2 classifies no images."""
        with pytest.raises(SettingError, match="transformers cannot make this model"):
            parse_model(self.write(tmp_path)).make(dataset("digits"), {}, 0)
        with pytest.raises(SettingError, match="data reversed is for none of these"):
            parse_model(self.write(tmp_path)).make(dataset("reversed"), {}, 0)

    def test_a_file_that_is_no_configuration_is_refused(self, tmp_path):
        """Nothing is looked up in the network."""
        with pytest.raises(FileError, match="cannot read the configuration"):
            self.make("hf:gpt2")
        with pytest.raises(FileError, match=r"its model_type is 'gpt99'"):
            self.make(self.write(tmp_path, model_type="gpt99"))
        with pytest.raises(FileError, match=r"is no configuration of gpt2: .*n_layer"):
            self.make(self.write(tmp_path, n_layer=[2]))
        (tmp_path / "list.json").write_text("[]")
        with pytest.raises(FileError, match="is no configuration of a model"):
            self.make(f"hf:{tmp_path / 'list.json'}")
