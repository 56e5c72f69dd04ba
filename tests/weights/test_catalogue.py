"""Weight rules by name."""

import pytest

from penstock.errors import UnknownName
from penstock.weights.catalogue import WEIGHT_RULES, weight_rule


@pytest.mark.parametrize("name", list(WEIGHT_RULES.entries()))
def test_every_weight_rule_declares_its_facts(name):
    """Planning asks for them before anything runs."""
    rule = weight_rule(name)
    assert rule.name == name
    assert isinstance(rule.synchronous, bool)
    assert rule.source
    assert rule.arithmetic


def test_an_unknown_weight_rule_is_refused_with_those_that_are_known():
    """A typing slip must not train with another rule."""
    with pytest.raises(UnknownName, match=r"no weight rule called 'flash'\. Did you mean 'flush'\?"):
        weight_rule("flash")
