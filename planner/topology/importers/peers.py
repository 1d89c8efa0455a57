"""The links of GPUs among themselves: what the counts of a text mean on a given GPU.

A count between two GPUs is that of links between them, or that of the links of each to NVSwitches
which the text does not show. A GPU has so many links and no more: where the counts to all its
peers together exceed them, and every pair of the group has one, switches must stand between.
"""

from __future__ import annotations  # nx.Graph[str] is for the type checker only

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, NoReturn

import networkx as nx

from planner.hardware.gpus import GpuModel
from planner.topology.document import LinkKind
from planner.topology.importers.dump import NodeDump, PeerLink, TopologyTextError
from planner.topology.importers.edges import Edge
from planner.topology.importers.figures import XGMI_LINKS_PER_PAIR, peer_latency
from planner.units import format_rate

__all__ = ["MADE_SWITCH", "Peers", "find_peers", "groups_of"]

# Name of a switch that the text does not show, by the number of its group.
MADE_SWITCH: Final = "made switch {}"
# Of the sum of rates that a text states, over what the data sheet has.
_TOLERANCE: Final = 1.1
# GPUs of a board with NVSwitches.
_MIN_SWITCHED_GPUS: Final = 8
_NUM_BOARDS_JOINED: Final = 2


@dataclass(frozen=True, slots=True)
class Peers:
    """Direct links of the GPUs of a node.

    Attributes:
        edges: By the names of the dump, and of ``switches``.
        switches: NVSwitches, those of the dump and those that must be there.
        on_switches: Links of a GPU to switches, if it has any and none to GPUs.
        assumptions: What was guessed.
    """

    edges: tuple[Edge, ...]
    switches: tuple[str, ...]
    on_switches: int | None
    assumptions: tuple[str, ...]


def find_peers(dump: NodeDump, model: GpuModel, *, source: str) -> Peers:
    """Return the links between GPUs, to NVSwitches and, on POWER, to CPUs.

    Raises:
        TopologyTextError: The counts cannot be those of this GPU, with the line.
    """
    return _Finder(dump, model, source).find()


