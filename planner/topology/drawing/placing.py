"""Where the parts of a node stand in a drawing, in pixels.

Rows from the top: NICs, CPUs, PCIe switches by their distance from a CPU, workers, NVSwitches.
NICs stand on top because their cables leave upwards, so that a cable crosses nothing of the node.
Below a CPU or switch lies what hangs on it; a part that hangs on several lies below the first.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from planner.topology.document import ComponentKind, NodeType

__all__ = ["BOX_HEIGHT", "Box", "Placed", "hang", "place_node", "text_width"]

BOX_HEIGHT: Final = 26.0
_SPACE: Final = 12.0
_ROW_GAP: Final = 54.0
_SWITCH_GAP: Final = 96.0
_MAX_ARC: Final = 190.0
_WIDTHS: Final = (46.0, 108.0)
_WORKERS: Final = ("gpu", "process")


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle; ``x`` and ``y`` are its upper left corner."""

    x: float
    y: float
    width: float
    height: float = BOX_HEIGHT

    @property
    def centre(self) -> float:
        """Return the x of the middle."""
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        """Return the y of the lower edge."""
        return self.y + self.height


@dataclass(frozen=True, slots=True)
class Placed:
    """The parts of a node, from (0, 0).

    Attributes:
        boxes: Of every part, by name.
        rows: Number of the row of every part, from the top.
        width: Of all of it.
        height: Of all of it, arcs below the last row included.
        across: Pairs of neighbours in a row, to be joined straight.
        arcs: Other pairs of a row, with how far their arc leaves it.
    """

    boxes: dict[str, Box]
    rows: dict[str, int]
    width: float
    height: float
    across: frozenset[tuple[str, str]]
    arcs: dict[tuple[str, str], float]


def text_width(text: str, size: float = 11.0) -> float:
    """Return how wide a text is at most; letters beyond ASCII count as wide ones."""
    return sum(0.63 if char.isascii() else 1.1 for char in text) * size


def _arc_depth(distance: float, widest: float) -> float:
    """Return how far an arc leaves its row, so that arcs within others do not touch them.

    Args:
        distance: Between the middles of its ends.
        widest: The largest distance in the row.
    """
    return 14.0 + abs(distance) * min(0.22, (_MAX_ARC - 14.0) / abs(widest))


def place_node(node: NodeType, pairs: Sequence[tuple[str, str]]) -> Placed:
    """Return where the parts of a node stand.

    Args:
        node: Its parts.
        pairs: The parts that a link joins.
    """
    kinds = {name: c.kind for c in node.components for name in c.names()}
    children, order, depth = hang(node, pairs)
    rows = _rows(kinds, depth)
    columns, num_columns = _columns(kinds, children, order)
    columns = _between_workers(kinds, columns, pairs)
    columns = _clear_of_lanes(kinds, columns, rows, pairs)
    width = _box_width(name for name, kind in kinds.items() if kind != "nvswitch")
    pitch = width + _SPACE
    centres = {name: pitch * column for name, column in columns.items()}
    switches = [name for name, kind in kinds.items() if kind == "nvswitch"]
    switch_width = _box_width(switches)
    total = max(pitch * num_columns, (switch_width + _SPACE) * len(switches))
    shift = (total - pitch * num_columns) / 2
    centres = {name: centre + shift for name, centre in centres.items()}
    for i, name in enumerate(switches):
        centres[name] = total * (i + 0.5) / len(switches)
    across = _across(kinds, rows, pairs, centres)
    arcs = _arcs(rows, [pair for pair in pairs if pair not in across], centres)
    tops, height = _tops(kinds, rows, arcs)
    boxes = {}
    for name, kind in kinds.items():
        size = switch_width if kind == "nvswitch" else width
        boxes[name] = Box(centres[name] - size / 2, tops[rows[name]], size)
    return Placed(boxes, rows, total, height, across, arcs)


def _box_width(names: Iterable[str]) -> float:
    low, high = _WIDTHS
    return min(high, max([low, *(text_width(name) + 8 for name in names)]))


