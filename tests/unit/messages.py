"""Who sends how many bytes to whom, by each collective method: the oracle of the bytes on levels.

S is nccl-tests' size. Of gloo from its sources (ring: allreduce.cc, allgather.cc; broadcast.cc,
alltoall.cc, gather.cc, scatter.cc); of torch, that it reduces all where gloo should scatter.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from executor.collectives.tree import double_binary_tree
from planner.plan import Collective, Method
from planner.topology.document import Library

__all__ = ["Message", "busiest_of_level", "mean_by_level", "messages"]

Message = tuple[int, int, float]  # from, to, bytes
Messages = Iterator[Message]
Ranks = Sequence[int]

_PASSES: dict[Collective, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def messages(
    op: Collective,
    method: Method,
    library: Library,
    ranks: Ranks,
    unit_sizes: Sequence[int],
    size_bytes: float,
) -> Messages:
    """Yield what the members of a group send each other; the first one is the root.

    Args:
        op: Operation.
        method: How it is done.
        library: Whose calls the path "library" means.
        ranks: Members, in order.
        unit_sizes: Ranks of a unit of each level, innermost first; units are runs of ranks.
        size_bytes: S.
    """
    algorithm, path = method
    if algorithm in ("hierarchical", "three_level"):
        if op == "all_to_all":
            yield from _two_phases(_units(ranks, unit_sizes[0]), size_bytes)
        else:
            yield from _hierarchy(op, method, library, ranks, unit_sizes, size_bytes)
        return
    if op == "reduce_scatter" and (library, path) == ("gloo", "library"):
        op = "all_reduce"
    if algorithm in ("ring", "pat"):  # of a PAT the bytes are modelled, not to whom
        yield from _ring(op, ranks, size_bytes)
    elif algorithm == "tree":
        yield from _tree(op, path == "executor", library, ranks, unit_sizes[0], size_bytes)
    elif algorithm == "halving_doubling":
        yield from _exchanges(op, ranks, size_bytes)
    elif algorithm == "point_to_point":
        yield from ((a, b, size_bytes) for a, b in pairwise(ranks))
    else:
        yield from _direct(op, ranks, size_bytes)


def mean_by_level(
    sent: Iterable[Message], unit_sizes: Sequence[int], num_ranks: int
) -> list[float]:
    """Return the bytes by the innermost level whose unit holds both ends, over ``num_ranks``."""
    found = [0.0] * len(unit_sizes)
    for a, b, num_bytes in sent:
        level = next(i for i, size in enumerate(unit_sizes) if a // size == b // size)
        found[level] += num_bytes / num_ranks
    return found


def busiest_of_level(sent: Iterable[Message], unit_sizes: Sequence[int]) -> list[float]:
    """Return per level the bytes out of, or into, the busiest unit of the level below."""
    passing: list[Counter[tuple[int, bool]]] = [Counter() for _ in unit_sizes]
    for a, b, num_bytes in sent:
        for counted, size in zip(passing, [1, *unit_sizes], strict=False):
            if a // size != b // size:
                counted[a // size, True] += num_bytes  # type: ignore[assignment]
                counted[b // size, False] += num_bytes  # type: ignore[assignment]
    return [max(counted.values(), default=0.0) for counted in passing]


def _units(ranks: Ranks, size: int) -> list[Ranks]:
    units: dict[int, list[int]] = {}
    for rank in ranks:
        units.setdefault(rank // size, []).append(rank)
    return list(units.values())


def _ring(op: Collective, ranks: Ranks, size_bytes: float) -> Messages:
    """Every member passes on n-1 of the n shards, or a chain all of S."""
    if op == "broadcast":
        yield from ((a, b, size_bytes) for a, b in pairwise(ranks))
        return
    if op == "reduce":
        yield from ((b, a, size_bytes) for a, b in pairwise(ranks))
        return
    share = _PASSES[op] * size_bytes * (len(ranks) - 1) / len(ranks)
    yield from ((a, b, share) for a, b in pairwise([*ranks, ranks[0]]) if a != b)


def _exchanges(op: Collective, ranks: Ranks, size_bytes: float) -> Messages:
    """Members 2**i apart exchange S / 2**(i + 1), for as many i as there are bits."""
    for i in range(len(ranks).bit_length() - 1):
        share = _PASSES[op] * size_bytes / 2 ** (i + 1)
        yield from ((a, ranks[at ^ (1 << i)], share) for at, a in enumerate(ranks))


def _direct(op: Collective, ranks: Ranks, size_bytes: float) -> Messages:
    """Each to each, or to and from the root; copies in memory are these too."""
    root, *others = ranks
    share = size_bytes / len(ranks)
    if op == "gather":
        yield from ((a, root, share) for a in others)
    elif op == "scatter":
        yield from ((root, b, share) for b in others)
    elif op == "broadcast":
        yield from ((root, b, size_bytes) for b in others)
    else:
        passes = _PASSES.get(op, 1)
        yield from ((a, b, passes * share) for a in ranks for b in ranks if a != b)


def _tree(
    op: Collective, is_ours: bool, library: Library, ranks: Ranks, unit: int, size_bytes: float
) -> Messages:
    if not is_ours and op == "broadcast":  # of gloo: binomial
        assert library == "gloo"
        for step in (2**i for i in range((len(ranks) - 1).bit_length())):
            yield from (
                (a, b, size_bytes) for a, b in zip(ranks[:step], ranks[step:], strict=False)
            )
    elif not is_ours and len(_units(ranks, unit)) == 1:  # of NCCL: a chain, S both ways
        for a, b in pairwise(ranks):
            yield from ((a, b, size_bytes), (b, a, size_bytes))
    else:
        units = _units(ranks, unit)
        for parents in double_binary_tree(units if len(units) > 1 else [(r,) for r in ranks]):
            yield from _along(dict(parents), op, ranks[0], size_bytes / 2)


def _along(
    parents: dict[int, int | None], op: Collective, root: int, size_bytes: float
) -> Messages:
    edges = {(child, parent) for child, parent in parents.items() if parent is not None}
    reached, left = {root}, edges
    while left:  # hung up at the root
        here = {(c, p) for c, p in left if c in reached or p in reached}
        left = left - here
        for child, parent in here:
            near, far = (child, parent) if child in reached else (parent, child)
            yield near, far, size_bytes
            if op == "all_reduce":
                yield far, near, size_bytes
        reached |= {rank for edge in here for rank in edge}


def _hierarchy(
    op: Collective,
    method: Method,
    library: Library,
    ranks: Ranks,
    unit_sizes: Sequence[int],
    size_bytes: float,
) -> Messages:
    algorithm, path = method
    flat = Method("ring", "library" if path == "library" else "executor")
    if (op, path, library) == ("broadcast", "library", "gloo"):
        flat = Method("tree")
    inside = Method("copy_engine", "shm") if path == "shm" else flat
    above = Method("hierarchical", flat.path) if algorithm == "three_level" else flat
    units, outer = _units(ranks, unit_sizes[0]), unit_sizes[1:]
    if op == "broadcast":  # by the root's fellows, who then tell their units
        heads = [unit[0] for unit in units]
        yield from messages(op, above, library, heads, outer, size_bytes)
    else:
        for mates in zip(*units, strict=True):
            yield from messages(op, above, library, mates, outer, size_bytes / len(units[0]))
    parts: dict[Collective, tuple[Collective, ...]] = {
        "all_reduce": ("reduce_scatter", "all_gather")
    }
    for part in parts.get(op, (op,)):
        for unit in units:
            yield from messages(part, inside, library, unit, unit_sizes[:1], size_bytes)


def _two_phases(units: Sequence[Ranks], size_bytes: float) -> Messages:
    """To each of the own unit what is for its place in any unit, then to that place in each."""
    inside = len(units[0])
    for unit in units:
        yield from ((a, b, size_bytes / inside) for a in unit for b in unit if a != b)
    for mates in zip(*units, strict=True):
        share = size_bytes / len(units)
        yield from ((a, b, share) for a in mates for b in mates if a != b)
