"""When to repeat a check whose cost would be felt at every batch."""

from __future__ import annotations


def is_due(count: int) -> bool:
    """Return whether a check is due at the batch, call or forward with this number: 1, 2, 4, 8, ...

    What changes is most likely to change early. Over a long run the checks cost nothing, and a
    change that comes late is still noticed.

    >>> [count for count in range(1, 20) if is_due(count)]
    [1, 2, 4, 8, 16]
    """
    return count & (count - 1) == 0
