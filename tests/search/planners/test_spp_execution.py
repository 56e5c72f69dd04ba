"""SPP's list schedule against a second, slower one, and its bounds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.search.planners.spp_execution import makespan


def slowly(forward, backward, channel, sync, micro_batches):
    """The same rule, by looking at everything at every moment at which something ends; times are
    whole numbers.
    """
    stages = len(forward)
    way = [("F", i) for i in range(2 * stages - 1)] + [
        ("B", i) for i in range(2 * stages - 2, -1, -1)
    ]
    place = dict.fromkeys(range(micro_batches), 0)
    running, now = {}, 0
    ended = [0] * stages

    def seconds(step):
        kind, resource = step
        return (
            channel[resource // 2]
            if resource % 2
            else (forward if kind == "F" else backward)[resource // 2]
        )

    while any(at < len(way) for at in place.values()):
        for resource, (number, end) in list(running.items()):
            if end == now:
                del running[resource]
                place[number] += 1
                if resource % 2 == 0:
                    ended[resource // 2] = now
        for resource in range(2 * stages - 1):
            ready = sorted(
                (way[at][0] == "F", number)
                for number, at in place.items()
                if at < len(way)
                and way[at][1] == resource
                and number not in [n for n, _ in running.values()]
            )
            if resource not in running and ready:
                number = ready[0][1]
                running[resource] = (number, now + seconds(way[place[number]]))
        if running:
            now = min(end for _, end in running.values())
    return max(end + met for end, met in zip(ended, sync, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.integers(0, 7)),
        min_size=1,
        max_size=4,
    ),
    micro_batches=st.integers(1, 6),
)
def test_the_schedule_is_the_rule(rows, micro_batches):
    """Backwards before forwards, each by micro-batch, on stages and channels alike."""
    forward, backward, channel, sync = (list(numbers) for numbers in zip(*rows, strict=True))
    seconds = makespan(forward, backward, channel[:-1], sync, micro_batches)
    assert seconds == slowly(forward, backward, channel[:-1], sync, micro_batches)
    loads = [micro_batches * (f + b) + s for f, b, s in zip(forward, backward, sync, strict=True)]
    loads += [2 * micro_batches * hop for hop in channel[:-1]]
    assert seconds >= max(loads)
    assert seconds >= sum(forward) + sum(backward) + 2 * sum(channel[:-1]) + sync[0]


@pytest.mark.parametrize(("stages", "count"), [(1, 4), (2, 4), (4, 8), (8, 16)])
def test_equal_stages_take_what_1f1b_takes(stages, count):
    """(m + p - 1)(f + b): list scheduling loses nothing, as 1F1B does not."""
    assert (
        makespan([1.0] * stages, [2.0] * stages, [0.0] * (stages - 1), [0.0] * stages, count)
        == (count + stages - 1) * 3
    )


def test_slow_gradients_of_the_first_stage_come_last():
    """Its all-reduce begins when all else is over."""
    assert makespan([1, 1], [2, 2], [0], [5, 0], 3) == 12 + 5
    assert makespan([1, 1], [2, 2], [0], [0, 2], 3) == 12
    assert makespan([1, 1], [2, 2], [0], [0, 3], 3) == 13
