"""Start times of encoded programs, against a slow reference."""

from __future__ import annotations

import numpy as np
import pytest
from tests.synthesis.requests import (
    problem_of,
    random_counts,
    random_encoding,
    random_problem,
    rows_of,
)

from penstock.simulate.costs import Costs
from penstock.synthesis.arrays import B, F, Spec, W, empty_encoding, make_workspace
from penstock.synthesis.evaluate import evaluate, is_valid, send
from penstock.synthesis.problem import Constraints


class SlowTimes:
    """Start times, by going over all ranks again and again until nothing changes.

    start, end: by rank and place.
    sent: per link, in order of sending: (op, end of the op, departure, arrival).
    source: by rank and place, link and number there of the message that the op takes.
    updates: per rank, the stages that have been updated in idle time.
    """

    def __init__(self, problem, spec, rows):
        self.problem, self.spec, self.rows = problem, spec, rows
        self.start, self.end, self.sent, self.source = {}, {}, {}, {}
        self.free = [0.0] * problem.ranks
        self.updates = [set() for _ in rows]
        self.arrived = {}
        places = [0] * problem.ranks
        is_moving = True
        while is_moving:
            is_moving = False
            for rank, row in enumerate(rows):
                if places[rank] < len(row) and self.run(rank, places[rank]):
                    places[rank] += 1
                    is_moving = True
        self.is_stuck = places != list(map(len, rows))

    def run(self, rank, place):
        copy, kind = divmod(self.rows[rank][place], 4)
        stages, spec = self.problem.stages, self.spec
        stage = copy % stages
        earlier = [divmod(code, 4) for code in self.rows[rank][:place]]
        way = "up" if kind == F else "down"
        same = (F,) if kind == F else (1, B)
        number = sum(other == copy and k in same for other, k in earlier)
        begin = self.free[rank]
        if kind != W and stage != (0 if kind == F else stages - 1):
            if (way, copy, number) not in self.arrived:
                return False
            arrival, self.source[rank, place] = self.arrived[way, copy, number]
            if arrival > begin:
                self.update_in_gap(rank, earlier, begin, arrival)
            begin = max(begin, arrival)
        self.start[rank, place] = begin
        end = self.end[rank, place] = self.free[rank] = begin + spec.cost[copy, kind]
        if kind == W or stage == (stages - 1 if kind == F else 0):
            return True
        taker = copy + 1 if kind == F else copy - 1
        target = spec.copies[taker, 0]
        if target == rank:
            self.arrived[way, taker, number] = end, (rank, place)
            return True
        link = self.sent.setdefault((rank, target), [])
        departure = max(end, link[-1][3] if link else 0.0)
        seconds = self.problem.costs.up[stage] if kind == F else self.problem.costs.down[stage - 1]
        link.append((place, end, departure, departure + seconds))
        self.arrived[way, taker, number] = departure + seconds, (rank, target, len(link) - 1)
        return True

    def update_in_gap(self, rank, earlier, begin, until):
        copies = self.problem.copies_of_rank[rank]
        if len(self.problem.routes) > 1 or max(map(len, self.problem.copies_of_rank)) == 1:
            return
        for copy in copies:
            released = sum(other == copy and kind in (W, B) for other, kind in earlier)
            update_s = self.problem.costs.update[copy]
            is_due = released == self.spec.counts[0] and copy not in self.updates[rank]
            if is_due and begin + update_s <= until:
                self.updates[rank].add(copy)
                begin += update_s

    def makespan(self):
        ends = []
        for rank, copies in enumerate(self.problem.copies_of_rank):
            stages = {copy % self.problem.stages for copy in copies}
            free = [self.free[rank]]
            if len(self.problem.routes) > 1:
                free.append(self.free[self.problem.ranks - 1 - rank])
            late = stages - self.updates[rank]
            ends.append(max(free) + sum(self.problem.costs.update[stage] for stage in late))
        return max(ends)


def cases(seeds, **options):
    """Problems with random programs."""
    for seed in range(seeds):
        rng = np.random.default_rng(1000 + seed)
        problem = random_problem(seed, **options)
        spec = problem.spec(random_counts(problem, rng))
        yield problem, spec, random_encoding(problem, spec, rng)


def test_times_are_those_of_a_slow_reference_and_a_deadlock_has_none():
    """Unlike stages and boundaries, ties, queues on links, updates in gaps and at the end."""
    stuck = gaps = queues = 0
    for problem, spec, encoding in cases(150):
        work = make_workspace(spec)
        # On a workspace that other programs have used.
        evaluate(spec, random_encoding(problem, spec, np.random.default_rng(7), swaps=0.0), work)
        seconds = evaluate(spec, encoding, work)
        slow = SlowTimes(problem, spec, rows_of(encoding))
        stuck += slow.is_stuck
        if slow.is_stuck:
            assert seconds == -1.0
            continue
        assert seconds == slow.makespan()
        assert {key: work.start[key] for key in slow.start} == slow.start
        gaps += sum(map(len, slow.updates))
        queues += sum(row[2] > row[1] for link in slow.sent.values() for row in link)
    assert stuck > 10
    assert gaps > 10
    assert queues > 50


