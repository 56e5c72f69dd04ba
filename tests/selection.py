"""Which tests of a module run: a fixture of the module need not prepare what no test asks for."""

from __future__ import annotations

import pytest


def selected_parameters(request: pytest.FixtureRequest, *names: str) -> list[tuple[object, ...]]:
    """Return the values of some parameters, of all tests of the module that are selected and have
    them, each once and in order.

    Args:
        request: of a fixture of scope "module".
        names: names of parameters.
    """
    values = {}
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == request.path and set(names) <= set(parameters):
            values[tuple(parameters[name] for name in names)] = None
    return list(values)
