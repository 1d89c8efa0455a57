"""Names in Slurm's topology files: of switches and blocks, and the lists of what is below them."""

from collections.abc import Iterable, Mapping

from planner.topology.importers.dump import Remarks, TopologyTextError
from planner.topology.importers.hostlist import expand

__all__ = ["listed_names", "note_entry", "shown_names"]


def note_entry(lines: dict[str, int], kind: str, name: str, line: int, *, source: str) -> None:
    """Note in which line a switch or block is defined.

    Raises:
        TopologyTextError: It is defined already.
    """
    if name in lines:
        raise TopologyTextError(
            f"defines {kind} {name!r} again, first in line {lines[name]}; a {kind} has one entry",
            source=source,
            line=line,
        )
    lines[name] = line


def listed_names(
    text: str, what: str, line: int, *, max_hosts: int, source: str, remarks: Remarks
) -> tuple[str, ...]:
    """Return the names of a host list, each once.

    Args:
        text: The list; may be empty.
        what: Whose it is, in words: "switch 's0'".
        line: Where it stands.
        max_hosts: Refuse more names than this.
        source: What the text is called in messages.
        remarks: Is told of names that are there twice.

    Raises:
        TopologyTextError: It is no list of hosts, or does not say which they are.
    """
    if not text:
        return ()
    if text.upper() == "ALL":
        raise TopologyTextError(
            f"{what} names ALL; which nodes these are is not in the file, list them",
            source=source,
            line=line,
        )
    names = expand(text, source=source, line=line, max_hosts=max_hosts)
    once = tuple(dict.fromkeys(names))
    if len(once) < len(names):
        remarks.add(f"{what} names some twice; counted once", line)
    return once


def shown_names(names: Iterable[str], real_names: Mapping[str, str]) -> dict[str, str]:
    """Return what to call each: its name from the comments, where those tell all of them apart."""
    named = {name: real_names.get(name, name) for name in names}
    return named if len(set(named.values())) == len(named) else {name: name for name in named}
