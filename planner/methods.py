"""Which methods run each operation: the libraries' own, and what the executor brings beside them.

Shared by the cost model, which prices them, and the executor, which runs them.
"""

from typing import Final

from planner.plan import Collective, Method

__all__ = ["LIBRARY_METHODS", "OWN_METHODS"]

# A library's default comes first: NCCL's tuner; what gloo runs unless told otherwise, and torch
# does not tell it: its all_reduce is a ring (gloo/allreduce.cc, Algorithm::UNSPECIFIED), of which
# torch makes a reduce_scatter; its broadcast is a binomial tree, its all_to_all posts all messages
# at once, and for the others all talk to the root. RCCL, HCCL and oneCCL are taken to run what NCCL
# runs.
_NCCL: Final[dict[Collective, tuple[Method, ...]]] = {
    "all_reduce": (Method("ring"), Method("tree")),
    "all_gather": (Method("ring"),),
    "reduce_scatter": (Method("ring"),),
    "all_to_all": (Method("direct"),),
    "send_recv": (Method("point_to_point"),),
}
LIBRARY_METHODS: Final[dict[str, dict[Collective, tuple[Method, ...]]]] = {
    **dict.fromkeys(("nccl", "rccl", "hccl", "oneccl"), _NCCL),
    "gloo": {
        "all_reduce": (Method("ring"),),
        "all_gather": (Method("ring"),),
        "reduce_scatter": (Method("ring"),),
        "all_to_all": (Method("direct"),),
        "broadcast": (Method("tree"),),
        "gather": (Method("direct"),),
        "scatter": (Method("direct"),),
        "send_recv": (Method("point_to_point"),),
    },
}

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
