"""Versions: every version that something in flight still reads is kept as it was.

The parameters are pointed at the version that an op reads. An update copies the newest version and
steps the copy, or, if nobody else reads the newest, steps it where it is. Versions share what an
update has not touched: a parameter that had no gradient is left alone by torch's optimizers.

Source: Narayanan et al. 2019, PipeDream, section 3.3 (weight stashing); 2021, PipeDream-2BW,
section 3.1 (two versions).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from penstock.errors import RunError
from penstock.optim.blocks import Block, Layout, copy, point, take
from penstock.optim.catalogue import register
from penstock.optim.stage_weights import Site, StageWeights
from penstock.weights.uses import Use


@dataclass(frozen=True, eq=False)
class _Version:
    """One block for each group of parameters, and the values in them by parameter."""

    blocks: list[Block]
    tensors: list[Tensor]


@dataclass(frozen=True)
class _Lent:
    """The memory of one version that holds another's values for now; `own` has, by block, where its
    own are meanwhile.
    """

    owner: _Version
    shown: _Version
    own: list[tuple[Block, Block]]


@final
class Versions(StageWeights):
    """The versions of a stage's weights that are in use."""

    def __init__(self, site: Site) -> None:
        self._stage, self._update, self._use = site.stage, site.update, site.use
        self._layout = Layout(site.update.parameters)
        self._free: list[list[Block]] = [[] for _ in self._layout.groups]
        first = self._version(self._layout.present())
        self._held = {0: first}
        self._newest = 0
        self._shown = first
        self._lent: _Lent | None = None
        self._in_flight: dict[int, Use] = {}
        self._next_forward = 0
        self._peak = 1

    def before_forward(self, number: int) -> None:
        """Point at the version that it reads, and keep that until its backward is done."""
        use = self._use(number)
        self._in_flight[number] = use
        self._next_forward = use.next_forward
        self._give_back()
        self._show(self._find(use.reads.forward, number))

    def before_backward(self, number: int) -> None:
        """Point at the version that it reads."""
        reads = self._in_flight[number].reads
        owner, read = self._find(reads.forward, number), self._find(reads.backward, number)
        if self._lent is not None and not (self._lent.owner is owner and self._lent.shown is read):
            self._give_back()
        self._show(owner)
        if owner is not read and self._lent is None:
            self._lend(owner, read)

    def finished(self, number: int) -> None:
        """It reads nothing any more."""
        self._in_flight.pop(number, None)

    def update(self, version: int) -> None:
        """Let go what nobody reads, then step what will be the newest."""
        self._give_back()
        read = {
            v for use in self._in_flight.values() for v in (use.reads.forward, use.reads.backward)
        }
        for old in list(self._held):
            if old != self._newest and old < self._next_forward and old not in read:
                self._let_go(old)
        before = self._held[self._newest]
        stays = self._newest in read or self._newest >= self._next_forward
        touched = self._touched()
        alone = 0 if stays else 1
        # Where the newest version is shared with an older one, or still read, the step needs room
        # of its own.
        apart = [block for block in before.blocks if block.group in touched and block.users > alone]
        after = self._changed(before, apart)
        if not stays:
            self._let_go(self._newest)
        self._held[version] = after
        self._newest = version
        self._show(after, surely=True)
        self._update.advance()
        take(self._update.parameters, after.tensors)
        if len(self._held) > self._peak:
            self._peak = max(self._peak, self.versions)

    def drain(self) -> None:
        """The newest version alone stays, as version 0. Room that is free now is kept for the next
        stream.
        """
        self._in_flight.clear()
        self._give_back()
        for old in [version for version in self._held if version != self._newest]:
            self._let_go(old)
        self._held = {0: self._held[self._newest]}
        self._newest = self._next_forward = 0
        self._show(self._held[0], surely=True)

    @property
    def versions(self) -> int:
        """The most that any parameter has."""
        places = zip(*(version.blocks for version in self._held.values()), strict=True)
        return max((len(set(map(id, place))) for place in places), default=1)

    @property
    def peak_versions(self) -> int:
        """The most after any update."""
        return self._peak

    def held_bytes(self) -> int:
        """All versions, and room that is free for the next."""
        held = {id(block): block for version in self._held.values() for block in version.blocks}
        lent = [spare for _, spare in self._lent.own] if self._lent else []
        return sum(
            block.flat.nbytes for blocks in (held.values(), lent, *self._free) for block in blocks
        )

    def newest(self) -> list[Tensor]:
        """The values of the newest version, block by block."""
        self._give_back()
        return [block.flat for block in self._held[self._newest].blocks]

    def newest_for_writing(self) -> list[Tensor]:
        """Likewise; no other version shares them from now on. The parameters are these."""
        self._give_back()
        before = self._held[self._newest]
        after = self._changed(before, [block for block in before.blocks if block.users > 1])
        self._let_go(self._newest)
        self._held[self._newest] = after
        self._show(after, surely=True)
        return [block.flat for block in after.blocks]

    def _find(self, version: int, number: int) -> _Version:
        found = self._held.get(version)
        if found is None:
            state = (
                "has not been made yet"
                if version > self._newest
                else "was let go, since nothing in flight was to read it"
            )
            held = ", ".join(map(str, sorted(self._held)))
            raise RunError(
                f"stage {self._stage}: micro-batch {number} reads weight version {version}, which {state}; held are {held}. "
                "The program does not do what the weight rule says: hold the two against each other with ps.verify"
            )
        return found

    def _show(self, version: _Version, *, surely: bool = False) -> None:
        """Point the parameters at a version; `surely` even those that a layer has moved elsewhere
        since.
        """
        if surely:
            point(self._update.parameters, version.tensors)
        elif version is not self._shown:
            for parameter, wanted, shown in zip(
                self._update.parameters, version.tensors, self._shown.tensors, strict=True
            ):
                if wanted is not shown:
                    parameter.data = wanted
        self._shown = version

    def _touched(self) -> set[int]:
        """Groups with a gradient."""
        parameters = self._update.parameters
        return {
            group
            for group, indices in enumerate(self._layout.groups)
            if any(parameters[i].grad is not None for i in indices)
        }

    def _version(self, blocks: list[Block]) -> _Version:
        for block in blocks:
            block.users += 1
        return _Version(blocks, self._layout.tensors(blocks))

    def _changed(self, version: _Version, apart: list[Block]) -> _Version:
        """The same values, those in `apart` in blocks of their own."""
        if not apart:
            for block in version.blocks:
                block.users += 1
            return _Version(version.blocks, version.tensors)
        own = {block.group: self._room(block.group) for block in apart}
        copy([own[block.group].flat for block in apart], [block.flat for block in apart])
        return self._version([own.get(block.group, block) for block in version.blocks])

    def _room(self, group: int) -> Block:
        return self._free[group].pop() if self._free[group] else self._layout.room(group)

    def _let_go(self, version: int) -> None:
        for block in self._held.pop(version).blocks:
            block.users -= 1
            if not block.users:
                self._free[block.group].append(block)

    def _lend(self, owner: _Version, shown: _Version) -> None:
        """Let what graphs have saved of one version be another's values, until `_give_back`.

        For rules by which a backward reads something else than its forward did: graphs refer to the
        memory of what was read then.
        """
        pairs = [
            (block, other)
            for block, other in zip(owner.blocks, shown.blocks, strict=True)
            if block is not other
        ]
        own = [(block, self._room(block.group)) for block, _ in pairs]
        copy([spare.flat for _, spare in own], [block.flat for block, _ in own])
        copy([block.flat for block, _ in pairs], [other.flat for _, other in pairs])
        self._lent = _Lent(owner, shown, own)

    def _give_back(self) -> None:
        if self._lent is None:
            return
        copy(
            [block.flat for block, _ in self._lent.own], [spare.flat for _, spare in self._lent.own]
        )
        for _, spare in self._lent.own:
            self._free[spare.group].append(spare)
        self._lent = None


@register("versions")
def versions(site: Site) -> Versions:
    """A storage for every version that is read."""
    return Versions(site)
