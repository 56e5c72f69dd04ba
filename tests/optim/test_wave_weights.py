"""Waves: copies of a stage that exchange their changes after a fixed number of updates."""

from __future__ import annotations

import queue
import threading

import pytest
import torch
from tests.time_limits import HANG_S
from torch import nn

from penstock.schedule.streaming.streams import Waves


class Exchange:
    """One copy's end of the queues between all copies."""

    def __init__(self, mine, queues) -> None:
        self.mine, self.queues, self.copies = mine, queues, len(queues)
        self.log = []

    def send_wave(self, wave, tensors):
        self.log.append(wave)
        for other, row in enumerate(self.queues):
            if other != self.mine:
                # Not copied, as between ranks of one process: a sender must not change them later.
                row[self.mine].put((wave, tensors))

    def receive_wave(self, wave):
        others = [
            self.queues[self.mine][other].get(timeout=HANG_S)
            for other in range(self.copies)
            if other != self.mine
        ]
        assert [number for number, _ in others] == [wave] * len(others)
        return [tensors for _, tensors in others]


def exchanges(count):
    """Return the ends for a number of copies."""
    queues = [[queue.Queue() for _ in range(count)] for _ in range(count)]
    return [Exchange(n, queues) for n in range(count)]


def together(jobs):
    """Run functions concurrently in threads, as ranks do."""
    failed = []

    def guarded(job):
        try:
            job()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def data_of(lab, copies, copy):
    """Return the data of a copy: its batch t is batch t * copies + copy of all."""
    return lambda number: lab.vectors(number * copies + copy)


class Literal:
    """One copy with explicit weights."""

    def __init__(self, lab, line, module, data, optimizer) -> None:
        self.lab, self.module, self.data, self.optimizer = lab, module, data, optimizer
        self.ops = iter(line.ops)
        self.newest = self.start = lab.values_of(module)
        self.read, self.losses, self.taken, self.ended = {}, [], 0, False

    def run(self, until):
        """Run its ops up to the U with this number."""
        for kind, number in self.ops:
            inputs, targets = self.data(number)
            if kind == "F":
                self.read[number] = self.newest
                self.losses.append(
                    self.lab.gradient(
                        self.module, self.newest, self.newest, inputs, targets, self.lab.squares
                    )[0]
                )
            elif kind == "B":
                weights = self.read.pop(number)
                grads = self.lab.gradient(
                    self.module, weights, weights, inputs, targets, self.lab.squares
                )[1]
            else:
                self.newest = self.optimizer.step(self.newest, grads)
                if number == until:
                    return
        self.ended = True

    def learnt(self):
        """Return what its own updates have changed since the wave began."""
        return [new - old for new, old in zip(self.newest, self.start, strict=True)]

    def receive_wave(self, learnt):
        """Add the changes of others in a wave."""
        self.taken += 1
        for change in learnt:
            self.newest = [w + u for w, u in zip(self.newest, change, strict=True)]


def reference(waves, copies):
    """Run HetPipe's rule wave by wave: all copies run a wave, then each adds the others' sums of D
    waves before.
    """
    handed = []
    while not all(copy.ended for copy in copies):
        wave = len(handed)
        for copy in copies:
            if not copy.ended:
                copy.run(until=(wave + 1) * waves.length)
        handed.append([copy.learnt() for copy in copies])
        for n, copy in enumerate(copies):
            if not copy.ended and wave >= waves.distance:
                copy.receive_wave(
                    [u for o, u in enumerate(handed[wave - waves.distance]) if o != n]
                )
            copy.start = copy.newest
    for n, copy in enumerate(copies):
        for wave in range(copy.taken, len(handed)):
            copy.receive_wave([u for o, u in enumerate(handed[wave]) if o != n])


def lines_of(lab, stage, stages, batches):
    """Return a line for each copy, given its number of batches."""
    return [lab.line_of("hetpipe", stage, stages, 1, count) for count in batches]


CASES = [
    ((6, 6), 2, 0),
    ((6, 6), 3, 1),
    ((7, 6), 3, 0),
    ((6, 5), 2, 0),
    ((5, 5, 4), 2, 1),
    ((4, 3, 3), 4, 0),
    ((9, 8), 2, 5),
    ((3, 2), 1, 0),
]


@pytest.mark.parametrize(("batches", "length", "distance"), CASES)
@pytest.mark.parametrize("pair", ["sgd", "momentum", "adam", "adamw"])
def test_streams_do_what_the_published_rule_says(lab, batches, length, distance, pair):
    """Copies with different numbers of batches, whole and partial waves, with distance 0 and above."""
    waves, count = Waves(length, distance), len(batches)
    lines = lines_of(lab, 0, min(length, 3), batches)
    modules = [lab.mlp() for _ in batches]
    factory, formula = lab.PAIRS[pair]
    plain = [
        Literal(lab, line, lab.mlp(), data_of(lab, count, c), formula())
        for c, line in enumerate(lines)
    ]
    reference(waves, plain)
    ends = exchanges(count)
    copies = [
        lab.make(lab.site_of(module, line, "hetpipe", factory, waves=waves, exchange=end))
        for module, line, end in zip(modules, lines, ends, strict=True)
    ]
    losses = [[] for _ in batches]

    def job(c):
        losses[c] += lab.play(
            modules[c], copies[c], lines[c].ops, data_of(lab, count, c), lab.squares
        )
        copies[c].drain()

    together([lambda c=c: job(c) for c in range(count)])
    for c in range(count):
        assert lab.close(losses[c], plain[c].losses)
        assert lab.close(lab.values_of(modules[c]), plain[c].newest)
        assert lab.close(lab.values_of(modules[c]), lab.values_of(modules[0]))
    # Every message is received: one that is left would be received by the next stream.
    assert len({tuple(end.log) for end in ends}) == 1
    assert all(row.empty() for end in ends for row in end.queues[end.mine])


