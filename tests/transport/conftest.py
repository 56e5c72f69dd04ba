"""What tests of several transports share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.transport.same_host_pair import joined

from penstock.transport.same_host import SameHostTransport


@pytest.fixture
def ends() -> Iterator[list[SameHostTransport]]:
    """Two ends of one link of the same-host transport, both in this process."""
    both = joined()
    yield both
    for end in both:
        end.abort()
        end.close()
