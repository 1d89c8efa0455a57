"""Claims about collectives: bytes, by whom they are sent, and how long that takes."""

from collections.abc import Iterator

import numpy as np

from benchmarks.claims.claim import Claim, Verdict, as_share, as_times, fabric_of, laid, ranks, row
from planner.cost.collectives import Terms, collective_terms
from planner.cost.compression import Compared, Scheme, compare
from planner.cost.expert_traffic import dispatch_bytes, even_size_bytes
from planner.cost.sharing import needs_no_processor, processors_taken
from planner.cost.step_constants import step_constants
from planner.cost.traffic import busiest_exits, bytes_per_level
from planner.cost.work import Communication, rank_work
from planner.hardware.devices import device
from planner.layout.groups import Group, axis_group
from planner.model.blocks import parameter_count
from planner.model.bundled import load_model
from planner.plan import Collective, Method
from planner.topology.fabric import Fabric
from planner.units import format_bytes, format_count, format_seconds

__all__ = ["claims", "node_exit_bytes", "saved_share"]

_GIGABYTE = 1e9


def claims() -> Iterator[Claim]:
    """Yield the claims of this file."""
    yield hierarchies()
    yield int8()
    yield all_reduce_of_175b()
    yield copy_engines()
    yield gather()


def _terms(
    op: Collective, method: Method, fabric: Fabric, group: Group, size_bytes: float
) -> Terms:
    return collective_terms(op, method, fabric, group, row(size_bytes))


def _seconds(
    op: Collective, method: Method, fabric: Fabric, group: Group, size_bytes: float
) -> float:
    return float(_terms(op, method, fabric, group, size_bytes).total_s()[0])


# -------------------------------------------------------------------------------- hierarchies


def node_exit_bytes(
    op: Collective, method: Method, fabric: Fabric, group: Group, size_bytes: float
) -> float:
    """Return what leaves the busiest node in one call."""
    return float(busiest_exits(op, method, fabric, group, row(size_bytes))[1][0])


def hierarchies() -> Claim:
    """Against a ring, which enters each node once, next to nothing is cut."""
    fabric = fabric_of("dgx-a100", 4)
    group = ranks(fabric, 32)
    ways = [Method("ring"), Method("direct"), Method("hierarchical")]
    ring, direct, two_level = (
        node_exit_bytes("all_reduce", way, fabric, group, _GIGABYTE) for way in ways
    )
    ring_s, two_level_s = (
        _seconds("all_reduce", way, fabric, group, _GIGABYTE) for way in (ways[0], ways[2])
    )
    a_node = fabric.gpus_per_node
    cut, promised = two_level / ring, 1.2 / a_node
    verdict: Verdict = "only if" if two_level / direct <= promised else "wrong"
    faster = "faster" if two_level_s < ring_s else "slower"
    apart = max(ring_s, two_level_s) / min(ring_s, two_level_s)
    return Claim(
        3,
        "Hierarchical collectives cut cross-node volume to 1/N",
        f"an all_reduce of 1 GB over 4 nodes of dgx-a100 sends {format_bytes(two_level)} out of a "
        f"node in two levels, {format_bytes(ring)} as a flat ring, {format_bytes(direct)} where "
        "everybody sends to everybody.",
        "holds" if cut <= promised else verdict,
        f"It is 1/{direct / two_level:.0f} of what direct sends need: one over the GPUs of a node. "
        f"A ring in rank order crosses each node's border once, and of its bytes {as_share(cut)} "
        "are left; "
        f"as separate calls the levels are {as_times(apart)} {faster} than that ring here.",
    )


# -------------------------------------------------------------------------------- compression


def saved_share(exact: Compared, lossy: Compared, level: int | None = None) -> float:
    """Return the part of the exact bytes that a rank does not send: in all, or over a level."""
    own, exactly = (
        sum(float(sent[0]) for sent in one.sent_bytes[slice(level, level and level + 1)])
        for one in (lossy, exact)
    )
    return 1 - own / exactly


def int8() -> Claim:
    """A quarter of fp32 and half of bf16, and not where the bytes were few."""
    fabric, gpu = fabric_of("dgx-a100", 4), device("a100-sxm-80gb")

    def pair(precision: str, degree: int, stride: int) -> tuple[Compared, Compared]:
        group = ranks(fabric, degree, stride)
        found = compare(fabric, gpu, group, row(_GIGABYTE), [Scheme("int8")], precision=precision)
        return found[0], found[1]

    of_fp32, of_bf16 = (saved_share(*pair(name, 4, 8)) for name in ("fp32", "bf16"))
    alone, everyone = pair("fp32", 4, 8)[1], pair("fp32", 32, 1)
    rail = saved_share(*everyone, level=1)
    near = abs(of_fp32 - 0.75) < 0.02
    verdict: Verdict = "only if" if near and of_bf16 < 0.7 else ("holds" if near else "wrong")
    return Claim(
        4,
        "int8 saves 75 % of the communication",
        f"in an all_reduce of 1 GB, one rank on each of 4 nodes of dgx-a100, {as_share(of_fp32)} "
        f"of the bytes of fp32 gradients, {as_share(of_bf16)} of bf16 ones; "
        f"{as_times(alone.gain[0])} the speed of fp32, quantising included.",
        verdict,
        "int8 (an all_to_all, a sum in fp32, an all_gather) has a quarter of fp32's bytes, half of "
        "bf16's, and scales beside them. With all 8 GPUs of each node in the group it saves "
        f"{as_share(rail)} of what crosses nodes and runs at {as_times(everyone[1].gain[0])} the "
        "speed: sums are made before they leave a node, an all_to_all sends their parts.",
    )


