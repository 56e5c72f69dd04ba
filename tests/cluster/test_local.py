"""This host's memory."""

from penstock.cluster.local import available_memory_bytes, host_memory_bytes


def test_what_is_free_is_part_of_what_there_is():
    """A rank may not be promised what other programs hold."""
    assert 0 < available_memory_bytes() <= host_memory_bytes()
