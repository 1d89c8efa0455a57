"""Which methods run each operation: the libraries' own, and what the executor brings beside them.

Shared by the cost model, which prices them, and the executor, which runs them.
"""

from dataclasses import dataclass
from typing import Final, Literal

from planner.plan import Algorithm, Collective, Method

__all__ = [
    "LIBRARY_RULES",
    "NVLS_MOST_SHARDS",
    "OTHER_METHODS",
    "OWN_METHODS",
    "LibraryRule",
    "Need",
    "is_validated",
    "library_rules",
]

# What a call needs of the machine: switches inside a domain that copy and reduce, several units of
# GPUs, switches of the network that reduce.
Need = Literal["multicast", "network", "sharp"]


@dataclass(frozen=True, slots=True)
class LibraryRule:
    """An algorithm that a library has for some operations.

    Attributes:
        ops: Operations.
        algorithm: How it is done.
        why: Where it is said, and what limits it.
        needs: Of the machine; what it needs of a group is in ``planner.cost.algorithms``.
        since: First version of the library that has it; empty where all in use do.
    """

    ops: tuple[Collective, ...]
    algorithm: Algorithm
    why: str
    needs: tuple[Need, ...] = ()
    since: str = ""


_TUNING: Final = "NCCL 2.30.7 src/graph/tuning.cc"
_RINGS: Final = LibraryRule(
    ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"), "ring", _TUNING
)
_TREES: Final = LibraryRule(("all_reduce",), "tree", f"{_TUNING}: trees for all_reduce only")
_SENDS: Final = (
    LibraryRule(
        ("all_to_all", "gather", "scatter"), "direct", "grouped sends: no algorithm to choose"
    ),
    LibraryRule(("send_recv",), "point_to_point", "one send, one receive"),
)
_MPI: Final = "Thakur, Rabenseifner, Gropp 2005 (MPICH); Open MPI coll/tuned"
# The first that can run an operation is the default where the library does not choose by itself.
LIBRARY_RULES: Final[dict[str, tuple[LibraryRule, ...]]] = {
    "nccl": (
        _RINGS,
        _TREES,
        LibraryRule(
            ("all_reduce", "all_gather", "reduce_scatter"),
            "nvls",
            f"{_TUNING}: inside one NVLink domain whose switches reduce (NVSwitch 3 and later)",
            ("multicast",),
            "2.17",
        ),
        LibraryRule(
            ("all_reduce",),
            "nvls_tree",
            f"{_TUNING}: off on one node",
            ("multicast", "network"),
            "2.18",
        ),
        LibraryRule(
            ("all_reduce",),
            "collnet",
            f"{_TUNING}: off without a SHARP plugin",
            ("network", "sharp"),
            "2.6",
        ),
        LibraryRule(
            ("all_gather", "reduce_scatter"),
            "pat",
            f"{_TUNING}: only with one GPU per node",
            ("network",),
            "2.23",
        ),
        *_SENDS,
    ),
    "rccl": (_RINGS, _TREES, *_SENDS),
    "hccl": (_RINGS, _TREES, *_SENDS),
    "oneccl": (_RINGS, _TREES, *_SENDS),
    # torch leaves gloo its defaults: an all_reduce is a ring (gloo/allreduce.cc,
    # Algorithm::UNSPECIFIED), of which torch makes a reduce_scatter; a broadcast is a binomial
    # tree, an all_to_all posts all messages at once, and for the others all talk to the root.
    "gloo": (
        LibraryRule(("all_reduce", "all_gather", "reduce_scatter"), "ring", "gloo/allreduce.cc"),
        LibraryRule(("broadcast",), "tree", "gloo/broadcast.cc: binomial"),
        *_SENDS,
    ),
    # Which of them an MPI takes is its own matter; torch has MPI only where built from source.
    "mpi": (
        LibraryRule(("all_reduce", "all_gather", "reduce_scatter"), "ring", _MPI),
        LibraryRule(("all_reduce", "all_gather", "reduce_scatter"), "halving_doubling", _MPI),
        LibraryRule(("broadcast",), "tree", f"{_MPI}: binomial"),
        LibraryRule(("all_to_all",), "pairwise", _MPI),
        *_SENDS,
    ),
}


