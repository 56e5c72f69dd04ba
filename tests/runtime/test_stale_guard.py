"""Tests of the guard against reading stale layers, on its own and in one process."""

from __future__ import annotations

import copy
import pickle
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.errors import RunError
from penstock.runtime.stale_guard import Guard, guard_model, guards_of, stale_layers


def guarded(*, copies=False, stale=True, names=("a", "b")):
    """Return a model with a guard on itself and on its second layer."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    guard = Guard(1, 7, dict(enumerate(names)), stale)
    guard.watch([model], [model[1]], copies=copies)
    return model, guard


@pytest.mark.parametrize(
    ("names", "figures"),
    [
        (("a",), "1 of its 7 layers ('a') are"),
        (("a", "b", "a"), "2 of its 7 layers ('a', 'b') are"),
        (("a", "b", "c"), "3 of its 7 layers ('a', 'b', 'c') are"),
        (("a", "b", "c", "d"), "4 of its 7 layers ('a', 'b', 'c', …) are"),
    ],
)
def test_the_message_names_call_rank_and_up_to_three_layers_once(names, figures):
    """A name that several tensors have counts once."""
    guard = Guard(1, 7, dict(enumerate(names)), stale=True)
    with pytest.raises(RunError) as caught:
        guard.check("reading")
    assert str(caught.value).startswith("reading of the model on rank 1 would")
    assert figures in str(caught.value)
    for method in ("model_state()", "state_dict()", "forward(x)", "load_into(model)", "ema()"):
        assert f"pipe.{method}" in str(caught.value)


def test_a_stale_model_refuses_every_way_of_reading_it():
    """Its values are those from before the training."""
    model, _ = guarded()
    x = torch.ones(1, 2)
    for call, read in {
        "state_dict()": model.state_dict,
        "running": lambda: model(x),
        "copying": lambda: copy.deepcopy(model),
        "pickling": lambda: pickle.dumps(model),
    }.items():
        with pytest.raises(RunError) as caught:
            read()
        assert str(caught.value).startswith(f"{call} of the model")
    with pytest.raises(RunError, match="running"):
        model[1](x)
    model[0](x)  # a layer that this rank trains stays callable


@pytest.mark.parametrize("copies", [False, True])
def test_a_model_that_is_not_stale_is_read_as_without_a_guard(copies):
    """Its copies do not become stale with it."""
    model, guard = guarded(stale=False, copies=copies)
    x = torch.ones(1, 2)
    output, copied = model(x), copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    guard.mark()
    for other in (copied, loaded):  # these have the values from before the training
        assert other.state_dict().keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert torch.equal(other(x), output)
        assert not guards_of([other])


def test_a_copy_of_a_stale_traced_model_is_stale_too():
    """Until the guard is released, for the copy as well."""
    model, guard = guarded(copies=True)
    copied = copy.deepcopy(model)
    assert guards_of([copied]) == [guard]
    with pytest.raises(RunError, match="state_dict"):
        copied.state_dict()
    guard.release()
    copied.state_dict()


def test_marking_reaches_all_later_guards_and_no_earlier_one():
    """Later pipelines train the model that the earlier one has left."""
    guards = [Guard(0, 1, {}) for _ in range(3)]
    guards[0].successor, guards[1].successor = guards[1:]
    guards[1].mark()
    assert [guard.stale for guard in guards] == [False, True, True]


def test_release_restores_the_call_that_the_module_had():
    """Also one that was replaced before, such as by a compiler."""
    model, guard = guarded()
    other = Guard(0, 2, {0: "x"})
    before = dict(vars(model[0]))
    vars(model[0])["_compiled_call_impl"] = compiled = lambda x: x + 1
    other.watch([], [model[0], model[0]], copies=False)
    x = torch.ones(1, 2)
    assert torch.equal(model[0](x), x + 1)
    other.release()
    assert vars(model[0])["_compiled_call_impl"] is compiled
    guard.release()
    assert not guard.stale
    assert vars(model[1]).keys() == before.keys()
    assert not model._state_dict_pre_hooks


def test_release_leaves_the_call_of_a_later_guard():
    """The model of a later pipeline may still be stale."""
    model, guard = guarded(stale=False)
    later = Guard(0, 2, {0: "x"}, stale=True)
    later.watch([], [model[1]], copies=False)
    guard.release()
    with pytest.raises(RunError, match="rank 0"):
        model[1](torch.ones(1, 2))


def test_guards_of_submodules_are_listed_once():
    """By the order of the modules."""
    model, guard = guarded()
    guard.watch([model[0], model[1]], [], copies=False)
    assert guards_of([nn.ModuleList([model]), model]) == [guard]
    assert guards_of([nn.ModuleList([model])]) == [guard]
    other, second = guarded()
    assert guards_of([model, other]) == [guard, second]


class Chain:
    """The layers of a model, as a traced chain has them."""

    def __init__(self, modules, roots):
        self.modules, self.roots = modules, roots
        self.layers = [SimpleNamespace(name=f"layer{index}") for index in range(len(modules))]

    def __len__(self):
        """Return the number of layers."""
        return len(self.modules)


def refuses(call):
    """Whether a call is refused because of stale layers."""
    try:
        call()
    except RunError:
        return True
    return False


def frozen(module):
    """Freeze the parameters of a module."""
    return module.requires_grad_(requires_grad=False)


#: Layers, and whether training on another rank changes them.
LAYERS = [
    (lambda: nn.Linear(2, 2), True),
    (nn.Tanh, False),
    (lambda: frozen(nn.Linear(2, 2)), False),
    (lambda: frozen(nn.BatchNorm1d(2)).eval(), True),
]


@pytest.mark.parametrize("seed", range(40))
def test_what_other_ranks_train_is_guarded_and_what_is_held_is_not(seed):
    """Layers, and the modules of the user that contain some; a layer that is also held may run."""
    rng = random.Random(seed)
    kinds = [rng.choice(LAYERS) for _ in range(rng.randint(1, 5))]
    modules = [make() for make, _ in kinds]
    if rng.random() < 0.5:
        # One module in two places.
        modules.append(modules[0])
        kinds.append(kinds[0])
    held = {index for index in range(len(modules)) if rng.random() < 0.5}
    foreign = {i for i, (_, changes) in enumerate(kinds) if changes and i not in held}
    cut = rng.randint(0, len(modules))
    roots = [nn.ModuleList(modules[:cut]), nn.ModuleList(modules[cut:])]
    chain = Chain(modules, roots)
    guard = guard_model(chain, held, 3)
    if not foreign:
        assert guard is None
        assert not guards_of(roots)
        return
    assert (guard.rank, guard.layers, guard.stale) == (3, len(modules), False)
    assert guard.remote_layers == {index: f"layer{index}" for index in foreign}
    assert not stale_layers(chain)
    x = torch.ones(3, 2)
    for module in modules:
        module(x)
    guard.mark()
    assert stale_layers(chain) == foreign
    run_here = {id(modules[index]) for index in held}
    for index, module in enumerate(modules):
        is_foreign = any(module is modules[other] for other in foreign)
        expected = is_foreign and id(module) not in run_here
        assert refuses(lambda module=module: module(x)) == expected, index
    for root, part in ((roots[0], range(cut)), (roots[1], range(cut, len(modules)))):
        ids = {id(modules[index]) for index in foreign}
        expected = any(id(modules[index]) in ids for index in part)
        assert refuses(root.state_dict) == expected


@pytest.mark.parametrize("stale", [[], [0], [1], [0, 1]])
def test_a_later_pipeline_takes_the_place_of_earlier_ones(stale):
    """Their guards are removed; what they know stays: a model is stale until weights are loaded."""
    modules = [nn.Linear(2, 2) for _ in range(3)]
    roots = [nn.ModuleList(modules[:1]), nn.ModuleList(modules[1:])]
    earlier = [Guard(0, 3, {index: f"layer{index}"}, index in stale) for index in range(2)]
    for guard, root in zip(earlier, roots, strict=True):
        guard.watch([root], [], copies=False)
    chain = Chain(modules, roots)
    assert stale_layers(chain) == set(stale)
    guard = guard_model(chain, {0}, 1)
    assert guard.stale == bool(stale)
    assert guards_of(roots) == [guard]
    for other in earlier:
        assert other.successor is guard
        assert not other.stale
    earlier[0].mark()
    assert guard.stale
    assert guard_model(chain, {0, 1, 2}, 1) is None
    assert not guards_of(roots)
    assert not guard.stale


def test_stale_layers_are_known_by_their_names():
    """A later chain over the same model may divide it into other layers."""
    modules = [nn.Linear(2, 2) for _ in range(3)]
    root = nn.ModuleList(modules)
    Guard(0, 2, {0: "layer2", 1: "elsewhere"}, stale=True).watch([root], [], copies=False)
    assert stale_layers(Chain(modules, [root])) == {2}


@pytest.mark.parametrize("whole", [0, 1])
def test_a_traced_model_is_guarded_as_a_whole(whole):
    """Its layers are cut out of it; copies of the stale model are stale, too."""
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    modules[whole].whole_names = True
    root = nn.ModuleList([nn.Linear(2, 2)])
    guard = guard_model(Chain(modules, [root]), {0}, 1)
    guard.mark()
    assert refuses(root.state_dict)
    copied = copy.deepcopy(root)
    assert refuses(copied.state_dict)
    assert not refuses(lambda: modules[1](torch.ones(1, 2)))


class Scale(nn.Linear):
    """A layer that is called with keywords."""

    def forward(self, x, *, factor=1):
        """Multiply, too."""
        return factor * super().forward(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_guarded_module_runs_with_all_its_arguments_and_hooks(compiled):
    """Also one that a compiler has replaced; after the release it runs as before."""
    module = Scale(2, 2)
    calls = []
    module.register_forward_hook(lambda *args: calls.append("hook"))
    if compiled:
        vars(module)["_compiled_call_impl"] = lambda *args, **options: (args, options)
    x = torch.ones(1, 2)
    guard = Guard(0, 2, {0: "a"})
    guard.watch([], [module], copies=False)
    expected = ((x,), {"factor": 3}) if compiled else 3 * (module.weight.sum(1) + module.bias)
    for _ in range(2):
        output = module(x, factor=3)
        assert output == expected if compiled else torch.allclose(output[0], expected)
        guard.release()
    assert calls == ([] if compiled else ["hook"] * 2)


def test_a_guard_can_be_installed_again_after_its_release():
    """Nothing of the earlier installation is left."""
    model, guard = guarded()
    guard.release()
    guard.release()
    guard.watch([model], [model[1]], copies=False)
    guard.stale = True
    with pytest.raises(RunError):
        model.state_dict()
    guard.release()
    assert not model._state_dict_pre_hooks
    model(torch.ones(1, 2))


def test_a_module_that_is_gone_is_released_without_an_error():
    """A guard does not keep the user's modules alive."""
    module = nn.Linear(2, 2)
    guard = Guard(0, 2, {0: "a"})
    guard.watch([], [module], copies=False)
    alive = weakref.ref(module)
    del module
    assert alive() is None
    guard.release()


def test_a_module_that_runs_here_stays_usable_with_a_layer_of_another_rank_in_it():
    """The layer is in two places, of which this process trains one."""
    shared = nn.Linear(2, 2)
    block = nn.Sequential(shared, nn.Tanh())
    guard = guard_model(Chain([block, shared], [block, shared]), {0}, 0)
    guard.mark()
    block(torch.ones(1, 2))
    block.state_dict()
    copy.deepcopy(block)
    shared(torch.ones(1, 2))


def test_a_stale_list_of_layers_is_not_copied():
    """The copy would have the values from before the training without a sign of it."""
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    root = nn.ModuleList(modules)
    guard = guard_model(Chain(modules, [root]), {0}, 0)
    copy.deepcopy(root)
    guard.mark()
    assert refuses(lambda: copy.deepcopy(root))
    assert refuses(lambda: pickle.dumps(root))
    copy.deepcopy(modules[0])