# ------------------------------------------------------------------------- the large all_reduce


def all_reduce_of_175b() -> Claim:
    """700 GB is the buffer of a rank that holds it all; none does."""
    model = load_model("gpt3-175b")
    whole = 4 * parameter_count(model)
    problem, one = laid(
        model.name,
        "dgx-a100",
        128,
        {"tp": 8, "pp": 16, "dp": 8, "zero_stage": 0},
        global_batch_size=2048,
        seq_len=2048,
    )
    fabric, group, ring = problem.fabric, axis_group(problem.fabric, one, "dp_cp"), Method("ring")
    calls = [
        op
        for op in rank_work(problem, one)
        if isinstance(op, Communication) and op.name == "gradient_reduce"
    ]
    own = sum(float((op.size_bytes * op.repeats)[0]) for op in calls)

    def sent(size_bytes: float) -> float:
        levels = bytes_per_level("all_reduce", ring, fabric, group, row(size_bytes))
        return sum(float(level[0]) for level in levels)

    return Claim(
        5,
        "An all_reduce of a 175B model moves 700 GB",
        f"{format_bytes(whole)} is the buffer of {format_count(parameter_count(model))} fp32 "
        f"gradients (gpt3-175b); over 8 replicas a rank would send {format_bytes(sent(whole))}. In "
        f"{one.layout(0)} a rank reduces {format_bytes(own)} and sends {format_bytes(sent(own))}.",
        "holds" if abs(sent(whole) / 700e9 - 1) < 0.1 else "wrong",
        "The size of a message is not what it moves: a ring sends 2 (n-1)/n of it from every rank. "
        "And no rank holds a model of that size whole; of tensor and pipeline parallel shards each "
        f"data-parallel group reduces {as_share(own / whole)}.",
    )


# --------------------------------------------------------------------------- engines and roots


def copy_engines() -> Claim:
    """They leave processors alone; what a launch takes they hardly change."""
    fabric = fabric_of("mi300x-8x400-ib", 1)
    group, ring, engines = ranks(fabric, 8), Method("ring"), Method("copy_engine", "mori")
    low, high = 1.0, 2.0**33
    while high - low > 1:  # the size whose ring takes 50 us
        middle = (low + high) / 2
        short = _seconds("all_gather", ring, fabric, group, middle) < 50e-6
        low, high = (middle, high) if short else (low, middle)
    by_engines = _terms("all_gather", engines, fabric, group, high)
    by_ring = _terms("all_gather", ring, fabric, group, high)
    took = float(by_engines.total_s()[0])
    held = float(processors_taken("all_gather", fabric, group, row(high))[0])
    assert needs_no_processor(engines), "that is what they are for"
    verdict: Verdict = "holds" if took <= 12e-6 else "wrong"
    return Claim(
        13,
        "SDMA takes communication from 50 us to 10 us",
        f"on a node of mi300x-8x400-ib an all_gather that RCCL's ring does in "
        f"{format_seconds(float(by_ring.total_s()[0]))} ({format_bytes(high)}) takes copy engines "
        f"{format_seconds(took)}, of which {format_seconds(float(by_engines.fixed_s[0]))} is the "
        "launch (modelled, not validated).",
        verdict,
        "Two things are mixed up. A copy-engine all_gather, inside one load/store domain, gives "
        f"the {held:.0f} compute units of RCCL's kernels back to compute beside it; it does not "
        "make a lone message several times faster. A launch "
        f"({format_seconds(step_constants().launch_s)} of the host for every kernel) gets shorter "
        "with captured graphs, whoever moves the bytes.",
    )


def gather() -> Claim:
    """Once all rows go to one rank, its link decides, whoever is called."""
    fabric, way, num_ranks = fabric_of("dgx-h100", 4), Method("direct"), 32
    group, own = ranks(fabric, num_ranks), _GIGABYTE / 32
    loads = np.zeros(num_ranks)
    loads[0] = num_ranks
    collapsed = dispatch_bytes(loads, own)
    gather_s = _seconds("gather", way, fabric, group, float(collapsed[:, 0].sum()))
    uneven_s = _seconds("all_to_all", way, fabric, group, even_size_bytes(collapsed))
    even_s = _seconds("all_to_all", way, fabric, group, own)
    into = float(collapsed[1:, 0].sum())
    return Claim(
        14,
        "A gather to the hot expert's rank costs 1/world of an all_to_all",
        f"{format_bytes(own)} of rows on each of {num_ranks} ranks of dgx-h100, all for one rank: "
        f"{format_seconds(gather_s)} by a gather, {format_seconds(uneven_s)} by an uneven "
        f"all_to_all; {format_seconds(even_s)} for an all_to_all of as many rows, evenly loaded.",
        "holds" if gather_s < 2 * uneven_s / num_ranks else "wrong",
        f"It is the same incast: {format_bytes(into)} into one link either way. What costs is that "
        "all rows go there, and no choice of the call changes it.",
    )