def hang(
    node: NodeType, pairs: Sequence[tuple[str, str]]
) -> tuple[dict[str, list[str]], list[str], dict[str, int]]:
    """Return what hangs on each part, all parts but NVSwitches from the CPUs down, and how deep.

    Every part hangs on one other at most, the nearest to a CPU.
    """
    kinds = {name: c.kind for c in node.components for name in c.names()}
    position = {name: i for i, name in enumerate(kinds)}
    beside: dict[str, list[str]] = {name: [] for name in kinds}
    for a, b in pairs:
        beside[a].append(b)
        beside[b].append(a)
    children: dict[str, list[str]] = {name: [] for name in kinds}
    order: list[str] = []
    depth: dict[str, int] = {}
    for roots in (("cpu",), ("pcie_switch",), _WORKERS, ("nic",)):
        layer = [name for name, kind in kinds.items() if kind in roots and name not in depth]
        depth.update(dict.fromkeys(layer, 0 if roots == ("cpu",) else 1))
        while layer:
            order += layer
            below: list[str] = []
            for name in layer:
                for other in sorted(beside[name], key=position.__getitem__):
                    if other not in depth and _may_hang(kinds[other], kinds[name]):
                        depth[other] = depth[name] + 1
                        children[name].append(other)
                        below.append(other)
            layer = below
    return children, order, depth


def _may_hang(kind: ComponentKind, upper: ComponentKind) -> bool:
    if upper in _WORKERS:
        return kind == "nic"
    return upper in ("cpu", "pcie_switch") and kind not in ("cpu", "nvswitch")


def _rows(kinds: dict[str, ComponentKind], depth: dict[str, int]) -> dict[str, int]:
    """Return the row of every part; rows without parts are left out."""
    deepest = max((depth[n] for n, kind in kinds.items() if kind == "pcie_switch"), default=0)
    of_kind = {"nic": 0, "cpu": 1, "nvswitch": deepest + 3}
    raw = {
        name: 1 + depth[name] if kind == "pcie_switch" else of_kind.get(kind, deepest + 2)
        for name, kind in kinds.items()
    }
    packed = {row: i for i, row in enumerate(sorted(set(raw.values())))}
    return {name: packed[row] for name, row in raw.items()}


def _columns(
    kinds: dict[str, ComponentKind],
    children: dict[str, list[str]],
    order: Sequence[str],
) -> tuple[dict[str, float], float]:
    """Return the middle of every part but NVSwitches, in columns, and how many there are."""
    widths: dict[str, float] = {}
    has_nic: dict[str, bool] = {}
    for name in reversed(order):
        apart, workers, nics = _groups(kinds, children, name)
        is_passed = any(has_nic[child] for child in apart)
        has_nic[name] = bool(nics) or is_passed
        width = sum(widths[child] for child in apart) + max(len(workers), len(nics))
        # Beside the line of a NIC to something lower there must be room for the box itself.
        widths[name] = max(2 if is_passed else 1, width)
    starts: dict[str, float] = {}
    hung = {child for found in children.values() for child in found}
    total = 0.0
    for name in order:
        if name not in hung:
            starts[name] = total
            total += widths[name]
        apart, workers, nics = _groups(kinds, children, name)
        x = starts[name]
        for child in apart:
            starts[child] = x
            x += widths[child]
        for group in (workers, nics):
            first = x + (max(len(workers), len(nics)) - len(group)) / 2
            starts.update((child, first + i) for i, child in enumerate(group))
    return {name: starts[name] + widths[name] / 2 for name in order}, total


def _groups(
    kinds: dict[str, ComponentKind], children: dict[str, list[str]], name: str
) -> tuple[list[str], list[str], list[str]]:
    """Return what hangs on a part: what has columns of its own, workers, NICs above workers."""
    groups: tuple[list[str], list[str], list[str]] = ([], [], [])
    for child in children[name]:
        is_worker = kinds[child] in _WORKERS and not children[child]
        groups[2 if kinds[child] == "nic" else int(is_worker)].append(child)
    return groups


def _between_workers(
    kinds: dict[str, ComponentKind], columns: dict[str, float], pairs: Sequence[tuple[str, str]]
) -> dict[str, float]:
    """Move NICs that hang on several workers over the middle of them, if there is room for all."""
    workers: dict[str, list[float]] = {}
    for pair in pairs:
        for nic, worker in (pair, pair[::-1]):
            if kinds[nic] == "nic" and kinds[worker] in _WORKERS:
                workers.setdefault(nic, []).append(columns[worker])
    moved = columns | {nic: sum(found) / len(found) for nic, found in workers.items()}
    nics = sorted(moved[name] for name, kind in kinds.items() if kind == "nic")
    has_room = all(right - left >= 1 for left, right in pairwise(nics))
    return moved if has_room else columns


