"""Detection of modules that draw random numbers, independence of seeds, and restored generators."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from penstock.modules.host_random import host_state, restore_host
from penstock.modules.randomness import (
    drawing,
    generator_states,
    has_drawn,
    may_draw,
    seed_generators,
    set_generator_states,
    stream_seed,
)
from penstock.tracing.traced_chain import chain
from penstock.zoo.blocks.layers import HeConv2d, NormalEmbedding, NormalLinear
from penstock.zoo.catalogue import model

CPU = torch.device("cpu")

#: What a class of torch.nn is tried with, until its forward runs.
ARGUMENTS = [(), (4,), (2,), (4, 4), (4, 2), (4, 2, 8), (4, 4, 1), (1, 4), (4, 4, 4), ((2, 2), 1), (1, (2, 2)), ((4, 4), (2, 2)),
             (4, 4, 2), (1,), (4, 6, [2, 4]), (2, 2)]  # fmt: skip
FLOATS = [
    torch.linspace(-1, 1, 4 * math.prod(shape)).reshape(4, *shape)
    for shape in ((4,), (4, 4), (4, 4, 4), (4, 4, 4, 4), (4, 8, 8))
]
INDICES = [torch.tensor([0, 1, 2, 3]), torch.tensor([[0, 1], [2, 3]])]
INPUTS = [
    *((x,) for x in [*FLOATS, *INDICES]),
    *((x, x) for x in FLOATS),
    *((x, INDICES[0]) for x in FLOATS),
    *((x, x, x) for x in FLOATS),
]

#: Classes of torch.nn that draw in training with arguments as above.
DRAWS = {
    "AlphaDropout",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "FeatureAlphaDropout",
    "FractionalMaxPool2d",
    "FractionalMaxPool3d",
    "RReLU",
    "Transformer",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
}
#: Classes that draw with some arguments, and are seeded in vain with others.
COULD_DRAW = {
    "GRU",
    "GRUCell",
    "LSTM",
    "LSTMCell",
    "MultiheadAttention",
    "RNN",
    "RNNBase",
    "RNNCell",
}


def classes():
    """Return every module class of torch.nn, but lazy ones, which `chain` rejects."""
    module_classes = [getattr(nn, name) for name in dir(nn) if not name.startswith("Lazy")]
    return [
        kind for kind in module_classes if isinstance(kind, type) and issubclass(kind, nn.Module)
    ]


def draws(module, *inputs):
    """Return whether a forward in training changes torch's random state."""
    before = torch.get_rng_state()
    module.train()(*inputs)
    return not torch.equal(torch.get_rng_state(), before)


def tried(kind):
    """Return a module of `kind` and whether it draws; None if no arguments and inputs fit."""
    for arguments in ARGUMENTS:
        with contextlib.suppress(Exception):
            module = kind(*arguments)
            for inputs in INPUTS:
                with contextlib.suppress(Exception):
                    return module, draws(module, *inputs)
    return None


@pytest.mark.filterwarnings("ignore")
def test_every_random_module_of_torch_is_recognised():
    """Without a seed, results would depend on the cut; an unnecessary seed costs 10 µs."""
    results = {kind.__name__: result for kind in classes() if (result := tried(kind)) is not None}
    assert len(results) > 110
    drew = {name for name, (_, changed) in results.items() if changed}
    seeded = {name for name, (module, _) in results.items() if may_draw(module)}
    assert drew >= DRAWS
    assert drew - seeded == set()
    assert seeded - drew - COULD_DRAW == set()


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.LSTM(4, 4, 2, dropout=0.5), (FLOATS[1],)),
        (nn.GRU(4, 4, 2, dropout=0.5), (FLOATS[1],)),
        (nn.RNN(4, 4, 2, dropout=0.5), (FLOATS[1],)),
        (nn.MultiheadAttention(4, 2, dropout=0.5), (FLOATS[1],) * 3),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2),
            (FLOATS[1],),
        ),
        (nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8), 2), (FLOATS[1],) * 2),
        (nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.RReLU())), (FLOATS[0],)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_modules_with_a_dropout_argument_are_recognised(module, inputs):
    """Dropout depends on arguments and may be deep inside containers."""
    assert draws(module, *inputs)
    assert may_draw(module)


@pytest.mark.parametrize(("kind", "shape"), [
    (nn.Dropout, (2, 3)), (nn.AlphaDropout, (2, 3)), (nn.FeatureAlphaDropout, (2, 3, 4)),
    (nn.Dropout1d, (2, 3, 4)), (nn.Dropout2d, (2, 3, 4, 4)), (nn.Dropout3d, (2, 3, 4, 4, 4)),
])  # fmt: skip
def test_dropout_of_nothing_draws_nothing_and_is_not_seeded(kind, shape):
    """Studies switch dropout off by p=0 and keep the layer, which should then cost nothing."""
    assert not draws(kind(0.0), torch.ones(shape))
    assert not may_draw(kind(0.0))
    assert may_draw(kind(0.1))
    # Also in evaluation: the mode may change without notice.
    assert may_draw(kind(0.1).eval())


