"""What NCCL and RCCL say of how they ran a call: lines of ``NCCL_DEBUG_SUBSYS=TUNING``.

Older versions give the number of the algorithm and S, and the oldest no operation; newer ones
the name and what one rank passes (NCCL 2.30.7, src/enqueue.cc), which of all_gather and its like
is a part of S. Calls on windows have forms of their own (src/scheduler)::

    AllGather: 37756928 Bytes -> Algo 1 proto 2 time 2860.208008
    AllReduce: 1048576 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..23}
    AllReduce [Symmetric]: 2097152 Bytes -> Kernel AllReduce_RSxLDMC_AGxSTMC nchannels 16 ...
    AllGather [Copy Engine]: 16777216 Bytes -> cudaMemcpy
"""

import re
from typing import Final, NamedTuple

from planner.plan import Algorithm, Collective, Method

__all__ = ["OPS", "Choice", "choice_in"]

# By the name of the binary without "_perf", and of NCCL's function, in small letters.
OPS: Final[dict[str, Collective]] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "sendrecv": "send_recv",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
}
# In the order of their numbers.
_ALGORITHMS: Final[dict[str, Algorithm]] = {
    "tree": "tree",
    "ring": "ring",
    "collnetdirect": "collnet",
    "collnetchain": "collnet",
    "nvls": "nvls",
    "nvlstree": "nvls_tree",
    "pat": "pat",
}
# Of buffers that are registered as windows (src/sym_kernels.cc); of other kernels there is no name.
_KERNELS: Final[dict[str, Algorithm]] = {
    "AllReduce_AGxLL_R": "one_shot",
    "AllReduce_RSxLD_AGxST": "two_shot",
    "AllReduce_RSxTmaLD_AGxTmaST": "two_shot",
    "AllReduce_RSxLDMC_AGxSTMC": "nvls",
    "AllGather_LL": "direct",
    "AllGather_ST": "direct",
    "AllGather_TmaST": "direct",
    "AllGather_LLMC": "nvls",
    "AllGather_STMC": "nvls",
    "AllGather_TmaSTMC": "nvls",
    "ReduceScatter_LL": "direct",
    "ReduceScatter_LD": "direct",
    "ReduceScatter_TmaLD": "direct",
    "ReduceScatter_LDMC": "nvls",
}

_CHOICE: Final = re.compile(
    r"(?:(\w+): )?([0-9]{1,18}) Bytes -> Algo (\w+) proto \w+ (channel|time)"
)
_SPECIAL: Final = re.compile(
    r"(\w+) \[(Copy Engine|Symmetric)\]: ([0-9]{1,18}) Bytes -> (?:Kernel (\w+))?"
)


class Choice(NamedTuple):
    """How the library ran one call.

    Attributes:
        op: Operation; None where the line does not say it.
        size_bytes: S, or one rank's part of it.
        is_part: Which of these, for operations that share S out.
        method: None = by what has no name here.
    """

    op: Collective | None
    size_bytes: int
    is_part: bool
    method: Method | None


def choice_in(line: str) -> Choice | None:
    """Return the choice that a line tells of; None if it tells of none, or of another operation.

    >>> str(choice_in("AllGather: 37756928 Bytes -> Algo 1 proto 2 time 2860.208008").method)
    'ring'
    """
    method: Method | None = None
    if " Bytes -> " not in line:
        return None
    if found := _CHOICE.search(line):
        name, size, algorithm, form = found.groups()
        known = _algorithm(algorithm)
        method = Method(known) if known else None
    elif found := _SPECIAL.search(line):
        name, form, size, kernel = found.groups()
        if form == "Copy Engine":
            method = Method("copy_engine", "nccl_zero_cta")
        elif kernel in _KERNELS:
            method = Method(_KERNELS[kernel])
    else:
        return None
    if name is not None and name.lower() not in OPS:
        return None
    return Choice(OPS[name.lower()] if name else None, int(size), form != "time", method)


def _algorithm(text: str) -> Algorithm | None:
    """Return the algorithm of a name or a number."""
    if re.fullmatch("[0-9]{1,2}", text):
        known = [*_ALGORITHMS.values()]
        return known[int(text)] if int(text) < len(known) else None
    return _ALGORITHMS.get(text.lower().replace("_", ""))