def test_a_drain_begins_the_count_of_waves_anew(lab):
    """Two streams of three batches differ from one of six: the drain ends the current wave."""
    waves = Waves(2, 0)
    ends = exchanges(2)
    modules = [lab.mlp(), lab.mlp()]
    lines = lines_of(lab, 0, 2, (3, 3))
    copies = [
        lab.make(
            lab.site_of(module, line, "hetpipe", lab.PAIRS["sgd"][0], waves=waves, exchange=end)
        )
        for module, line, end in zip(modules, lines, ends, strict=True)
    ]

    def job(c):
        for _ in range(2):
            lab.play(modules[c], copies[c], lines[c].ops, data_of(lab, 2, c), lab.squares)
            copies[c].drain()

    together([lambda c=c: job(c) for c in range(2)])
    assert ends[0].log == ends[1].log == [0, 1, 0, 1]
    assert lab.close(lab.values_of(modules[0]), lab.values_of(modules[1]))


def test_versions_are_stashed_inside_a_copy_and_one_more_is_where_the_wave_began(lab):
    """The others' sums are added to the newest version alone: micro-batches in flight read what
    their forward read.
    """
    waves = Waves(3, 0)
    ends = exchanges(2)
    modules = [lab.mlp(), lab.mlp()]
    lines = lines_of(lab, 0, 3, (9, 9))
    copies = [
        lab.make(
            lab.site_of(
                module, line, "hetpipe", lab.PAIRS["momentum"][0], waves=waves, exchange=end
            )
        )
        for module, line, end in zip(modules, lines, ends, strict=True)
    ]
    together(
        [
            lambda c=c: lab.play(modules[c], copies[c], lines[c].ops, lab.vectors, lab.squares)
            for c in range(2)
        ]
    )
    size = sum(parameter.nbytes for parameter in modules[0].parameters())
    assert copies[0].peak_versions == 3
    assert copies[0].held_bytes() == 4 * size


def test_a_weight_that_only_the_others_have_trained_is_taken_in_without_changing_older_versions(
    lab,
):
    """Versions share the values that a copy has not changed; adding the others' sum must not change
    older versions.
    """
    ends = exchanges(2)
    modules = [nn.ParameterList([torch.zeros(2), torch.zeros(2)]) for _ in range(2)]
    line = lab.line_of("hetpipe", 0, 3, 1, 9)
    copies = [
        lab.make(
            lab.site_of(
                module,
                line,
                "hetpipe",
                lambda ps: torch.optim.SGD(ps, lr=1.0),
                waves=Waves(1, 0),
                exchange=end,
            )
        )
        for module, end in zip(modules, ends, strict=True)
    ]

    def job(c):
        for number in range(3):
            copies[c].before_forward(number)
        copies[c].before_backward(0)
        modules[c][c].grad = torch.ones(2)
        copies[c].finished(0)
        copies[c].update(1)
        assert [value.tolist() for value in modules[c]] == [[-1, -1], [-1, -1]]
        copies[c].before_backward(1)
        assert [value.tolist() for value in modules[c]] == [[0, 0], [0, 0]]

    together([lambda c=c: job(c) for c in range(2)])


@pytest.mark.parametrize("exchange", [exchanges(1)[0], None], ids=["alone", "none"])
def test_a_copy_alone_has_nobody_to_tell(lab, exchange):
    """A single virtual worker uses plain weight stashing."""
    module = lab.mlp()
    line = lab.line_of("hetpipe", 0, 2, 1, 5)
    weights = lab.make(
        lab.site_of(
            module,
            line,
            "hetpipe",
            lab.PAIRS["sgd"][0],
            waves=Waves(2, 1),
            exchange=exchange,
        )
    )
    losses, newest = lab.literal(module, line, lab.vectors, lab.squares, lab.Sgd(0.05))
    assert lab.close(lab.play(module, weights, line.ops, lab.vectors, lab.squares), losses)
    weights.drain()
    assert lab.close(lab.values_of(module), newest)


@pytest.mark.parametrize("distance", [0, 2])
def test_a_drain_takes_all_that_was_sent_however_unlike_the_numbers_of_updates(lab, distance):
    """What is left would be taken for a wave of the next stream."""
    waves = Waves(length=1, distance=distance)
    ends = exchanges(2)
    weights = []
    for end in ends:
        module = nn.Linear(2, 2, bias=False).double()
        line = lab.line_of("hetpipe", 0, 1, 1, batches=4)
        site = lab.site_of(module, line, "hetpipe", lab.PAIRS["sgd"][0], waves=waves, exchange=end)
        weights.append((module, lab.make(site)))

    def run(place, updates):
        module, held = weights[place]
        for number in range(updates):
            held.before_forward(number)
            held.before_backward(number)
            module.weight.grad = torch.ones(2, 2, dtype=torch.float64)
            held.finished(number)
            held.update(number + 1)
        held.drain()

    for counts in ((3, 1), (0, 2), (2, 2)):
        together([lambda n=n, count=count: run(n, count) for n, count in enumerate(counts)])
        assert all(entry.empty() for row in ends[0].queues for entry in row)
