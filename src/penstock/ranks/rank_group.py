"""The ranks of one pipeline among the processes of a job, in which there may be several pipelines.

By default a pipeline has all processes of the job. With a `DeviceMesh` every group of its dimension
"pp" is a pipeline of its own: messages, stores, clocks and comparisons are per pipeline, and its
ranks are numbered from 0. torch creates process groups in all processes of a job in one order, so
all processes construct their pipelines in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from penstock.errors import SettingError
from penstock.ranks.settings.settings_exchange import SettingsExchange
from penstock.schedule.lower import Link
from penstock.transport.communicators import LinkKey, make_common_communicator, make_communicators
from penstock.transport.devices.device_assignment import Assignment
from penstock.transport.devices.device_discovery import assign_device
from penstock.transport.process_group import join, naming_lost_ranks


@dataclass(frozen=True)
class RankGroup:
    """The processes of one pipeline.

    Attributes:
        ranks: by rank in the pipeline, the rank of its process in the job.
        rank: this process's rank in the pipeline.
        shared: a gloo group of these processes.
        job: exchanges values between all processes of the job; None where one pipeline has them
            all.
        assignment: the device of this process, chosen among all processes of the job; None where
            one pipeline has them all, and chooses by itself.
    """

    ranks: tuple[int, ...]
    rank: int
    shared: dist.ProcessGroup
    job: SettingsExchange | None = None
    assignment: Assignment | None = None

    @classmethod
    def whole_job(cls, deadline_s: float) -> RankGroup:
        """Return the group of all processes of the job; all of them call it."""
        ranks = tuple(range(join(deadline_s)))
        shared = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
        assert shared is not None
        return cls(ranks, dist.get_rank(), shared)

    @classmethod
    def of_pipeline(
        cls, ranks: Sequence[int], job: SettingsExchange, device: torch.device | None
    ) -> RankGroup:
        """Return the group of one of several pipelines; all processes of the job call it.

        Args:
            ranks: by rank in the pipeline, the rank in the job.
            job: exchanges values between all processes of the job.
            device: requested device of this process, None to choose.

        Raises:
            SettingError: the pipelines of the job do not have every process exactly once.
            RunError: another process failed to construct its pipeline, or did not answer in time.
        """
        answers = job.exchange({"ranks": list(ranks)})
        pipelines = sorted({tuple(answer["ranks"]) for answer in answers})
        if sorted(rank for members in pipelines for rank in members) != list(range(job.size)):
            raise SettingError(
                f"the pipelines of this job have the ranks {', '.join(map(str, pipelines))}, and "
                f"every one of its {job.size} processes must be in exactly one: make one mesh of all "
                "processes, init_device_mesh('cpu', (stages, copies), mesh_dim_names=('pp', 'dp')), "
                "and give every process mesh['pp']"
            )
        local: RankGroup | None = None
        with naming_lost_ranks("could not connect to the other ranks"):
            assignment = assign_device(device)
            # `new_group` is collective: every process makes the groups of all pipelines, in one order.
            for members in pipelines:
                timeout = timedelta(seconds=job.deadline_s)
                shared = dist.new_group(list(members), timeout, "gloo")
                if job.rank in members:
                    local = cls(members, members.index(job.rank), shared, job, assignment)
        assert local is not None
        return local

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def has_whole_job(self) -> bool:
        """Whether these are all processes of the job."""
        return self.job is None or self.size == self.job.size

    def store(self, prefix: str) -> Store:
        """Return a store for this pipeline alone.

        Args:
            prefix: of its keys, the same in all of the pipeline's processes.
        """
        store: Store = dist.distributed_c10d._get_default_store()
        pipeline = "" if self.job is None else f"/pipeline-{self.ranks[0]}"
        return PrefixStore(f"{prefix}{pipeline}", store)

    def settings_exchange(self, number: int, deadline_s: float) -> SettingsExchange:
        """Return an exchange between the ranks of this pipeline.

        Args:
            number: of the exchange among those of the job.
            deadline_s: seconds to wait for the other ranks.
        """
        store = self.store(f"penstock/settings/{number}")
        return SettingsExchange(store, self.rank, self.size, deadline_s, self.job)

    def device(self, requested: torch.device | None) -> Assignment:
        """Return the device of this process.

        Args:
            requested: by the caller, None to choose.

        Raises:
            SettingError: see `device_assignment.assign_devices`.
        """
        if self.assignment is not None:
            return self.assignment
        return assign_device(requested, self.shared)

    def communicators(
        self, keys: Sequence[LinkKey], device: torch.device
    ) -> tuple[dict[LinkKey, dist.ProcessGroup], dist.ProcessGroup]:
        """Create the NCCL communicators of all pipelines of the job; all processes call it.

        Args:
            keys: those of this pipeline, between its ranks.
            device: the GPU of this process, with an index.

        Returns:
            The communicators of this rank by links between ranks of the pipeline, and the one of
            all of its ranks.
        """
        rows = [[self.ranks[a], self.ranks[b], int(at_update)] for (a, b), at_update in keys]
        answers: list[dict[str, Any]] = [{"keys": rows, "ranks": list(self.ranks)}]
        if self.job is not None:
            answers = self.job.exchange(answers[0])
        # Likewise: every process makes the communicators of all pipelines, in one order.
        all_rows = {tuple(row) for answer in answers for row in answer["keys"]}
        job_rank = self.ranks[self.rank]
        groups = make_communicators(_keys(sorted(all_rows)), job_rank, device, self.shared)
        everyone: dist.ProcessGroup | None = None
        for members in sorted({tuple(answer["ranks"]) for answer in answers}):
            group = make_common_communicator(device, members)
            everyone = group if members == self.ranks else everyone
        assert everyone is not None
        local = dict(zip(_keys(rows), keys, strict=True))
        return {local[key]: group for key, group in groups.items()}, everyone


def _keys(rows: Iterable[Sequence[int]]) -> list[LinkKey]:
    """Return the keys of communicators from their source, target, and whether they are for updates."""
    return [(Link(source, target), bool(at_update)) for source, target, at_update in rows]