class Noisy(nn.Module):
    """A user's module that draws."""

    def forward(self, x):
        """Add noise."""
        return x + torch.randn_like(x)


class OtherStart(nn.Linear):
    """A linear map that only initialises its weights differently."""

    def reset_parameters(self):
        """Initialise the weights differently."""
        nn.init.ones_(self.weight)

    def extra_repr(self):
        """Say so."""
        return "ones"


class NoisyLinear(nn.Linear):
    """A linear map with a forward of its own."""

    def forward(self, x):
        """Add noise."""
        return super().forward(x) + torch.randn(1)


class NoisyKernel(nn.Conv2d):
    """A convolution whose forward is torch's, but with another `_conv_forward`."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight + torch.randn(1), bias)


class NoisyCall(nn.Linear):
    """A linear map that adds noise in `__call__`."""

    def __call__(self, x):
        """Add noise."""
        return super().__call__(x + torch.randn(1))


class NoisyWeight(nn.Linear):
    """A linear map whose weight is computed when it is read."""

    weight = property(lambda self: self.kernel + torch.randn(1))

    def __init__(self):
        nn.Module.__init__(self)
        self.kernel, self.bias = nn.Parameter(torch.ones(4, 4)), None


class NoisyBias(nn.Linear):
    """A linear map whose bias is computed when it is read."""

    bias = property(lambda self: self.offset + torch.randn(1))

    def __init__(self):
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.offset = nn.Parameter(torch.ones(4))


class NoisyReLU(nn.ReLU):
    """A subclass of a torch module that draws nothing itself."""

    def forward(self, x):
        """Add noise."""
        return super().forward(x + torch.randn_like(x))


def with_hook(register):
    """A linear map with a hook that draws."""
    layer = nn.Linear(4, 4)
    getattr(layer, register)(lambda *_: torch.randn(1) and None)
    return layer


def with_forward():
    """A linear map whose forward was replaced on the object."""
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x + torch.randn(1)
    return layer


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (Noisy, FLOATS[0]),
        (lambda: NoisyLinear(4, 4), FLOATS[0]),
        (lambda: NoisyKernel(4, 4, 1), FLOATS[2]),
        (lambda: NoisyCall(4, 4), FLOATS[0]),
        (NoisyWeight, FLOATS[0]),
        (NoisyBias, FLOATS[0]),
        (NoisyReLU, FLOATS[0]),
        (lambda: with_hook("register_forward_hook"), FLOATS[0]),
        (lambda: with_hook("register_forward_pre_hook"), FLOATS[0]),
        (with_forward, FLOATS[0]),
        (lambda: nn.Sequential(nn.ReLU(), Noisy()), FLOATS[0]),
    ],
)
def test_whatever_the_user_wrote_may_draw(make, x):
    """A forward, a hook, or a method that torch's forward calls. Regression: a hook on a Linear was
    overlooked.
    """
    assert draws(make(), x)
    assert may_draw(make())


@pytest.mark.parametrize(
    "module",
    [
        OtherStart(4, 4),
        NormalLinear(4, 4, std=0.1),
        HeConv2d(4, 4, 1),
        NormalEmbedding(4, 4, std=1.0),
    ],
)
def test_a_subclass_that_only_starts_otherwise_is_not_seeded(module):
    """The zoo's layers are such subclasses."""
    assert not draws(
        module,
        FLOATS[2]
        if isinstance(module, nn.Conv2d)
        else INDICES[0]
        if isinstance(module, nn.Embedding)
        else FLOATS[0],
    )
    assert not may_draw(module)


@pytest.mark.parametrize("make", [weight_norm, spectral_norm])
def test_parametrised_layers_count_as_layers_that_may_draw(make):
    """The weight may be computed by any code; an unnecessary seed only costs time."""
    assert may_draw(make(nn.Linear(4, 4)))


def test_models_of_the_zoo_are_seeded_at_dropout_and_at_blocks_of_custom_classes():
    """Plain layers are not seeded: on VGG all but two."""

    def seeded(name, **options):
        traced = chain(model(name, device="meta", **options))
        return [
            layer.name
            for layer, module in zip(traced, traced.modules, strict=True)
            if may_draw(module)
        ]

    assert seeded("mlp") == []
    assert seeded("vgg11_bn", image=32) == ["classifier.drop6", "classifier.drop7"]
    assert seeded("vgg11_bn", image=32, dropout=0) == []
    assert seeded("gpt", layers=2, dropout=0.1) == ["embedding", "blocks.0", "blocks.1"]
    assert seeded("resnet18", image=32) == [
        f"blocks.conv{group}_{index}" for group in (2, 3, 4, 5) for index in (1, 2)
    ]


