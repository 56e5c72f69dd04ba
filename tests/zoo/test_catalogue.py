"""What every model of the catalogue keeps, whatever its family: new models are adopted by
themselves, at their entry in SMALL.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import SettingError, UnknownName
from penstock.zoo.catalogue import model, models
from penstock.zoo.gpt import gpt_loss

#: Published parameter counts at 1,000 classes and 224 pixels; those of gpt and mlp are worked out
#: by hand from their formulas, those
#: of gnmt are the sums of PipeDream's profiles of GNMT-8 and GNMT-16 with their vocabulary of
#: 32,320; that of unet is the one that
#: PyTorch's implementations of the paper with padding and batch norm have at 2 classes.
PUBLISHED = {
    "gnmt": 193_765_952,
    "gnmt16": 277_717_568,
    "gpt": 9_772_544,
    "mlp": 29_770,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "unet": 31_037_698,
    "vgg11": 132_863_336,
    "vgg11_bn": 132_868_840,
    "vgg13": 133_047_848,
    "vgg13_bn": 133_053_736,
    "vgg16": 138_357_544,
    "vgg16_bn": 138_365_992,
    "vgg19": 143_667_240,
    "vgg19_bn": 143_678_248,
}
#: Options that make a model small enough to run in a test.
SMALL: dict[str, dict[str, object]] = {
    "gnmt": {"layers": 4, "hidden": 8, "vocabulary": 11},
    "gnmt16": {"hidden": 8, "vocabulary": 11},
    "gpt": {"layers": 2, "width": 16, "heads": 2, "tokens": 6, "vocabulary": 11},
    "mlp": {"layers": 3},
    "unet": {"classes": 10, "image": 32, "width": 4, "levels": 2},
    **{
        name: {"classes": 10, "image": 32}
        for name in PUBLISHED
        if name.startswith(("resnet", "vgg"))
    },
}

#: The same for classifiers of images that are not listed above.
IMAGE_OPTIONS = {"classes": 10, "channels": 3, "image": 32}
for model_name, facts in models().items():
    chosen = {name: value for name, value in IMAGE_OPTIONS.items() if name in facts.options}
    SMALL.setdefault(model_name, chosen)

every_model = pytest.mark.parametrize("name", sorted(models()))


def batch_for(name: str, samples: int) -> tuple[Tensor, Tensor]:
    """Random inputs and targets for the small form of a model."""
    draw = torch.Generator().manual_seed(1)
    if models()[name].task != "classify":
        tokens = torch.randint(0, 11, (samples, 7), generator=draw)
        inputs, following = tokens[:, :-1], tokens[:, 1:]
        return (
            inputs if name == "gpt" else torch.stack([following.flip(1), inputs], dim=1)
        ), following
    shape = (64,) if name == "mlp" else (3, 32, 32)
    return torch.randn(samples, *shape, generator=draw), torch.arange(samples) % 10


def children_first(module: nn.Module) -> Iterator[nn.Module]:
    """All submodules in the order in which a rank materialises them."""
    for child in module.children():
        yield from children_first(child)
    yield module


def owns_tensors(module: nn.Module) -> bool:
    """Whether parameters or buffers are the module's own, not a submodule's."""
    return any(True for _ in module.parameters(recurse=False)) or any(
        True for _ in module.buffers(recurse=False)
    )


class OnlyMeta(TorchDispatchMode):
    """Fails at the first tensor that is made anywhere but on the meta device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operator and look at what it made."""
        out = func(*args, **(kwargs or {}))
        assert not isinstance(out, Tensor) or out.is_meta, (
            f"{func} made {tuple(out.shape)} on {out.device}"
        )
        return out


def test_the_catalogue_lists_the_models_whose_counts_are_published_here():
    """A file that does not import would silently not be listed. Other models are held to the number
    that they state.
    """
    assert set(PUBLISHED) <= set(models())


@every_model
def test_parameter_count_equals_the_published_one_and_the_stated_fact(name):
    """Studies are compared with the literature by these numbers."""
    network = model(name, device="meta")
    count = sum(parameter.numel() for parameter in network.parameters())
    stated = models()[name].parameters
    assert count == stated, f"{name} has {count:_} parameters: correct parameters= of @register"
    assert count == PUBLISHED.get(name, count)


@every_model
def test_building_on_meta_makes_no_tensor_elsewhere(name):
    """A rank describes models that do not fit into its memory."""
    with OnlyMeta():
        network = model(name, device="meta")
    assert all(tensor.is_meta for tensor in network.state_dict().values())


@every_model
def test_submodules_with_tensors_have_reset_parameters(name):
    """Materialising from the meta device calls nothing but `reset_parameters`."""
    network = model(name, device="meta")
    without_reset = [
        path
        for path, module in network.named_modules()
        if owns_tensors(module) and not hasattr(module, "reset_parameters")
    ]
    assert without_reset == [], f"give these layers of {name} a method reset_parameters()"


@every_model
def test_materialising_layer_by_layer_gives_the_weights_of_plain_construction(name):
    """Whatever is drawn or set anywhere else than in `reset_parameters` would be lost on a rank
    that starts from meta.
    """
    torch.manual_seed(0)
    plain = model(name, device="cpu", **SMALL[name])
    later = model(name, device="meta", **SMALL[name]).to_empty(device="cpu")
    torch.manual_seed(0)
    for module in children_first(later):
        if owns_tensors(module):
            module.reset_parameters()
    materialised, expected = later.state_dict(), plain.state_dict()
    assert materialised.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(materialised[key], expected[key])] == []


@every_model
def test_one_step_gives_every_parameter_a_gradient(name):
    """A parameter without a gradient is dead weight that a stage would send and store; one batch
    also shows the output's shape.
    """
    torch.manual_seed(0)
    network = model(name, **SMALL[name])
    inputs, targets = batch_for(name, samples=2)
    logits = network(inputs)
    images = models()[name].task == "classify"
    loss = nn.functional.cross_entropy(logits, targets) if images else gpt_loss(logits, targets)
    loss.backward()
    assert logits.shape == ((2, 10) if images else (2, 6, 11))
    gradients = {path: parameter.grad for path, parameter in network.named_parameters()}
    assert [
        path
        for path, gradient in gradients.items()
        if gradient is None or not gradient.isfinite().all()
    ] == []
    # Biases before a normalisation and of attention keys have no effect, so their gradients may be
    # 0; matrices' may not.
    assert [
        path for path, gradient in gradients.items() if gradient.dim() > 1 and not gradient.any()
    ] == []


@every_model
def test_no_layer_works_in_place(name):
    """A layer that overwrites its input spoils what the layer before keeps for its backward."""
    assert [
        path
        for path, module in model(name, device="meta").named_modules()
        if getattr(module, "inplace", False)
    ] == []


def test_without_a_device_the_current_device_of_torch_is_used():
    """The caller's own `with torch.device(...)` must keep its meaning."""
    with torch.device("meta"):
        assert model("mlp").fc1.weight.is_meta