def test_causes_explain_every_start():
    """The op before on the rank, the op that sends the input, or the first of the messages that
    follow each other on the link without a gap.
    """
    kinds = {"none": 0, "rank": 0, "message": 0, "queue": 0}
    for problem, spec, encoding in cases(100):
        work = make_workspace(spec)
        slow = SlowTimes(problem, spec, rows_of(encoding))
        if evaluate(spec, encoding, work) < 0:
            continue
        length = encoding.codes.shape[1]
        for (rank, place), start in slow.start.items():
            cause = int(work.cause[rank, place])
            before = slow.end[rank, place - 1] if place else 0.0
            if start == before:
                assert cause == (rank * length + place - 1 if place else -1)
                kinds["rank" if place else "none"] += 1
                continue
            sender, target, number = slow.source[rank, place]
            link = slow.sent[sender, target]
            first = number
            while link[first][2] > link[first][1]:
                first -= 1
            assert cause == sender * length + link[first][0]
            kinds["message" if first == number else "queue"] += 1
    assert min(kinds.values()) > 0


def test_programs_are_valid_if_ops_of_a_copy_are_in_order_and_all_fits():
    """Each rank alone; any two ops may have been exchanged, and limits are met exactly."""
    verdicts = {True: 0, False: 0}
    exact = 0
    for number, (problem, spec, encoding) in enumerate(cases(100)):
        rng = np.random.default_rng(number)
        work = make_workspace(spec)
        work.done[:] = rng.integers(9, size=work.done.shape)
        for rank, row in enumerate(rows_of(encoding)):
            if number % 2:
                i, j = rng.integers(len(row), size=2)
                row[i], row[j] = row[j], row[i]
                encoding.codes[rank, : len(row)] = row
            count = {}
            bytes_held = peak = 0
            is_ordered = True
            for code in row:
                copy, kind = divmod(code, 4)
                size = problem.costs.memory[copy % problem.stages]
                kinds = {k: count.get((copy, k), 0) for k in range(4)}
                is_ordered &= kind not in (1, B) or kinds[F] > kinds[1] + kinds[B]
                # Halves pair up among themselves, but any backward lets the next W run.
                is_ordered &= kind != W or kinds[1] > kinds[W]
                count[copy, kind] = kinds[kind] + 1
                bytes_held += size * ((kind == F) - (kind in (W, B)))
                peak = max(peak, bytes_held)
            expected = is_ordered and peak <= problem.limits[rank]
            exact += expected and peak == problem.limits[rank]
            assert is_valid(spec, encoding, work, rank) == expected
            verdicts[expected] += 1
    assert min(verdicts.values()) > 50
    assert exact > 10


def test_a_message_leaves_when_it_is_ready_and_the_link_is_free():
    """Each direction is a link of its own, and stays occupied until the arrival."""
    link = np.zeros((2, 2))
    assert send(link, 0, 1, 3.0, 2.0) == 5.0
    assert send(link, 0, 1, 4.0, 2.0) == 7.0
    assert send(link, 1, 0, 1.0, 0.5) == 1.5
    assert link.tolist() == [[0.0, 7.0], [1.5, 0.0]]


def test_a_middle_rank_updates_the_stage_of_both_its_copies_once():
    """Three stages both ways: rank 1 has stage 1 twice, ranks 0 and 2 have stages 0 and 2."""
    problem = random_problem(0, "bidirectional", 2, limited=False)
    cost = np.zeros((6, 8))
    cost[:, 4] = [1.0, 10.0, 2.0, 1.0, 10.0, 2.0]
    ranks = np.array([0, 1, 2, 2, 1, 0])
    copies = np.stack([ranks, [1, 2, -1, 4, 5, -1], [-1, 0, 1, -1, 3, 4]], axis=1)
    spec = Spec(
        np.array([1, 1]),
        np.array([[0, 5], [1, 4], [2, 3]]),
        copies,
        cost,
        np.full(3, np.inf),
    )
    assert problem.routes[0] == problem.routes[1][::-1]
    rows = [[4 * 0, 4 * 5, 4 * 5 + B, 4 * 0 + B], [4, 16, 7, 19], [12, 8, 11, 15]]
    encoding = empty_encoding(spec)
    for rank, row in enumerate(rows):
        encoding.codes[rank, : len(row)] = row
        encoding.lengths[rank] = len(row)
    assert evaluate(spec, encoding, make_workspace(spec)) == 10.0


@pytest.mark.parametrize(("gap", "late"), [(4.0, 2.0), (5.0, 0.0), (2.0, 3.0), (1.0, 5.0)])
def test_several_updates_share_the_idle_time_before_a_message(gap, late):
    """Rank 0 has stages 0, 2 and 4, whose updates take 1, 3 and 2 s; the gradient of stage 1 comes
    after `gap` seconds, and updates that do not fit run at the end.
    """
    costs = Costs(
        forward=(1.0,) * 6,
        backward=(1.0, gap, 1.0, 0.0, 1.0, 1.0),
        update=(1.0, 0.0, 3.0, 0.0, 2.0, 0.0),
    )
    problem = problem_of(costs, 1, Constraints("interleaved", ranks=2))
    spec = problem.spec((1,))
    encoding = empty_encoding(spec)
    for rank, text in enumerate(["0F0 2F0 4F0 4B0 2B0 0B0", "1F0 3F0 5F0 5B0 3B0 1B0"]):
        codes = [4 * int(op[0]) + {"F": F, "B": B}[op[1]] for op in text.split()]
        encoding.codes[rank, : len(codes)] = codes
        encoding.lengths[rank] = len(codes)
    # Six forwards, four backwards of a second, the gap, and the update of stage 0.
    assert evaluate(spec, encoding, make_workspace(spec)) == 10.0 + gap + 1.0 + late
