"""Messages between processes: JSON objects and nothing else."""

from __future__ import annotations

import math
import pickle
from multiprocessing import Pipe

import pytest

from penstock.errors import FileError
from penstock.peers.messages import Channel, PeerFailed


@pytest.fixture
def ends():
    """A channel and the raw connection of its other end."""
    first, second = Pipe()
    yield Channel(first), second
    first.close()
    second.close()


def test_messages_arrive_as_they_were_sent(ends):
    """Losses that are no numbers included."""
    channel, other = ends
    channel.send({"losses": [1.5, math.nan], "name": "ü", "nothing": None})
    message = Channel(other).receive()
    assert math.isnan(message["losses"][1])
    assert (message["name"], message["nothing"]) == ("ü", None)


class _Harm:
    """What unpickling would execute."""

    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


@pytest.mark.parametrize("content", [b"[1]", b"3", b"null"])
def test_what_is_no_object_is_refused(ends, content):
    """A message is an object."""
    channel, other = ends
    other.send_bytes(content)
    with pytest.raises(PeerFailed, match="no JSON object"):
        channel.receive()


def test_a_pickle_is_not_executed(ends):
    """A library's process may be anything."""
    channel, other = ends
    other.send_bytes(pickle.dumps(_Harm(), protocol=0))
    with pytest.raises(FileError, match="is not JSON"):
        channel.receive()


def test_the_end_of_the_other_process_is_an_end(ends):
    """Not a wait for ever."""
    channel, other = ends
    other.close()
    with pytest.raises((EOFError, OSError)):
        channel.receive()
