"""Where systems cut the model: by methods of `penstock.partition`, on one measured profile, so that
all systems that are compared have equal stages.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.cluster.cluster import cluster as local_cluster
from penstock.cluster.device import Link
from penstock.cluster.local import available_cores
from penstock.errors import FileError, SettingError
from penstock.files.read import read_json
from penstock.partition.catalogue import PARTITIONERS, option_names, partition
from penstock.peers.commands import command
from penstock.peers.host import Host
from penstock.peers.setup import Setup, setup_of, to_message
from penstock.peers.team import Team
from penstock.plan.plan import Plan
from penstock.profile.profile import Profile
from penstock.ranks.processes.rank_variables import rank_variables
from penstock.registry import Registered
from penstock.search.catalogue import plan as plan_model
from penstock.store import write_json

#: Ranks that measure at the same time, as ranks of a pipeline on one host share its memory.
_RANKS = 2
#: Seconds after which a measurement is given up. Profiles of the largest models take minutes.
_LIMIT_S = 900.0
#: Timed passes of a size: the median of three is not that of a pass which something disturbed.
_REPEATS = 3


@command("profile")
def _profile(state: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Measure the layers of a setup's model, together with the other ranks, and save the
    profile.
    """
    import torch
    from torch import nn

    from penstock.measure.profiler import profile
    from penstock.peers.workload import initialise, workload
    from penstock.ranks.process_world import join

    del state
    os.environ.update(arguments["environment"])
    torch.set_num_threads(1)
    join()
    setup = setup_of(arguments["setup"])
    work = workload(setup)
    inputs, targets = work.first_batch()
    measured = profile(
        nn.Sequential(*initialise(work.skeleton, 0, setup.seed)),
        inputs,
        sizes=sorted({max(2, setup.batch // parts) for parts in (2, 4, 16)}),
        repeats=_REPEATS,
        threads=1,
        loss=work.loss,
        targets=targets,
        together=True,
    )
    if os.environ["RANK"] == "0":
        measured.save(arguments["path"])


@command("link")
def _link(state: dict[str, Any], arguments: dict[str, Any]) -> list[float]:
    """Measure the link between two ranks of this host."""
    from penstock.measure.link import measure_link
    from penstock.ranks.process_world import join

    del state
    os.environ.update(arguments["environment"])
    join()
    link = measure_link()
    return [link.latency_s, link.bandwidth_bytes_per_s]


@command("gradients")
def _gradients(state: dict[str, Any], arguments: dict[str, Any]) -> list[str]:
    """Write the gradients of plain training, and return the names of the parameters."""
    import torch

    from penstock.peers.job import write_gradients

    del state
    torch.set_num_threads(1)
    return write_gradients(setup_of(arguments["setup"]), Path(arguments["path"]))


class Cuts:
    """Profiles, cuts and plans of a study; profiles are measured once and kept in its folder.

    Args:
        folder: for the profiles and plans.
        host: of Penstock, to measure in.
    """

    def __init__(self, folder: Path, host: Host) -> None:
        self._folder = folder
        self._host = host

    def profile(self, setup: Setup) -> Profile:
        """Load or measure the profile of a setup's model.

        Raises:
            PeerFailed: it could not be measured.
            FileError: the stored profile cannot be read.
        """
        path = self._path(setup, "profile.json")
        if not path.exists():
            arguments = {"setup": to_message(setup), "path": str(path)}
            self._run("profile", arguments)
        return Profile.load(path)

    def link(self) -> Link:
        """Load or measure the link between two ranks of this host."""
        path = self._folder / "link.json"
        if not path.exists():
            latency_s, bandwidth = self._run("link", {})[0]
            write_json(path, Link(latency_s, bandwidth, "measured"))
        return read_json(path, Link)

    def gradients(self, setup: Setup, path: Path) -> list[str]:
        """Write the gradients of plain training on the first batch from a setup's initial weights,
        and return the names of all parameters.

        Raises:
            PeerFailed: they could not be computed.
        """
        team = Team(self._host, 1, self._log())
        try:
            message = {"setup": to_message(setup), "path": str(path)}
            (names,) = team.tell("gradients", [message], _LIMIT_S)
        finally:
            team.end()
        return [str(name) for name in names]

    def with_lengths(self, setup: Setup, balance: str) -> Setup:
        """Return a setup with the lengths of its stages.

        Args:
            setup: without lengths.
            balance: name of a partitioning method, or lengths such as "3-3-2".

        Raises:
            PartitionError, UnknownName: the method or the lengths are not valid for the model.
        """
        profile = self.profile(setup)
        lengths = cut(profile, setup, balance, setup.stages)
        halves = None
        if 2 * setup.stages <= len(profile):
            method = balance if is_method(balance) else "bottleneck"
            halves = cut(profile, setup, method, 2 * setup.stages)
        return replace(setup, lengths=lengths, halves=halves)

    def with_plan(self, setup: Setup) -> Setup:
        """Return a setup with Penstock's plan for as many ranks of this host as it has stages; the
        batch is given, all else is the planner's choice.

        Raises:
            PlanError: there is no plan.
        """
        path = self._path(setup, f"{setup.stages}-plan.json")
        if not path.exists():
            cluster = local_cluster(f"local:{setup.stages}").with_links(inside=self.link())
            plan_model(self.profile(setup), cluster, setup.batch).save(path)
        plan = Plan.load(path)
        return replace(setup, plan=str(path), plan_ranks=plan.ranks)

    def _path(self, setup: Setup, suffix: str) -> Path:
        """Return the path of a file about the model of a setup."""
        facts = [setup.model, setup.model_options, setup.data, setup.batch]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
        return self._folder / f"{setup.model}-{digest}-{suffix}"

    def _log(self) -> Path:
        """Return the log of measurements, in a folder that exists."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"cannot make {self._folder}: {error.strerror or error}") from error
        return self._folder / "measuring.txt"

    def _run(self, name: str, arguments: dict[str, Any]) -> list[Any]:
        """Run a command on two ranks that can join each other."""
        from penstock.peers.training import open_store

        ranks = min(_RANKS, available_cores()) if name == "profile" else _RANKS
        team = Team(self._host, ranks, self._log())
        try:
            store = open_store()
            messages = []
            for rank in range(ranks):
                environment = rank_environment(rank, ranks, store.port)
                messages.append({**arguments, "environment": environment})
            return team.tell(name, messages, _LIMIT_S)
        finally:
            team.end()


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables of a rank whose store this process has opened."""
    # As by torchrun's agent: rank 0 joins the store at the port too, instead of opening one there.
    return {**rank_variables(rank, ranks, port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def is_method(balance: str) -> bool:
    """Whether a balance is the name of a method, not a list of lengths."""
    return not balance[:1].isdigit()


def cut_method(balance: str) -> Registered[Callable[..., list[int]]]:
    """Return the partitioning method of a balance.

    Raises:
        UnknownName: there is none of that name.
    """
    return PARTITIONERS.find(balance.partition(":")[0])


def cut(profile: Profile, setup: Setup, balance: str, stages: int) -> tuple[int, ...]:
    """Return the lengths of the stages.

    Raises:
        SettingError: the lengths are no numbers with hyphens.
        PartitionError, UnknownName: the method or the lengths are not valid for the model.
    """
    if not is_method(balance):
        return tuple(partition(profile, stages, parse_lengths(balance)))
    available = {
        "batch": setup.batch,
        "micro_batches": setup.micro_batches,
        "micro_batch": setup.batch / setup.micro_batches,
    }
    names = option_names(cut_method(balance))
    chosen = {name: value for name, value in available.items() if name in names}
    return tuple(partition(profile, stages, balance, **chosen))


def parse_lengths(text: str) -> tuple[int, ...]:
    """Return stage lengths.

    >>> parse_lengths("3-3-2")
    (3, 3, 2)

    Raises:
        SettingError: the text has something else.
    """
    try:
        return tuple(int(part) for part in text.split("-"))
    except ValueError as error:
        raise SettingError(f"balance {text!r}: write a method, or lengths such as 3-3-2") from error
