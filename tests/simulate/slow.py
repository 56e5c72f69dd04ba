"""A slow simulator that shares no code with Penstock's, and random schedules with all that a
schedule can say.

Written from the words of docs/design.md and of `simulate_schedule`: lists, dictionaries and `min`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

from hypothesis import strategies as st
from tests.schedule.custom_schedules import build_custom, build_stream

from penstock.errors import ScheduleError
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.rules import needs
from penstock.schedule.slicing import Slicing
from penstock.verify.verify import verify


@dataclass
class Slow:
    """One run: `seconds(rank, index)` of an op, `hop(op)` of its message; fills `times` and
    `moves`.
    """

    schedule: Schedule
    seconds: object
    hop: object
    overlap: bool = True
    links: str = "duplex"
    network: object = None

    def __post_init__(self):
        self.programs = [
            [(op.kind.value, op.stage, op.micro_batch) for op in program]
            for program in self.schedule.programs
        ]
        self.home = {
            op[1:]: rank
            for rank, program in enumerate(self.programs)
            for op in program
            if op[0] == "F"
        }
        self.top = max(stage for stage, _ in self.home)
        pairs = {
            (tuple(map(str, a[:1])) + a[1:], tuple(map(str, b[:1])) + b[1:])
            for a, b in self.schedule.pairs
        }
        self.units = []
        for program in self.programs:
            units, index = [], 0
            while index < len(program):
                size = 2 if tuple(program[index : index + 2]) in pairs else 1
                units.append(list(range(index, index + size)))
                index += size
            self.units.append(units)
        self.times, self.moves = {}, {}
        self.run()

    def inputs(self, rank, op):
        """Names of the values that an op takes."""
        letter, stage, m = op
        owner = self.home.get((stage, m))
        slicing = self.schedule.slicing
        causal = slicing is not None and slicing.along == "tokens"

        def beside(n):
            return (
                0 <= n < len(slicing.share)
                and slicing.micro_batch_of[n] == slicing.micro_batch_of[m]
            )

        if letter == "F":
            return [("up", stage, m)] * (stage > 0) + (
                [("F", stage, m - 1)] if causal and beside(m - 1) else []
            )
        if letter in "BI":
            after = [("grad", stage, m + 1)] if causal and beside(m + 1) else []
            return [("F", stage, m)] + [("down", stage, m)] * (stage < self.top) + after
        if letter == "W":
            return [("grad", stage, m)]
        if letter == "E" and rank != owner:
            return [("evicted", stage, m)]
        if letter == "L" and rank == owner:
            return [("loaded", stage, m)]
        if letter == "U" and not self.meets(m):
            return [
                ("wave", other, stage, m - self.behind()) for other in self.awaited(rank, stage, m)
            ]
        return []

    def behind(self):
        """How many versions the others may be behind when a wave ends."""
        return self.schedule.stream.waves.length * self.schedule.stream.waves.distance

    def meets(self, version):
        """Whether copies of a stage start the U of this version together."""
        waves = self.schedule.stream and self.schedule.stream.waves
        return not waves or (version % waves.length == 0 and waves.distance == 0)

    def awaited(self, rank, stage, version):
        """Whose earlier U the last U of a wave waits for."""
        if version % self.schedule.stream.waves.length or version <= self.behind():
            return []
        held = ("U", stage, version - self.behind())
        return [
            other
            for other, program in enumerate(self.programs)
            if other != rank and held in program
        ]

    def outputs(self, rank, op):
        """What an op makes: values that stay, and (name, rank) of the one that leaves."""
        letter, stage, m = op
        owner = self.home.get((stage, m))
        stays = {
            "F": [("F", stage, m)],
            "B": [("grad", stage, m)],
            "I": [("grad", stage, m)],
            "U": [("wave", rank, stage, m)],
        }.get(letter, [])
        if letter == "F" and stage < self.top:
            return stays, (("up", stage + 1, m), self.home[stage + 1, m])
        if letter in "BI" and stage > 0:
            return stays, (("down", stage - 1, m), self.home[stage - 1, m])
        if letter in "EL" and (letter == "E") == (rank == owner):
            others = [
                other
                for other, program in enumerate(self.programs)
                if op in program and other != rank
            ]
            return stays, (("evicted" if letter == "E" else "loaded", stage, m), others[0])
        return stays, None

    def media(self, source, target):
        """What carries a message, and the seconds for which it is not in its way any more."""
        if self.network is not None:
            hosts = self.network.hosts
            if hosts[source] != hosts[target]:
                sender = ("sends", hosts[source] if self.network.shared else (source,))
                receiver = [("receives", hosts[target])] if self.network.shared else []
                return [sender, *receiver], self.network.latency_s
        medium = {
            "duplex": (source, target),
            "half-duplex": tuple(sorted((source, target))),
            "shared": None,
        }[self.links]
        return [medium], 0.0

    def run(self):
        """Start what can be started; then take up the op that ends next; until nothing is under
        way.
        """
        arrival_of, free, medium_free = {}, [0.0] * len(self.programs), {}
        at, under_way, waiting_for = [0] * len(self.programs), [], {}
        while True:
            for rank in range(len(self.programs)):
                self.start(rank, at, free, arrival_of, under_way, waiting_for)
            if not under_way:
                break
            ended = min(under_way)
            under_way.remove(ended)
            end, rank, index = ended
            op = self.programs[rank][index]
            stays, leaves = self.outputs(rank, op)
            arrival_of |= dict.fromkeys(stays, end)
            arrival = end
            if leaves is not None:
                name, target = leaves
                if target != rank:
                    media, latency = self.media(rank, target)
                    begin = max(end, *(medium_free.get(medium, 0.0) for medium in media))
                    arrival = begin + self.hop(op)
                    for medium in media:
                        medium_free[medium] = max(begin, arrival - latency)
                    self.moves[rank, op, target] = (begin, arrival)
                arrival_of[name] = arrival
            free[rank] = max(free[rank], end if self.overlap else arrival)
            waiting_for[rank].discard(index)
        assert all(place == len(units) for place, units in zip(at, self.units, strict=True)), (
            "the slow simulator is stuck"
        )

    def start(self, rank, at, free, arrival_of, under_way, waiting_for):
        """Start the next unit of a rank, if all is there."""
        if waiting_for.get(rank) or at[rank] == len(self.units[rank]):
            return
        unit = self.units[rank][at[rank]]
        ops = [self.programs[rank][index] for index in unit]
        together = {rank: unit}
        if ops[0][0] == "U" and self.meets(ops[0][2]):
            together = {
                other: [program.index(ops[0])]
                for other, program in enumerate(self.programs)
                if ops[0] in program
            }
            for other, (index,) in together.items():
                if (
                    waiting_for.get(other)
                    or at[other] == len(self.units[other])
                    or self.units[other][at[other]] != [index]
                ):
                    return
        needed = [name for op in ops for name in self.inputs(rank, op)]
        if not all(name in arrival_of for name in needed):
            return
        begin = max([free[other] for other in together] + [arrival_of[name] for name in needed])
        for other, indices in together.items():
            waiting_for[other] = set(indices)
            at[other] += 1
            for index in indices:
                end = begin + self.seconds(other, index)
                self.times[other, index] = (begin, end)
                under_way.append((end, other, index))


def rich_schedule(seed: int, size: int, cut: str) -> Schedule:
    """A sound schedule with pairs, evictions and slices put into a random one, as many as it bears;
    or a random stream.
    """
    rng = random.Random(seed)
    stages, ranks, micro_batches = (rng.randint(1, size) for _ in range(3))
    if cut in ("stream", "waves"):
        return build_stream(
            seed, stages, min(ranks, 2), min(micro_batches, 2), waves=cut == "waves"
        )
    case_schedule = build_custom(seed, stages, ranks, micro_batches, rng.random() < 0.5)
    if cut == "samples":
        case_schedule = bearing(
            case_schedule,
            replace(case_schedule, slicing=slicing_of(rng, cut, case_schedule.slices)),
        )
    if cut == "tokens":
        case_schedule = causal(rng, stages, ranks, slicing_of(rng, cut, micro_batches + 1))
    for _ in range(rng.randint(0, 3)):
        case_schedule = bearing(case_schedule, evicted(rng, case_schedule))
    candidates = [pair for program in case_schedule.programs for pair in pairwise(program)]
    for pair in rng.sample(candidates, min(len(candidates), rng.randint(0, 4))):
        case_schedule = bearing(
            case_schedule, replace(case_schedule, pairs=case_schedule.pairs | {pair})
        )
    return case_schedule


def bearing(schedule, changed):
    """The changed schedule if it is sound, else the old one."""
    try:
        verify(changed)
    except ScheduleError:
        return schedule
    return changed


def slicing_of(rng, along, left):
    """Return slices of a random number of micro-batches, `left` slices in total."""
    shares = []
    while left:
        count = rng.randint(1, min(3, left))
        shares.append({1: (1.0,), 2: (0.25, 0.75), 3: (0.5, 0.25, 0.25)}[count])
        left -= count
    return Slicing(along, tuple(shares))


def causal(rng, stages, ranks, slicing):
    """A random order of the ops of sliced sequences: forwards in the order of the tokens, backwards
    against it.
    """
    home = [rng.randrange(ranks) for _ in range(stages)]
    left = [
        Op(kind, stage, n)
        for stage in range(stages)
        for n in range(len(slicing.share))
        for kind in rng.choice([(Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W)])
    ]
    programs, done = [[] for _ in range(ranks)], set()
    while left:
        ready = [
            op for op in left if all(done & set(group) for group in needs(op, stages, slicing))
        ]
        op = rng.choice(ready)
        left.remove(op)
        done.add(op)
        programs[home[op.stage]].append(op)
    for stage, rank in enumerate(home):
        programs[rank].append(Op(Kind.U, stage, 1))
    return Schedule(tuple(map(tuple, programs)), "causal", slicing=slicing)


def evicted(rng, schedule):
    """With one micro-batch of one stage sent away after its forward, and brought back before its
    backward.
    """
    (stage, m), owner = rng.choice(sorted(schedule.placement.items()))
    programs = [list(program) for program in schedule.programs]
    owner_program = programs[owner]
    first = owner_program.index(Op(Kind.F, stage, m))
    last = min(
        (
            owner_program.index(op)
            for op in (Op(Kind.B, stage, m), Op(Kind.I, stage, m))
            if op in owner_program
        ),
        default=len(owner_program),
    )
    partner = rng.choice([rank for rank in range(schedule.ranks) if rank != owner] or [owner])
    away, back = sorted(rng.randint(first + 1, max(last, first + 1)) for _ in range(2))
    owner_program.insert(back, Op(Kind.L, stage, m))
    owner_program.insert(away, Op(Kind.E, stage, m))
    if partner != owner:
        places = sorted(rng.randint(0, len(programs[partner])) for _ in range(2))
        programs[partner].insert(places[1], Op(Kind.L, stage, m))
        programs[partner].insert(places[0], Op(Kind.E, stage, m))
    return replace(schedule, programs=tuple(map(tuple, programs)))


def rich_schedules(size: int = 4) -> st.SearchStrategy[Schedule]:
    """Return schedules of up to `size` stages, ranks and micro-batches or slices."""
    return st.builds(
        rich_schedule,
        st.integers(0, 2**32),
        st.just(size),
        st.sampled_from(["", "", "samples", "tokens", "stream", "waves"]),
    )