def test_no_two_streams_of_a_large_grid_have_one_seed():
    """Equal seeds would give equal dropout masks: 20 seeds x 25 steps x 20 layers x 20
    micro-batches, and initial weights.
    """
    grid = [
        *itertools.product(range(20), range(25), range(20), range(20)),
        *itertools.product(range(200), [-1], range(50)),
    ]
    assert len({stream_seed(*parts) for parts in grid}) == len({tuple(parts) for parts in grid})


def test_a_seed_depends_on_order_length_and_sign_and_fits_a_generator():
    """(layer 1, micro-batch 2) differs from (layer 2, micro-batch 1); torch accepts 64 bits, Python
    integers are unbounded.
    """
    lists = [
        (),
        (0,),
        (0, 0),
        (0, 0, 0),
        (1, 2),
        (2, 1),
        (1, 2, 0),
        (-1,),
        (2**64 - 2,),
        (2**40, 1),
    ]
    seeds = [stream_seed(*parts) for parts in lists]
    assert len(set(seeds)) == len(lists)
    assert all(0 <= seed < 2**63 for seed in seeds)
    for seed in seeds:
        torch.Generator().manual_seed(seed)


def test_streams_of_neighbours_do_not_look_alike():
    """Neighbouring micro-batches must not drop the same units: half of all masks agree, as for
    independent ones.
    """
    masks = []
    with drawing(CPU):
        for micro_batch in range(40):
            seed_generators(CPU, stream_seed(0, 0, 3, micro_batch))
            masks.append(torch.rand(500) < 0.5)
    agreement = [(a == b).float().mean().item() for a, b in itertools.combinations(masks, 2)]
    assert 0.49 < sum(agreement) / len(agreement) < 0.51
    assert 0.35 < min(agreement) <= max(agreement) < 0.65


def test_a_seed_of_today_is_the_seed_of_tomorrow():
    """Runs continue from checkpoints with the same seeds: a change of the function changes results,
    and must fail here.
    """
    seeds = [stream_seed(0, 0, 0, 0), stream_seed(7, -1, 3), stream_seed(1, 2, 3, 4)]
    assert seeds == [6995351751500849132, 851888593897650774, 4482757422154957270]


def test_drawing_leaves_the_generator_as_it_was_also_after_an_error():
    """A failed layer must not change what the user's data loader draws next."""
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with drawing(CPU):
        seed_generators(CPU, 99)
        torch.rand(7)

    def fails():
        with drawing(CPU):
            seed_generators(CPU, 98)
            raise ValueError("the layer failed")

    with pytest.raises(ValueError, match="the layer failed"):
        fails()
    assert torch.equal(torch.rand(4), expected)


def test_the_same_seed_gives_the_same_numbers_whatever_was_drawn_before():
    """This makes dropout independent of the cut."""
    drawn = []
    for before in (0, 3):
        with drawing(CPU):
            torch.rand(before)
            seed_generators(CPU, 5)
            drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def test_threads_draw_one_after_another_and_may_nest():
    """Ranks that are threads share torch's generator: no other thread may draw between seeding and
    drawing.
    """
    drawn = {}

    def rank(number):
        for turn in range(50):
            with drawing(CPU), drawing(CPU):
                seed_generators(CPU, number)
                first = torch.rand(1)
                drawn[number, turn] = torch.cat([first, torch.rand(1)])

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(drawn) == 200
    assert len({tuple(values.tolist()) for values in drawn.values()}) == 4


@pytest.mark.parametrize("host", [False, True])
def test_generators_of_the_host_are_seeded_and_restored_on_request(host):
    """That takes longer than all else, and most layers draw from torch alone."""
    state = host_state()
    try:
        before = random.getstate()
        with drawing(CPU, host=host):
            seed_generators(CPU, 5, host=host)
            first = (random.random(), np.random.random(), torch.rand(1).item())  # noqa: NPY002
            seed_generators(CPU, 5, host=host)
            again = (random.random(), np.random.random(), torch.rand(1).item())  # noqa: NPY002
        assert [a == b for a, b in zip(first, again, strict=True)] == [host, host, True]
        assert (random.getstate() == before) is host
    finally:
        restore_host(state)


def test_states_of_generators_tell_whether_a_number_was_drawn():
    """Restored, they repeat it."""
    with drawing(CPU):
        before = generator_states(CPU)
        assert not has_drawn(CPU, before)
        first = torch.rand(1)
        assert has_drawn(CPU, before)
        set_generator_states(CPU, before)
        assert not has_drawn(CPU, before)
        assert torch.equal(torch.rand(1), first)