def groups_of(members: Iterable[str], pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the members that pairs join, directly or over others, each group in order.

    >>> groups_of("abcd", [("a", "c"), ("c", "d")])
    [['a', 'c', 'd'], ['b']]
    """
    joined: nx.Graph[str] = nx.Graph()
    joined.add_nodes_from(members)
    joined.add_edges_from(pairs)
    position = {member: number for number, member in enumerate(joined)}
    return [sorted(group, key=position.__getitem__) for group in nx.connected_components(joined)]


class _Finder:
    """What is known while the links of one node are looked at."""

    def __init__(self, dump: NodeDump, model: GpuModel, source: str) -> None:
        self.dump, self.model, self.source = dump, model, source
        self.kinds = {part.name: part.kind for part in dump.parts}
        self.gpus = [part.name for part in dump.parts if part.kind == "gpu"]
        self.edges: list[Edge] = []
        self.switches = [part.name for part in dump.parts if part.kind == "nvswitch"]
        self.said: list[str] = []
        self.latency_s, self.latency_source = peer_latency(model)
        self.to_switches: dict[str, int] = defaultdict(int)

    def find(self) -> Peers:
        self._check_kind()
        self._check_totals()
        between = [link for link in self.dump.links if self._ends(link) == {"gpu"}]
        for link in self.dump.links:
            if self._ends(link) != {"gpu"}:
                self._add_to_switch_or_cpu(link)
        groups = groups_of(self.gpus, ((link.a, link.b) for link in between))
        for group in groups:
            members = set(group)
            inside = [link for link in between if link.a in members]
            if inside:
                self._add_group(group, inside)
        self._join_boards()
        if not self.dump.links:
            self._add_hidden_switches()
        self._say_stated_rates()
        found = self.to_switches.values()
        num_links = min(found) if found and not self._has_mesh() else None
        return Peers(tuple(self.edges), tuple(self.switches), num_links, tuple(self.said))

    # ---------------------------------------------------------------------------- what a link is

    def _ends(self, link: PeerLink) -> set[str]:
        return {self.kinds[link.a], self.kinds[link.b]}

    def _count(self, link: PeerLink) -> int:
        """Return how many links there are, from the rate where only that is known."""
        if link.count is not None:
            return link.count
        if link.bytes_per_s is not None:
            return max(1, round(link.bytes_per_s / self.model.link_bytes_per_s))
        return XGMI_LINKS_PER_PAIR.get(self.model.name, 1) if link.kind == "xgmi" else 1

    def _add(
        self, a: str, b: str, count: int, bytes_per_s: float, *, halves: int = 1, cpu: bool = False
    ) -> None:
        """Note ``count`` links with ``bytes_per_s`` each; a hop is made of ``halves`` of them."""
        kind: LinkKind = "c2c" if cpu else ("xgmi" if self.model.link_kind == "xgmi" else "nvlink")
        text = (
            f"{self.source} ({self.dump.format}): number of links. {self.model.name}: "
            f"{self.model.num_links} {self.model.link_kind} links of "
            f"{format_rate(self.model.link_bytes_per_s, 'B/s')} per direction. "
            f"{self.latency_source}"
        )
        self.edges.append(Edge(a, b, kind, bytes_per_s, self.latency_s / halves, text, count))

    def _rate(self, link: PeerLink) -> float:
        """Return bytes/s of one of the links."""
        if link.bytes_per_s is not None:
            return link.bytes_per_s / self._count(link)
        return self.model.link_bytes_per_s

    # ----------------------------------------------------------------------------------- checks

    def _refuse(self, message: str, line: int | None) -> NoReturn:
        raise TopologyTextError(
            f"{message}; if the GPU is another one, name it: --gpu", source=self.source, line=line
        )

    def _check_kind(self) -> None:
        for link in self.dump.links:
            if link.kind != self.model.link_kind:
                has = self.model.link_kind or "no links of its own"
                self._refuse(
                    f"joins {link.a} and {link.b} by {link.kind}, but {self.model.name} has {has}",
                    link.line,
                )

    def _check_totals(self) -> None:
        """One pair cannot have more links than a GPU has, nor a GPU more to its switches."""
        totals: dict[str, int] = defaultdict(int)
        for link in self.dump.links:
            count = self._count(link)
            ends = [end for end in (link.a, link.b) if self.kinds[end] == "gpu"]
            if len(ends) == 1:
                totals[ends[0]] += count
                count = totals[ends[0]]
            if count > self.model.num_links:
                what = f"{link.a} and {link.b}" if len(ends) > 1 else ends[0]
                self._refuse(
                    f"has {count} links at {what}, but {self.model.name} has "
                    f"{self.model.num_links}",
                    link.line,
                )

    # ------------------------------------------------------------------------- groups of GPUs

    def _add_to_switch_or_cpu(self, link: PeerLink) -> None:
        ends = self._ends(link)
        if "gpu" not in ends or ends - {"gpu", "cpu", "nvswitch"}:
            self._refuse(f"joins {link.a} and {link.b} by {link.kind}", link.line)
        gpu, other = (link.a, link.b) if self.kinds[link.a] == "gpu" else (link.b, link.a)
        to_cpu = self.kinds[other] == "cpu"
        self._add(
            gpu, other, self._count(link), self._rate(link), halves=1 if to_cpu else 2, cpu=to_cpu
        )
        if not to_cpu:
            self.to_switches[gpu] += self._count(link)

    def _add_group(self, group: Sequence[str], links: Sequence[PeerLink]) -> None:
        totals: dict[str, int] = defaultdict(int)
        for link in links:
            for end in (link.a, link.b):
                totals[end] += self._count(link)
        busiest = max(group, key=lambda gpu: totals[gpu])
        if totals[busiest] <= self.model.num_links:
            for link in links:
                self._add(link.a, link.b, self._count(link), self._rate(link))
            self._say_guessed_counts(links)
            return
        of_gpu = self._links_to_switches(group, links)
        if of_gpu is None:
            line = next(link.line for link in links if busiest in (link.a, link.b))
            self._refuse(
                f"gives {busiest} {totals[busiest]} links to its peers, but {self.model.name} has "
                f"{self.model.num_links}, and not every pair of its group has the same, as it "
                "would behind NVSwitches",
                line,
            )
        switch = MADE_SWITCH.format(len(self.switches))
        self.switches.append(switch)
        for gpu in group:
            self._add(gpu, switch, of_gpu[gpu], self._rate(links[0]), halves=2)
            self.to_switches[gpu] = of_gpu[gpu]
        self.said.append(
            f"NVSwitches join {len(group)} GPUs: {max(of_gpu.values())} links to each of "
            f"{len(group) - 1} peers would be {totals[busiest]}, and {self.model.name} has "
            f"{self.model.num_links}"
        )

    def _links_to_switches(
        self, group: Sequence[str], links: Sequence[PeerLink]
    ) -> dict[str, int] | None:
        """Return the links of each GPU to switches; None if the counts are not of that kind.

        Between two GPUs a text shows the links of the one that has fewer.
        """
        if links[0].kind != "nvlink":
            return None
        counts = {frozenset((link.a, link.b)): self._count(link) for link in links}
        of_gpu = {gpu: max(count for pair, count in counts.items() if gpu in pair) for gpu in group}
        for a, b in combinations(group, 2):
            if counts.get(frozenset((a, b))) != min(of_gpu[a], of_gpu[b]):
                return None
        most = max(of_gpu.values())
        for gpu, count in of_gpu.items():
            if count < most:
                self.said.append(f"{gpu} has {count} NVLinks that are up, the others {most}")
        return of_gpu

    # ---------------------------------------------------------------- what a text does not show

    def _join_boards(self) -> None:
        """Two equal groups on switches are the boards of one machine, with full links between."""
        pairs = [(edge.a, edge.b) for edge in self.edges if edge.kind == "nvlink"]
        boards = [
            (group, [name for name in group if name in self.switches])
            for group in groups_of((*self.gpus, *self.switches), pairs)
        ]
        boards = [board for board in boards if board[1]]
        sizes = {(len(group), len(switches)) for group, switches in boards}
        is_dgx2 = self.model.is_switched and self.dump.format == "lstopo"
        if len(boards) != _NUM_BOARDS_JOINED or len(sizes) > 1 or not is_dgx2:
            if len(boards) > 1:
                self.said.append(
                    f"the NVSwitches fall into {len(boards)} groups, which {self.source} does not "
                    "join: no links between them are planned"
                )
            return
        for one, other in zip(boards[0][1], boards[1][1], strict=True):
            below = [edge for edge in self.edges if edge.b == one]
            total = sum(edge.count for edge in below)
            self._add(one, other, total, below[0].bytes_per_s, halves=8)
        self.said.append(
            f"the NVSwitches are those of two boards with {len(boards[0][1])} each, which "
            "lstopo does not join: links between them that carry all that their GPUs send are "
            "assumed, as in a DGX-2"
        )

    def _add_hidden_switches(self) -> None:
        """Boards of 8 and more have switches; NCCL's input files and lstopo may hide all links."""
        model = self.model
        if model.num_links == 0 or len(self.gpus) == 1:
            return
        hides = self.dump.format in ("nccl-xml", "lstopo")
        if not (hides and model.is_switched and len(self.gpus) >= _MIN_SWITCHED_GPUS):
            self.said.append(
                f"{model.name} can have {model.num_links} {model.link_kind} links, but the text "
                "shows none between GPUs: planned with PCIe alone"
            )
            return
        switch = MADE_SWITCH.format(0)
        self.switches.append(switch)
        for gpu in self.gpus:
            self._add(gpu, switch, model.num_links, model.link_bytes_per_s, halves=2)
            self.to_switches[gpu] = model.num_links
        self.said.append(
            f"the text shows no NVLinks: all {model.num_links} of every {model.name} are assumed "
            f"to be on NVSwitches, as on boards of {len(self.gpus)}; nvidia-smi topo -m shows them"
        )

    # ------------------------------------------------------------------------------- what to say

    def _has_mesh(self) -> bool:
        return any(self.kinds.get(edge.b) == "gpu" for edge in self.edges)

    def _say_guessed_counts(self, links: Sequence[PeerLink]) -> None:
        open_ones = [link for link in links if link.count is None and link.bytes_per_s is None]
        if open_ones:
            self.said.append(
                f"the text does not count the links of {len(open_ones)} pairs of GPUs: taken as "
                f"{self._count(open_ones[0])} {open_ones[0].kind} of "
                f"{format_rate(self.model.link_bytes_per_s, 'B/s')} a pair"
            )

    def _say_stated_rates(self) -> None:
        stated = [link for link in self.dump.links if link.bytes_per_s is not None]
        if not stated:
            return
        link, rate = stated[0], stated[0].bytes_per_s or 0.0
        nominal = self._count(link) * self.model.link_bytes_per_s
        text = f"rates of {len(stated)} {link.kind} connections are those of the text"
        if not nominal / _TOLERANCE <= rate <= nominal * _TOLERANCE:
            text += (
                f": {format_rate(rate, 'B/s')} between {link.a} and {link.b}, where the data sheet "
                f"of {self.model.name} gives {format_rate(nominal, 'B/s')}"
            )
        self.said.append(text)
