"""The findings of an unsound schedule."""

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.op import Schedule
from penstock.verify.verify import verify


def findings_of(text, *, synchronous=True, limit=None):
    """The findings of an unsound schedule as (rule, op, rank), and the message."""
    with pytest.raises(ScheduleError, match="mine is not sound") as caught:
        verify(Schedule.parse(text, "mine", synchronous), limit)
    return [(f.rule, f.op, f.rank) for f in caught.value.findings], str(caught.value)
