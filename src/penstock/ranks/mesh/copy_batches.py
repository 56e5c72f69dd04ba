"""The batches of copies of a pipeline, each of which reads its own, as one joined batch.

Copy c of k runs the micro-batches c, c + k, c + 2k, ... of the joined batch. For two copies with two
micro-batches each, of 4 and of 6 samples:

    copy 0   x x | x x
    copy 1   y y y | y y y        joined batch:  x x  y y y  x x  y y y

A process has the inputs of its copy alone. The last stage has the targets of all copies, since the
weight of a micro-batch's loss depends on what all others count.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.batches.batch import common_sample_count
from penstock.batches.batch_parts import BatchPart
from penstock.batches.splitting import cut, even_sizes, join, sample_count
from penstock.errors import RanksDiffer, SettingError
from penstock.ranks.calls import is_compared_whole
from penstock.ranks.checksum import whole_checksum
from penstock.ranks.mesh.pipeline_mesh import PipelineMesh
from penstock.ranks.process_world import DistributedWorld
from penstock.ranks.settings.run_config import RunConfig
from penstock.ranks.world import World
from penstock.schedule.op import Schedule
from penstock.tracing.traced_chain import TracedChain
from penstock.transport.process_group import naming_lost_ranks
from penstock.values.constants import describe
from penstock.values.structure import flatten, tensors_of, unflatten


@dataclass(frozen=True)
class _Shares:
    """The samples of the copies' batches.

    Attributes:
        by_copy: by copy, the numbers of samples of its micro-batches.
    """

    by_copy: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of samples of all micro-batches, in the order of the joined batch."""
        rows = zip(*self.by_copy, strict=True)
        return tuple(size for row in rows for size in row)

    def positions(self, copy: int) -> list[int]:
        """Return the positions of a copy's samples in the joined batch."""
        starts = accumulate(self.sizes, initial=0)
        positions: list[int] = []
        for number, (start, size) in enumerate(zip(starts, self.sizes, strict=False)):
            if number % len(self.by_copy) == copy:
                positions += range(start, start + size)
        return positions


