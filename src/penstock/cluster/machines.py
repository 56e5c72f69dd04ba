"""Cluster: devices by rank, the nodes they stand on, and the links that join them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import final

from penstock.cluster.device import Device, Link
from penstock.errors import ClusterError, FileError

#: Of nodes that differ, so many lines are printed.
_LONG = 12


@final
@dataclass(frozen=True)
class Cluster:
    """Devices by rank, the nodes they stand on, and the links that join them.

    Attributes:
        name: for people.
        devices: by rank.
        devices_per_node: ranks fill node after node with so many; where `node_of` says otherwise,
        the most on one node. inside: joins two ranks of one node, where `insides` has no other for
        it. between: joins two ranks of different nodes. node_of: the node of every rank; () where
        ranks fill node after node. insides: (node, its inside link), for the nodes that have
        another than `inside`. source: where the description is from.

    Raises:
        ClusterError: there is no device, or less than one per node; or the nodes do not go with the
        ranks.
    """

    name: str
    devices: tuple[Device, ...]
    devices_per_node: int
    inside: Link
    between: Link
    node_of: tuple[int, ...] = ()
    insides: tuple[tuple[int, Link], ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        if not self.devices:
            raise ClusterError(f"cluster {self.name} has no devices; it needs at least one")
        if self.devices_per_node < 1:
            raise ClusterError(
                f"cluster {self.name} has {self.devices_per_node} devices per node; it needs at least one"
            )
        if self.node_of and len(self.node_of) != self.ranks:
            raise ClusterError(
                f"cluster {self.name} has {self.ranks} ranks, and node_of has {len(self.node_of)}: one for each"
            )
        known = set(self.node_of or range(self.nodes))
        if known != set(range(len(known))):
            raise ClusterError(
                f"cluster {self.name} has ranks on nodes {sorted(known)}; nodes are numbered from 0, none left out"
            )
        for node, _ in self.insides:
            if node not in known:
                raise ClusterError(
                    f"cluster {self.name} has an inside link for node {node}, and nodes 0 to {len(known) - 1}"
                )
        if len(dict(self.insides)) < len(self.insides):
            raise ClusterError(
                f"cluster {self.name} has two inside links for one node: {[node for node, _ in self.insides]}"
            )
        # One form for one meaning, so that equal clusters are equal.
        own = tuple(
            sorted(
                (pair for pair in self.insides if pair[1] != self.inside), key=lambda pair: pair[0]
            )
        )
        object.__setattr__(self, "insides", own)
        if self.node_of or own:
            object.__setattr__(
                self, "devices_per_node", max(Counter(map(self.node, range(self.ranks))).values())
            )
        if self.node_of == tuple(rank // self.devices_per_node for rank in range(self.ranks)):
            object.__setattr__(self, "node_of", ())

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.ranks} ranks on {self.nodes} node{'s'[: self.nodes > 1]} ({', '.join(self.kinds)})"
        ]
        if self.node_of or self.insides or len(self.kinds) > 1:
            lines += self._node_lines()
        if self.devices_per_node > 1 and not self.insides:
            lines.append(f"  inside a node   {self.inside}")
        lines += [f"  between nodes   {self.between}"] if self.nodes > 1 else []
        return "\n".join(lines)

    def _node_lines(self) -> list[str]:
        """What stands on every node, nodes in a row that are alike in one line."""
        alike: list[tuple[list[int], str]] = []
        for node in range(self.nodes):
            ranks = self.ranks_of_node(node)
            counts = Counter(self.devices[rank].name for rank in ranks)
            link = f", {self.link(ranks[0], ranks[0])}" if self.insides and len(ranks) > 1 else ""
            text = " + ".join(f"{count} x {name}" for name, count in counts.items()) + link
            if alike and alike[-1][1] == text:
                alike[-1][0].append(node)
            else:
                alike.append(([node], text))
        rows = [
            (f"  node {'-'.join(map(str, sorted({nodes[0], nodes[-1]})))}", text)
            for nodes, text in alike
        ]
        if len(rows) > _LONG:
            rows[_LONG - 2 : -1] = [("  …", f"{len(rows) - _LONG + 1} more")]
        return [f"{head.ljust(17)} {text}" for head, text in rows]

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @cached_property
    def nodes(self) -> int:
        """Number of nodes; they may hold different numbers of devices."""
        return len(set(self.node_of)) if self.node_of else -(-self.ranks // self.devices_per_node)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the devices, each once, by the first rank that has one."""
        return tuple(dict.fromkeys(device.name for device in self.devices))

    @cached_property
    def _inside_of(self) -> dict[int, Link]:
        return dict(self.insides)

    def node(self, rank: int) -> int:
        """The node that rank `rank` stands on, from 0.

        Raises:
            ClusterError: it is not a rank of this cluster.
        """
        if not 0 <= rank < self.ranks:
            raise ClusterError(
                f"cluster {self.name} has ranks 0 to {self.ranks - 1}, and no rank {rank}"
            )
        return self.node_of[rank] if self.node_of else rank // self.devices_per_node

    def ranks_of_node(self, node: int) -> tuple[int, ...]:
        """The ranks that stand on a node, in order; none if there is no such node."""
        return self._by_node.get(node, ())

    @cached_property
    def _by_node(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for rank in range(self.ranks):
            found.setdefault(self.node(rank), []).append(rank)
        return {node: tuple(ranks) for node, ranks in found.items()}

    def link(self, a: int, b: int) -> Link:
        """The link from rank `a` to rank `b`.

        Raises:
            ClusterError: one of them is not a rank of this cluster.
        """
        node = self.node(a)
        if node != self.node(b):
            return self.between
        return self._inside_of.get(node, self.inside)

    def on(self, ranks: Sequence[int]) -> Cluster:
        """The cluster of these ranks alone: its rank i is `ranks[i]`, which keeps its device, its
        node and its links.

        Nodes are numbered anew, in the order in which they are met.

        Raises:
            ClusterError: one of them is not a rank of this cluster, or stands there twice.
        """
        chosen = tuple(ranks)
        if len(set(chosen)) < len(chosen):
            raise ClusterError(
                f"cluster {self.name} has every rank once, and {list(chosen)} names one twice"
            )
        if chosen == tuple(range(self.ranks)):
            return self
        nodes = [self.node(rank) for rank in chosen]
        number = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
        return Cluster(
            self.name,
            tuple(self.devices[rank] for rank in chosen),
            max(Counter(nodes).values(), default=1),
            self.inside,
            self.between,
            tuple(number[node] for node in nodes),
            tuple((number[node], link) for node, link in self.insides if node in number),
            self.source,
        )

    def transfer_seconds(self, count: float, a: int, b: int) -> float:
        """Seconds for a message of `count` bytes from rank `a` to rank `b`; 0 if they are the same.

        Raises:
            ClusterError: one of them is not a rank of this cluster.
        """
        link = self.link(a, b)
        return 0.0 if a == b else link.transfer_seconds(count)

    def with_links(self, inside: Link | None = None, between: Link | None = None) -> Cluster:
        """The same devices with other links, for instance measured ones; `inside` then holds in
        every node.
        """
        insides = self.insides if inside is None else ()
        return replace(
            self, inside=inside or self.inside, between=between or self.between, insides=insides
        )

    def to_yaml(self) -> str:
        """The description that `cluster` reads back as an equal cluster."""
        from penstock.cluster.write import yaml_of

        return yaml_of(self)

    def save(self, path: str | Path) -> None:
        """Write the description to a file, whole or not at all.

        Raises:
            FileError: it cannot be written.
        """
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        try:
            partial.write_text(self.to_yaml(), encoding="utf-8")
            partial.replace(target)
        except OSError as error:
            raise FileError(f"cannot write {target}: {error.strerror or error}") from error
