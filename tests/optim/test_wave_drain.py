"""Waves at the end of a stream: each replica receives all that the others have sent."""

from __future__ import annotations

from tests.optim.test_wave_weights import data_of, exchanges, lines_of, together

from penstock.schedule.streaming.streams import Waves


def test_a_replica_that_ends_with_a_whole_wave_still_receives_the_mark_after_it(lab):
    """The other one ends inside that wave, and marks it as its last. What would be left of its
    messages would be received by the next stream.
    """
    batches, ends = (6, 5), exchanges(2)
    modules = [lab.mlp(), lab.mlp()]
    lines = lines_of(lab, 0, 3, batches)
    factory = lab.PAIRS["sgd"][0]
    replicas = [
        lab.make(
            lab.site_of(module, line, "hetpipe", factory, waves=Waves(3, 2), exchange=exchange)
        )
        for module, line, exchange in zip(modules, lines, ends, strict=True)
    ]

    def job(rank):
        data = data_of(lab, 2, rank)
        lab.play(modules[rank], replicas[rank], lines[rank].ops, data, lab.squares)
        replicas[rank].drain()

    together([lambda rank=rank: job(rank) for rank in range(2)])
    assert ends[0].log == ends[1].log
    assert all(row.empty() for exchange in ends for row in exchange.queues[exchange.mine])
    assert lab.close(lab.values_of(modules[0]), lab.values_of(modules[1]))