def _clear_of_lanes(
    kinds: dict[str, ComponentKind],
    columns: dict[str, float],
    rows: dict[str, int],
    pairs: Sequence[tuple[str, str]],
) -> dict[str, float]:
    """Move CPUs and switches that the line of a NIC to something lower would run behind."""
    lowest: dict[str, int] = {}
    for pair in pairs:
        for nic, other in (pair, pair[::-1]):
            if kinds[nic] == "nic":
                lowest[nic] = max(lowest.get(nic, 0), rows[other])
    lanes = sorted((columns[nic], row) for nic, row in lowest.items())
    taken: dict[int, list[float]] = {}
    for name, kind in kinds.items():
        if kind in ("cpu", "pcie_switch"):
            insort(taken.setdefault(rows[name], []), columns[name])
    moved = dict(columns)
    for name, kind in kinds.items():
        if kind not in ("cpu", "pcie_switch"):
            continue
        here, row = columns[name], rows[name]
        near = lanes[bisect_left(lanes, (here - 3, 0)) : bisect_left(lanes, (here + 3, 0))]
        passing = [x for x, lowest_row in near if lowest_row > row]
        beside = taken[row]
        beside.remove(here)
        for step in (0, 1, -1, 2, -2, 3, -3, 4, -4):
            place = here + step / 2
            if _is_free(place, passing, 0.5) and _is_free(place, _near(beside, place), 1):
                moved[name] = place
                break
        insort(beside, moved[name])
    return moved


def _is_free(place: float, others: Sequence[float], distance: float) -> bool:
    return place >= 0.5 and all(abs(place - other) >= distance for other in others)


def _near(places: Sequence[float], place: float) -> Sequence[float]:
    return places[bisect_left(places, place - 1) : bisect_left(places, place + 1)]


def _across(
    kinds: dict[str, ComponentKind],
    rows: dict[str, int],
    pairs: Sequence[tuple[str, str]],
    centres: dict[str, float],
) -> frozenset[tuple[str, str]]:
    """Return the pairs of neighbours in a row, workers and NVSwitches left out."""
    of_row: dict[int, list[str]] = {}
    for name in sorted(centres, key=centres.__getitem__):
        if kinds[name] not in (*_WORKERS, "nvswitch"):
            of_row.setdefault(rows[name], []).append(name)
    neighbours = {pair for names in of_row.values() for pair in pairwise(names)}
    return frozenset(pair for pair in pairs if pair in neighbours or pair[::-1] in neighbours)


def _arcs(
    rows: dict[str, int], pairs: Sequence[tuple[str, str]], centres: dict[str, float]
) -> dict[tuple[str, str], float]:
    """Return how far the arc of each pair of one row leaves it."""
    distances = {(a, b): abs(centres[a] - centres[b]) for a, b in pairs if rows[a] == rows[b]}
    widest: dict[int, float] = {}
    for (a, _), distance in distances.items():
        widest[rows[a]] = max(widest.get(rows[a], 0.0), distance)
    return {pair: _arc_depth(d, widest[rows[pair[0]]]) for pair, d in distances.items()}


def _tops(
    kinds: dict[str, ComponentKind],
    rows: dict[str, int],
    arcs: dict[tuple[str, str], float],
) -> tuple[list[float], float]:
    """Return the upper edge of every row, and the height of all with the arcs below the last."""
    num_rows = max(rows.values()) + 1
    above, below = [0.0] * num_rows, [0.0] * num_rows
    of_row = {row: kinds[name] for name, row in rows.items()}
    for (a, _), depth in arcs.items():
        side = below if of_row[rows[a]] in (*_WORKERS, "nvswitch") else above
        side[rows[a]] = max(side[rows[a]], depth)
    tops: list[float] = []
    y = above[0]
    for row in range(num_rows):
        tops.append(y)
        y += BOX_HEIGHT + below[row]
        if row + 1 < num_rows:
            gap = _SWITCH_GAP if of_row[row + 1] == "nvswitch" else _ROW_GAP
            y += max(gap, above[row + 1] + _ROW_GAP / 2)
    return tops, y
