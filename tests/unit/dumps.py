"""Questions that tests of readers ask of a dump."""

from planner.topology.importers.dump import FoundPart, NodeDump

__all__ = ["children", "of_kind", "part", "remarks"]


def of_kind(dump: NodeDump, kind: str) -> list[FoundPart]:
    return [part for part in dump.parts if part.kind == kind]


def part(dump: NodeDump, name: str) -> FoundPart:
    return next(part for part in dump.parts if part.name == name)


def children(dump: NodeDump, parent: str) -> set[str]:
    return {part.name for part in dump.parts if part.parent == parent}


def remarks(dump: NodeDump) -> str:
    return "\n".join(str(remark) for remark in dump.remarks)