def test_unknown_model_is_refused_with_the_closest_name():
    """A slip of one letter should cost one look."""
    with pytest.raises(UnknownName, match=r"no model called 'vgg9'\. Did you mean 'vgg19'\?"):
        model("vgg9")


@every_model
def test_unknown_option_is_refused_with_the_existing_ones(name):
    """Python's own TypeError would name an inner function, and none of the options."""
    options = ", ".join(models()[name].options)
    with pytest.raises(SettingError, match=rf"^{name} has no option 'colour'\. It has: {options}$"):
        model(name, colour=3)


def test_misspelt_option_is_refused_with_the_closest_one():
    """Silence would train another model than was asked for."""
    with pytest.raises(SettingError, match=r"mlp has no option 'layer'\. Did you mean 'layers'\?"):
        model("mlp", layer=3)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *(
            (name, option, 0)
            for name in PUBLISHED
            for option in ("classes", "channels")
            if option in models()[name].options
        ),
        *(("gpt", option, -1) for option in ("layers", "width", "heads", "tokens", "vocabulary")),
        *(("mlp", option, True) for option in ("features", "hidden", "layers", "classes")),
        *((name, "image", 64) for name in ("vgg11", "vgg19_bn", "resnet18", "resnet50")),
        *((name, "dropout", value) for name in ("vgg11", "gpt") for value in (-0.1, 1, "half")),
        ("vgg11", "image", 32.0),
        ("vgg11", "classes", 2.5),
    ],
)
def test_senseless_value_is_refused_with_the_option_and_the_value(name, option, value):
    """Torch would fail later and deeper, or make a model with an empty layer."""
    with pytest.raises(SettingError, match=rf"^{name} takes {option}.* not {value!r}$"):
        model(name, device="meta", **{option: value})


@pytest.mark.parametrize("device", ["gpuu", "cuda:first", 1.5])
def test_unknown_device_is_refused_with_examples(device):
    """Torch's own message is a list of twenty back-ends, or of call signatures; it stays in the
    chain of causes.
    """
    with pytest.raises(
        SettingError,
        match=rf"torch knows no device {device!r}; write for example 'cpu', 'cuda:0' or 'meta'",
    ):
        model("mlp", device=device)
