"""Forwards that change attributes: rejected if the next call reads them, traced if they are caches."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from penstock.errors import ChainError
from penstock.tracing.traced_chain import chain


class Keeping(nn.Module):
    """Changes attributes by a function that is passed to it."""

    def __init__(self, work):
        super().__init__()
        self.first, self.second, self.work = nn.Linear(4, 4), nn.Linear(4, 4), work
        self.count, self.last, self.size, self.ready = 0, None, 0, False
        self.seen, self.tables, self.state = [], {}, types.SimpleNamespace(count=0)

    def forward(self, x):
        return self.second(self.work(self, self.first(x)))


def counts(self, x):
    self.count += 1
    return x * self.count


def counts_samples(self, x):
    self.size += x.shape[0]
    return x


def counts_inside(self, x):
    self.state.count += 1
    return x


def collects(self, x):
    self.seen.append(x)
    return x


def averages(self, x):
    self.last = x.mean() if self.last is None else 0.9 * self.last + 0.1 * x.mean()
    return x + self.last


def initialises(self, x):
    if not self.ready:
        x, self.ready = x / x.std(), True
    return x


def counts_in_a_tensor(self, x):
    self.last = torch.zeros(()) if self.last is None else self.last + 1
    return x + self.last


@pytest.mark.parametrize(
    "work",
    [counts, counts_samples, counts_inside, collects, averages, initialises, counts_in_a_tensor],
)
def test_an_attribute_that_one_call_writes_and_the_next_reads_is_refused(work):
    """In a trace every batch would read the value of the first."""
    with pytest.raises(
        ChainError, match=r"its forward changes `\w+` of the model .*register_buffer"
    ):
        chain(Keeping(work), torch.randn(6, 4))


def installs(self, x):
    if not getattr(self, "is_installed", False):
        self.is_installed = True
    return x * 2


def test_an_attribute_that_the_first_call_alone_sets_is_traced_after_that_call():
    """Such as the hooks of transformers for the outputs of layers; the message says so."""
    model, x = Keeping(installs), torch.randn(6, 4)
    with pytest.raises(ChainError, match="If the first call alone sets it, call the model once"):
        chain(model, x)
    expected = model(x)
    value = x
    for layer in chain(model, x).modules:
        value = layer(value)
    assert torch.equal(value, expected)


def remembers(self, x):
    self.last = x
    return x + self.last.mean()


def caches(self, x):
    if self.last is None or self.last.shape[0] < x.shape[0]:
        self.last = torch.arange(x.shape[0], dtype=torch.float)
    return x + self.last[: x.shape[0], None]


def caches_by_size(self, x):
    if x.shape[0] not in self.tables:
        self.tables[x.shape[0]] = torch.arange(x.shape[0], dtype=torch.float)
    return x + self.tables[x.shape[0]][:, None]


def caches_the_size(self, x):
    if self.size != x.shape[0]:
        self.size, self.last = x.shape[0], torch.ones(x.shape[0], 1)
    return x + self.last


@pytest.mark.parametrize("work", [remembers, caches, caches_by_size, caches_the_size])
def test_caches_of_tables_and_what_is_written_before_it_is_read_are_traced(work):
    """Masks and positions computed once for each length; a layer's auxiliary loss that its parent
    reads.
    """
    torch.manual_seed(0)
    model = Keeping(work)
    traced = chain(model, torch.randn(6, 4))
    for samples in (6, 3, 1, 9):
        x = torch.randn(samples, 4)
        value = x
        for layer in traced.modules:
            value = layer(value)
        assert torch.equal(value, model(x))  # fills the caches of the user's own model
        assert traced.variants.is_current(training=True)


class Configured(nn.Module):
    """Sets an option of its configuration at the first call, as classifiers of transformers do."""

    def __init__(self, first_call=lambda x: x):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.config = types.SimpleNamespace(problem=None, width=4)
        self.first_call = first_call

    def forward(self, x):
        if self.config.problem is None:
            self.config.problem = "regression"
            x = self.first_call(x)
        x = self.second(torch.tanh(self.first(x)))
        return x if self.config.problem == "regression" else x.softmax(-1)


def test_an_option_that_the_first_call_sets_is_traced_if_later_calls_do_the_same():
    """The model keeps its None; a first call that does something else is refused."""
    torch.manual_seed(0)
    model, x = Configured(), torch.randn(2, 4)
    layers = chain(model, x)
    assert model.config.problem is None
    assert len(layers) == 2
    with pytest.raises(ChainError, match="changes `config` of the model in place"):
        chain(Configured(first_call=torch.sigmoid), x)
