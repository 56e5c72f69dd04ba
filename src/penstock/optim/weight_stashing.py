"""Weight stashing: every weight version that a micro-batch in flight still reads is kept.

The parameters point to the version that an op reads. An update copies the newest version and steps
the copy; if no micro-batch in flight reads the newest version, it is stepped in place. Versions
share the values that an update has not changed: torch's optimizers skip parameters without a
gradient.

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
from penstock.weights.weight_uses import Use


@dataclass(frozen=True, eq=False)
class _Version:
    """One version: a block for each group of parameters, and its values by parameter."""

    blocks: list[Block]
    tensors: list[Tensor]


@dataclass(frozen=True)
class _Overlay:
    """Memory of one version that temporarily holds the values of another.

    Attributes:
        owner: the version whose memory is used.
        content: the version whose values it holds.
        saved: for each overwritten block, the block and a copy of its own values.
    """

    owner: _Version
    content: _Version
    saved: list[tuple[Block, Block]]


@final
class Versions(StageWeights):
    """The weight versions of a stage that are in use."""

    def __init__(self, site: Site) -> None:
        self._stage, self._update, self._use = site.stage, site.update, site.use
        self._layout = Layout(site.update.parameters)
        self._free: list[list[Block]] = [[] for _ in self._layout.groups]
        first = self._version(self._layout.current_blocks())
        self._versions = {0: first}
        self._newest = 0
        self._current = first
        self._overlay: _Overlay | None = None
        self._in_flight: dict[int, Use] = {}
        self._next_forward = 0
        self._peak = 1

    def before_forward(self, number: int) -> None:
        """Point to the version that the forward reads, and keep it until its backward is done."""
        use = self._use(number)
        self._in_flight[number] = use
        self._next_forward = use.next_forward
        self._restore()
        self._point_to(self._stored_version(use.reads.forward, number))

    def before_backward(self, number: int) -> None:
        """Point to the version that the backward reads.

        The graph refers to the memory that the forward read. If the backward reads another version,
        its values are copied into that memory.
        """
        reads = self._in_flight[number].reads
        owner = self._stored_version(reads.forward, number)
        content = self._stored_version(reads.backward, number)
        overlay = self._overlay
        if overlay is not None and not (overlay.owner is owner and overlay.content is content):
            self._restore()
        self._point_to(owner)
        if owner is not content and self._overlay is None:
            self._overwrite(owner, content)

    def finished(self, number: int) -> None:
        """Note that a micro-batch reads no version any more."""
        self._in_flight.pop(number, None)

    def update(self, version: int) -> None:
        """Release the versions that no micro-batch reads any more, then step the newest."""
        self._restore()
        read: set[int] = set()
        for use in self._in_flight.values():
            read.add(use.reads.forward)
            read.add(use.reads.backward)
        self._release_unread(read)
        # Later forwards read version `next_forward` or newer ones.
        is_kept = self._newest in read or self._newest >= self._next_forward
        after = self._step_target(is_kept)
        # After `_step_target`, which has become a user of the blocks that it shares: released
        # before, they would be free memory.
        if not is_kept:
            self._release(self._newest)
        self._versions[version] = after
        self._newest = version
        self._point_to(after, force=True)
        self._update.advance()
        take(self._update.parameters, after.tensors)
        # Cheaper than `versions`, which is at most this number.
        if len(self._versions) > self._peak:
            self._peak = max(self._peak, self.versions)

    def _release_unread(self, read: set[int]) -> None:
        """Release the versions that neither a micro-batch in flight nor a later one reads."""
        for version in list(self._versions):
            if version not in (self._newest, *read) and version < self._next_forward:
                self._release(version)

    def _step_target(self, is_kept: bool) -> _Version:
        """Return the values of the newest version in memory that the step may change.

        Blocks that the step changes are copied if an older version shares them, or if the newest
        version itself is kept.
        """
        newest = self._versions[self._newest]
        changed_groups = self._groups_with_gradient()
        max_users = 0 if is_kept else 1
        copied = [
            block
            for block in newest.blocks
            if block.group in changed_groups and block.users > max_users
        ]
        return self._with_copied_blocks(newest, copied)

    def drain(self) -> None:
        """Keep the newest version alone, as version 0, and unused memory for the next stream."""
        self._in_flight.clear()
        self._restore()
        for released in [version for version in self._versions if version != self._newest]:
            self._release(released)
        self._versions = {0: self._versions[self._newest]}
        self._newest = self._next_forward = 0
        self._point_to(self._versions[0], force=True)

    @property
    def versions(self) -> int:
        """Number of versions of the parameter that has most."""
        blocks_by_group = zip(*(version.blocks for version in self._versions.values()), strict=True)
        return max(len(set(map(id, group_blocks))) for group_blocks in blocks_by_group)

    @property
    def peak_versions(self) -> int:
        """Maximum of `versions` after any update."""
        return self._peak

    def held_bytes(self) -> int:
        """Return the bytes of all versions and of unused memory kept for the next ones."""
        blocks: dict[int, Block] = {}
        for version in self._versions.values():
            blocks.update((id(block), block) for block in version.blocks)
        unshared = list(blocks.values())
        if self._overlay:
            unshared += [copied for _, copied in self._overlay.saved]
        for free_blocks in self._free:
            unshared += free_blocks
        return sum(block.flat.nbytes for block in unshared)

    def newest(self) -> list[Tensor]:
        """Return the values of the newest version, one tensor per block."""
        self._restore()
        return [block.flat for block in self._versions[self._newest].blocks]

    def unshared_newest(self) -> list[Tensor]:
        """Return the values of the newest version, copied where other versions share them.

        The parameters point to the returned memory.
        """
        self._restore()
        before = self._versions[self._newest]
        after = self._with_copied_blocks(
            before, [block for block in before.blocks if block.users > 1]
        )
        self._release(self._newest)
        self._versions[self._newest] = after
        self._point_to(after, force=True)
        return [block.flat for block in after.blocks]

    def _stored_version(self, version: int, number: int) -> _Version:
        """Return a version that a micro-batch reads."""
        stored = self._versions.get(version)
        if stored is None:
            state = (
                "does not exist yet"
                if version > self._newest
                else "was released, since no micro-batch in flight was to read it"
            )
            available = ", ".join(map(str, sorted(self._versions)))
            raise RunError(
                f"stage {self._stage}: micro-batch {number} reads weight version {version}, which "
                f"{state}; available are {available}. The program does not follow the weight rule: "
                "compare the two with ps.verify"
            )
        return stored

    def _point_to(self, version: _Version, *, force: bool = False) -> None:
        """Point the parameters to a version.

        Args:
            version: the version.
            force: also repoint parameters that a layer has moved to other memory.
        """
        if force:
            point(self._update.parameters, version.tensors)
        elif version is not self._current:
            for parameter, target, current in zip(
                self._update.parameters, version.tensors, self._current.tensors, strict=True
            ):
                if target is not current:
                    parameter.data = target
        self._current = version

    def _groups_with_gradient(self) -> set[int]:
        """Return the indices of the groups in which a parameter has a gradient."""
        parameters = self._update.parameters
        groups = set()
        for group, indices in enumerate(self._layout.groups):
            if any(parameters[i].grad is not None for i in indices):
                groups.add(group)
        return groups

    def _version(self, blocks: list[Block]) -> _Version:
        """Return a version of these blocks, which count one user more."""
        for block in blocks:
            block.users += 1
        return _Version(blocks, self._layout.tensors(blocks))

    def _with_copied_blocks(self, version: _Version, copied: list[Block]) -> _Version:
        """Return a version with the same values, of which the blocks in `copied` are copies."""
        if not copied:
            for block in version.blocks:
                block.users += 1
            return _Version(version.blocks, version.tensors)
        copies = {block.group: self._new_block(block.group) for block in copied}
        copy([copies[block.group].flat for block in copied], [block.flat for block in copied])
        return self._version([copies.get(block.group, block) for block in version.blocks])

    def _new_block(self, group: int) -> Block:
        """Return unused memory for a group, from an earlier version if there is any."""
        return self._free[group].pop() if self._free[group] else self._layout.new_block(group)

    def _release(self, version: int) -> None:
        """Drop a version; memory that no other version uses is kept for later ones."""
        for block in self._versions.pop(version).blocks:
            block.users -= 1
            if not block.users:
                self._free[block.group].append(block)

    def _overwrite(self, owner: _Version, content: _Version) -> None:
        """Put the values of `content` into the memory of `owner`, until `_restore`.

        For rules by which a backward reads another version than its forward: graphs refer to the
        memory that the forward read.
        """
        pairs = [
            (block, source)
            for block, source in zip(owner.blocks, content.blocks, strict=True)
            if block is not source
        ]
        saved = [(block, self._new_block(block.group)) for block, _ in pairs]
        copy([spare.flat for _, spare in saved], [block.flat for block, _ in saved])
        copy([block.flat for block, _ in pairs], [source.flat for _, source in pairs])
        self._overlay = _Overlay(owner, content, saved)

    def _restore(self) -> None:
        """Undo `_overwrite`."""
        if self._overlay is None:
            return
        saved = self._overlay.saved
        copy([block.flat for block, _ in saved], [spare.flat for _, spare in saved])
        for _, spare in saved:
            self._free[spare.group].append(spare)
        self._overlay = None


@register("versions")
def versions(site: Site) -> Versions:
    """Return weights with memory for every version that is read."""
    return Versions(site)