@dataclass
class CopyBatches:
    """Joins the batches of all copies of a pipeline.

    Attributes:
        mesh: the place of this process.
        world: the ranks of all copies.
        schedule: of all copies.
        gathers_inputs: whether the last stage needs all inputs, for a loss that the model computes.
        compares: whether processes that must have the same batch compare them.
    """

    mesh: PipelineMesh
    world: DistributedWorld
    schedule: Schedule
    gathers_inputs: bool
    compares: bool
    _batch_number: int = 0
    _shares: _Shares | None = None
    _last_stage_group: dist.ProcessGroup | None = None
    _all_processes: dist.ProcessGroup = field(init=False)

    @naming_lost_ranks("could not connect to the other ranks of the mesh")
    def __post_init__(self) -> None:
        timeout = timedelta(seconds=self.world.deadline_s)
        self._all_processes = self._watch_group(dist.new_group(None, timeout, "gloo"))
        last_ranks = self.schedule.ranks_of_stage[-1]
        for members in self.mesh.pipelines:
            # In all processes of the job in one order, as torch creates groups.
            processes = [members[rank] for rank in last_ranks]
            group = dist.new_group(processes, timeout, "gloo")
            if dist.get_rank() in processes and len(processes) > 1:
                self._last_stage_group = self._watch_group(group)

    @classmethod
    def of(
        cls,
        mesh: PipelineMesh | None,
        world: World,
        setting: RunConfig,
        traced: TracedChain,
        *,
        compares: bool,
    ) -> CopyBatches | None:
        """Return what joins batches; None where all ranks get the same batch.

        Args:
            mesh: the place of this process.
            world: the ranks of all copies.
            setting: what they run.
            traced: the model.
            compares: see `CopyBatches`.
        """
        if mesh is None or mesh.copies * mesh.width == 1:
            return None
        assert isinstance(world, DistributedWorld)
        # A loss that a traced model computes is counted by the inputs.
        return cls(mesh, world, setting.schedule, traced.variants is not None, compares)

    def _watch_group(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """Return a group, which is closed when the run is stopped."""
        assert group is not None
        self.world.watch_group(group)
        return group

    def joined(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Return the joined batch, as far as this process has it.

        Args:
            x: inputs of this copy's batch.
            y: its targets, or None.

        Raises:
            SettingError: the batch has no samples.
            RanksDiffer: the batches of the copies cannot be joined, or processes of one copy have
                different ones.
        """
        self._shares = None
        if isinstance(x, BatchPart):  # of `Pipeline.reader`, which reads from the joined batch
            return x, y
        try:
            samples = common_sample_count(x, y)
        except SettingError as error:
            self.world.abandon(error)  # the other copies would wait for this one's batch
            raise
        shares = self._shares = self._exchange_shares(x, y, samples)
        if self.mesh.copies == 1:
            return x, y
        joined_y = None if y is None else self._part(y, shares, gather=True)
        return self._part(x, shares, gather=self.gathers_inputs), joined_y

    def outputs_of_copy(self, outputs: Any) -> Any:
        """Return this copy's part of the outputs for the last joined batch."""
        shares = self._shares
        if self.mesh.copies == 1 or shares is None:
            return outputs
        rows = sample_count(outputs, "the outputs of the model") // sum(shares.sizes)
        parts = cut(outputs, [rows * size for size in shares.sizes])
        return join(parts[self._copy :: self.mesh.copies])

    @property
    def _copy(self) -> int:
        """The copy that this process belongs to."""
        return self.mesh.copy_of(self.world.local_ranks[0])

    def _exchange_shares(self, x: Any, y: Any, samples: int) -> _Shares:
        """Exchange the sizes of all copies' batches, and compare what must be the same.

        Raises:
            RanksDiffer: it is not the same.
        """
        number, self._batch_number = self._batch_number, self._batch_number + 1
        form = _describe_samples(x)
        if y is not None:
            form = f"x {form} and y {_describe_samples(y)}"
        content = 0
        if self.compares and is_compared_whole(number):
            content = whole_checksum([*tensors_of(x), *tensors_of(y)])
        row = torch.tensor([samples, zlib.crc32(form.encode()), content])
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(self._all_processes))]
        work = dist.all_gather(rows, row, group=self._all_processes, async_op=True)
        self.world.wait_for(work, "the batches of all copies of the pipeline")
        by_rank = [tuple(entry.tolist()) for entry in rows]
        self._check_same(by_rank, form)
        # One process of each copy, since ranks are numbered copy after copy.
        first_ranks = self.mesh.pipeline[:: self.mesh.stages]
        counts = [by_rank[rank][0] for rank in first_ranks]
        per_copy = self.schedule.micro_batches // self.mesh.copies
        micro_batches = min(per_copy, *counts)
        return _Shares(tuple(tuple(even_sizes(count, micro_batches)) for count in counts))

    def _check_same(self, by_rank: Sequence[tuple[int, ...]], form: str) -> None:
        """Check the rows of all processes, by rank in the job.

        Raises:
            RanksDiffer: forms differ, or processes of one copy have different batches.
        """
        if len({row[1] for row in by_rank}) > 1:
            raise RanksDiffer(
                "the batches of the copies of this pipeline have different shapes beside the "
                f"number of samples, or other types; on this process {form} for each sample: pad "
                "the batches of all copies to the same shape"
            )
        members_of_copy: dict[int, set[int]] = {}
        for members in self.mesh.pipelines:
            for rank, process in enumerate(members):
                members_of_copy.setdefault(self.mesh.copy_of(rank), set()).add(process)
        for copy, processes in members_of_copy.items():
            if len({by_rank[process] for process in processes}) > 1:
                raise RanksDiffer(
                    f"the processes {sorted(processes)} of copy {copy} of the pipeline have "
                    "different batches: only processes with different coordinates in the "
                    "dimension 'dp' of the mesh read different data, such as by "
                    "DistributedSampler(data, mesh['dp'].size(), mesh.get_local_rank('dp'))"
                )

    def _part(self, value: Any, shares: _Shares, *, gather: bool) -> BatchPart:
        """Return inputs or targets of the joined batch.

        Args:
            value: those of this copy's batch.
            shares: the samples of all copies.
            gather: whether the last stage gets those of all copies.
        """
        samples, sizes = sum(shares.sizes), shares.sizes
        if not gather or self._last_stage_group is None:
            return BatchPart(value, shares.positions(self._copy), samples, sizes=sizes)
        copies = self._gather(value, [sum(row) for row in shares.by_copy])
        parts = [cut(part, row) for part, row in zip(copies, shares.by_copy, strict=True)]
        rows = zip(*parts, strict=True)
        joined = join([part for row in rows for part in row])
        return BatchPart(joined, range(samples), samples, sizes=sizes)

    def _gather(self, value: Any, counts: Sequence[int]) -> list[Any]:
        """Return the values of all copies. Called on the processes of the last stage.

        Args:
            value: nested tensors of this copy.
            counts: by copy, its number of samples.
        """
        leaves, structure = flatten(value)
        group = self._last_stage_group
        works, columns = [], []
        last_ranks = self.schedule.ranks_of_stage[-1]
        for count, rank in zip(counts, last_ranks, strict=True):
            column = []
            for leaf in leaves:
                if not isinstance(leaf, Tensor):
                    column.append(leaf)
                    continue
                # A copy has its values in the memory of the host, one after the other, whatever the
                # device and the strides of the leaf.
                tensor = torch.empty((count, *leaf.shape[1:]), dtype=leaf.dtype)
                if rank == self.world.local_ranks[0]:
                    tensor.copy_(leaf.detach())
                column.append(tensor)
                content = tensor.reshape(-1).view(torch.uint8)  # gloo has few dtypes
                source = self.mesh.pipeline[rank]
                works.append(dist.broadcast(content, source, group=group, async_op=True))
            columns.append(column)
        for work in works:
            self.world.wait_for(work, "the targets of all copies of the pipeline")
        return [unflatten(structure, column) for column in columns]


def _describe_samples(value: Any) -> str:
    """Describe what is the same in the batches of all copies: structure, types and shapes of the
    samples.
    """
    leaves, structure = flatten(value)
    words = [structure.describe()]
    for leaf in leaves:
        is_tensor = isinstance(leaf, Tensor)
        words.append(f"{tuple(leaf.shape[1:])} {leaf.dtype}" if is_tensor else str(describe(leaf)))
    return " ".join(words)
