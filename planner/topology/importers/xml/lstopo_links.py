"""The distance matrices of lstopo: NVLinkBandwidth, XGMIBandwidth, XGMIHops.

Values are MB/s (10**6). NVLinkBandwidth counts one direction: hwloc adds the one-way rate of each
link, from the NVLink version, to both places of the matrix (its hwloc/topology-nvml.c). The
diagonal is a made-up value for local memory. XGMIBandwidth of hwloc up to 2.12 is the constant
100,000 for every pair that xGMI joins at all, directly or not, marked as unverified in
hwloc/topology-rsmi.c: such a matrix tells who is joined, not how fast.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from planner.topology.importers.dump import PeerLink, Remarks
from planner.topology.importers.xml.reading import Element, whole_number

__all__ = ["FoundMatrices", "find_matrices"]

_MAX_OBJECTS: Final = 256
_UNVERIFIED_XGMI_MBPS: Final = 100_000
_MAX_MBPS: Final = 100_000_000
_KINDS: Final[dict[str, Literal["nvlink", "xgmi"]]] = {
    "NVLinkBandwidth": "nvlink",
    "XGMIBandwidth": "xgmi",
}
_WITHOUT_LINKS: Final = ("NUMALatency", "XGMIHops")

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class FoundMatrices:
    """Links by the names of the parts at their ends."""

    links: tuple[PeerLink, ...]
    assumptions: tuple[str, ...]


@dataclass(slots=True)
class _Matrix:
    """Values of the pairs of a matrix, in its order; ``names`` has None for what is no part."""

    line: int
    names: list[str | None] = field(default_factory=list)
    values: dict[Pair, int] = field(default_factory=dict)


def find_matrices(root: Element, parts: Mapping[str, str], remarks: Remarks) -> FoundMatrices:
    """Return the links that the matrices of a topology tell of.

    Args:
        root: The ``<topology>``.
        parts: Name of the part that an object belongs to, by "OSDev:802", "PCIDev:449",
            "Package:3": type and gp_index.
        remarks: Takes what is left out.
    """
    matrices: dict[str, _Matrix] = {}
    for element in root.children:
        name = element.get("name")
        if element.tag not in ("distances2", "distances2hetero") or name == "NUMALatency":
            continue
        if name not in (*_KINDS, *_WITHOUT_LINKS):
            remarks.add(f"distances {name[:40]!r} are not read", element.line)
        elif name in matrices:
            remarks.add(f"distances {name!r} are there twice: the first are read", element.line)
        elif (matrix := _matrix(element, parts, remarks)) is not None:
            matrices[name] = matrix
    links: list[PeerLink] = []
    assumptions: list[str] = []
    for name, kind in _KINDS.items():
        if name in matrices:
            found = list(_links(matrices[name], kind, remarks))
            if kind == "xgmi":
                found = _direct(found, matrices.get("XGMIHops"), assumptions)
            links += found
    return FoundMatrices(tuple(links), tuple(assumptions))


def _matrix(element: Element, parts: Mapping[str, str], remarks: Remarks) -> _Matrix | None:
    """Return one matrix; None if its size is not what it says."""
    size = whole_number(element.get("nbobjs"), 1, _MAX_OBJECTS)
    prefix = "" if element.tag == "distances2hetero" else f"{element.get('type')}:"
    indexes = [prefix + word for word in _words(element.all("indexes"))]
    values = list(_words(element.all("u64values")))
    if size is None or len(indexes) != size or len(values) != size * size:
        remarks.add(
            f"{element.get('name')} has {len(indexes)} objects and {len(values)} values for "
            f"nbobjs={element.get('nbobjs')[:12]!r}: left out",
            element.line,
        )
        return None
    matrix = _Matrix(element.line, [parts.get(index) for index in indexes])
    unknown = [index for index, name in zip(indexes, matrix.names, strict=True) if name is None]
    if unknown:
        remarks.add(
            f"{element.get('name')} has {len(unknown)} objects that are no GPU, CPU or NVSwitch "
            f"(first {unknown[0][:40]}): their links are left out",
            element.line,
        )
    for place, word in enumerate(values):
        a, b = matrix.names[place // size], matrix.names[place % size]
        if a is not None and b is not None and a != b:
            value = whole_number(word, 0, _MAX_MBPS)
            if value is None:
                remarks.add(f"{word[:20]!r} is no rate: taken as no link", element.line)
            matrix.values[a, b] = value or 0
    return matrix


def _words(elements: Iterable[Element]) -> Iterable[str]:
    for element in elements:
        yield from element.text.split()


def _links(
    matrix: _Matrix, kind: Literal["nvlink", "xgmi"], remarks: Remarks
) -> Iterable[PeerLink]:
    """Yield each pair with a value once, as it stands above the diagonal."""
    places = {name: place for place, name in enumerate(matrix.names) if name is not None}
    for (a, b), value in matrix.values.items():
        back = matrix.values[b, a]
        if places[a] > places[b] or (value == 0 and back == 0):
            continue
        if value != back:
            remarks.add(
                f"{kind} of {a} and {b} is {value} one way and {back} MB/s the other; "
                "the larger is taken",
                matrix.line,
            )
        yield PeerLink(a, b, kind, bytes_per_s=max(value, back) * 1e6, line=matrix.line)


def _direct(links: list[PeerLink], hops: _Matrix | None, assumptions: list[str]) -> list[PeerLink]:
    """Return xGMI links without those of several hops, and without hwloc's placeholder rate."""
    if hops is not None:
        links = [link for link in links if hops.values.get((link.a, link.b), 1) <= 1]
    rates = {link.bytes_per_s for link in links}
    if rates != {_UNVERIFIED_XGMI_MBPS * 1e6}:
        return links
    assumptions.append(
        "lstopo says 100 GB/s for every pair that xGMI joins, directly or over another GPU, which "
        "it has not measured: the pairs are taken as direct, their rate is left open; "
        "amd-smi topology or RCCL's NCCL_TOPO_DUMP_FILE counts the links"
    )
    return [PeerLink(link.a, link.b, link.kind, line=link.line) for link in links]
