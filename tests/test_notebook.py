"""What a prompt and a notebook show of the values at the front door."""

from __future__ import annotations

import pytest

import penstock as ps


@pytest.fixture(scope="module")
def values():
    """A profile, cluster, plan, chain and timeline."""
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    chain = ps.chain(model)
    profile = ps.analytic(chain, __import__("torch").ones(8, 4), "V100", batch=8)
    cluster = ps.cluster("2xV100-10GbE")
    plan = ps.plan(profile, cluster, batch=8)
    timeline = ps.simulate(ps.schedule("1f1b", 2, 4), ps.Costs(forward=1, backward=2))
    return [profile, cluster, plan, chain.description, timeline]


def test_a_repr_is_one_short_line(values):
    """A profile of 11 layers once took 6,469 characters at the prompt."""
    for value in values:
        assert repr(value).startswith(f"<{type(value).__name__}")
        assert "\n" not in repr(value)
        assert len(repr(value)) < 160


def test_a_notebook_shows_descriptions_as_print_does(values):
    """Escaped, since names of models and clusters come from users."""
    profile, cluster, plan, *_ = values
    for value in (profile, cluster, plan):
        assert value._repr_html_().startswith("<pre>")
        assert str(value).splitlines()[0].split(":")[0] in value._repr_html_()