# What others run on GPUs beside the library, inside one domain whose members map each other's
# memory: priced, and planned by nobody here.
_PEER_KERNELS: Final = "vLLM's custom all-reduce; NCCL 2.30's contributed LSA kernels"
OTHER_METHODS: Final[dict[str, dict[Collective, tuple[tuple[Method, str], ...]]]] = {
    "nccl": {
        "all_reduce": (
            (Method("one_shot"), _PEER_KERNELS),
            (Method("two_shot"), _PEER_KERNELS),
        ),
        **dict.fromkeys(
            ("all_gather", "all_to_all", "gather", "scatter"),
            (
                (
                    Method("copy_engine", "nccl_zero_cta"),
                    "NCCL 2.28 and later, CTA policy zero, symmetric windows; nothing is reduced",
                ),
            ),
        ),
    },
    "rccl": dict.fromkeys(
        ("all_gather", "reduce_scatter"),
        (
            (
                Method("copy_engine", "mori"),
                "mori: SDMA engines, the WORLD group of one node (DeepSpeed#7999)",
            ),
        ),
    ),
}


# NCCL 2.30.7 has NVLS gathers and scatters for no more ranks of one node (NCCL_MAX_NVLS_ARITY).
NVLS_MOST_SHARDS: Final = 32

# What published measurements were compared with, by library. The rest has the same physics,
# and nobody knows how well. All of gloo's calls and ours beside them are in docs/lab.md.
_RINGED: Final[tuple[tuple[Collective, Algorithm], ...]] = (
    ("all_reduce", "ring"),
    ("all_gather", "ring"),
    ("reduce_scatter", "ring"),
)
_VALIDATED: Final[dict[str, frozenset[tuple[Collective, Algorithm]]]] = {
    "nccl": frozenset(
        {
            *_RINGED,
            *(("all_reduce", algorithm) for algorithm in ("tree", "nvls", "nvls_tree")),
            *(("all_reduce", algorithm) for algorithm in ("one_shot", "two_shot")),
            *((op, "ring") for op in ("broadcast", "reduce")),
            ("all_to_all", "direct"),
            ("send_recv", "point_to_point"),
        }
    ),
    "rccl": frozenset({*_RINGED, ("all_reduce", "tree"), ("all_to_all", "direct")}),
    "oneccl": frozenset(_RINGED),
}


def is_validated(library: str, op: Collective, method: Method) -> bool:
    """Return whether the price of such a call was ever compared with a measured one."""
    if library == "gloo":
        return op != "reduce"
    known = _VALIDATED.get(library, frozenset())
    return method.path == "library" and (op, method.algorithm) in known


def library_rules(library: str, op: Collective) -> tuple[LibraryRule, ...]:
    """Return what a library has for ``op``, its default first."""
    return tuple(rule for rule in LIBRARY_RULES[library] if op in rule.ops)


_HIERARCHIES: Final = tuple(Method("hierarchical", path) for path in ("library", "executor", "shm"))
_REDUCING: Final = (
    *_HIERARCHIES,
    *(Method("three_level", path) for path in ("executor", "shm")),
    *(Method(algorithm, "executor") for algorithm in ("ring", "halving_doubling", "direct")),
    Method("copy_engine", "shm"),
)
# Between GPUs that is hierarchies of groups alone: messages and shared memory are those of CPUs.
_BETWEEN_GPUS: Final[dict[Collective, tuple[Method, ...]]] = dict.fromkeys(
    ("all_reduce", "all_gather", "reduce_scatter"), (Method("hierarchical"),)
)
OWN_METHODS: Final[dict[str, dict[Collective, tuple[Method, ...]]]] = {
    "mpi": {},
    **dict.fromkeys(("nccl", "rccl", "hccl", "oneccl"), _BETWEEN_GPUS),
    "gloo": {
        "all_reduce": (*_REDUCING, Method("tree", "executor")),
        "all_gather": _REDUCING,
        "reduce_scatter": _REDUCING,
        "all_to_all": tuple(
            Method(algorithm, "executor") for algorithm in ("direct", "pairwise", "hierarchical")
        ),
        "broadcast": (
            *_HIERARCHIES,
            Method("ring", "executor"),
            Method("tree", "executor"),
            Method("copy_engine", "shm"),
        ),
        "gather": (Method("direct", "executor"),),
        "scatter": (Method("direct", "executor"),),
    },
}
