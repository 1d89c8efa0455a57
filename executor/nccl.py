"""A plan's choices as settings of NCCL, made before its groups are.

NCCL chooses an algorithm call by call, from a table that three things can bend:

- **NCCL_ALGO** names the algorithms a function may use, in all groups and at all sizes (user guide,
  "NCCL_ALGO"; per function since NCCL 2.24). It can say a plan whose every choice is a ring, and no
  other: without ring in the list NCCL fails in the groups, types and reductions that the others do
  not have, and with it NCCL chooses.
- **A tuner's file**: NCCL's example plugin (``plugins/tuner/example``, with a file since 2.27.5)
  reads lines of a function, a range of bytes, an algorithm and the nodes and ranks of a group. The
  first line wins that matches and names what NCCL has for the call: the plugin passes over others.
  Bytes are nccl-tests' S, as in the plan (``src/enqueue.cc``, ``ncclGetAlgoInfo``).
- **Options of a group**: its CTAs, its CTA policy, the priority of its stream.

What the file costs: a line has to name a protocol too, and only ``simple`` is right everywhere
(NVLS, CollNet and PAT have no other), so small messages of rings and trees lose LL. Its channels
are 0, which NCCL reads as "not set": the documented -1 leaves the 1 that the plugin starts with,
and so does a call that no line matches (plugin.c of NCCL 2.30.7; ROCm/rccl#1985 mended it there).
So the file is written only where NCCL_ALGO cannot say the plan, and a line for a ring follows what
not every call can have.

A plan of what NCCL takes by itself, at the only sizes that it sends, sets no algorithm.

**No setting made here ever reached an NCCL in this project**: tests read the lines as the plugin's
source does (NCCL 2.30.7) and compare them with the plan.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from executor.errors import PlanMismatchError, UnsupportedPlanError
from planner.methods import LIBRARY_RULES, NVLS_MOST_SHARDS, library_rules
from planner.plan import AXES, Algorithm, Axis, Collective, CollectiveChoice, Method, Plan

__all__ = [
    "GroupSettings",
    "NcclSettings",
    "TunerRule",
    "group_options",
    "nccl_settings",
]

# The collectives with several algorithms in NCCL, by its names for them; all_to_all, gather and
# scatter are sends and receives there.
_TUNED: Final[dict[Collective, str]] = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "broadcast": "broadcast",
}
# CollNet's gathers and scatters (src/graph/tuning.cc) have no price in the planner.
_ALGORITHMS: Final[dict[Collective, frozenset[Algorithm]]] = {
    op: frozenset(rule.algorithm for rule in library_rules("nccl", op))
    | ({"collnet"} if op in ("all_gather", "reduce_scatter") else set())
    for op in _TUNED
}
# By the plugin's names. Of several NCCL takes the first that it has for the call's group, type and
# reduction: no average has NVLS, nor a reduce_scatter's PAT (src/enqueue.cc, updateCollCostTable).
_NAMES: Final[dict[Algorithm, tuple[str, ...]]] = {
    "ring": ("ring",),
    "tree": ("tree",),
    "nvls": ("nvls", "ring"),
    "nvls_tree": ("nvls_tree", "ring"),
    "collnet": ("collnet_direct", "collnet_chain", "ring"),
    "pat": ("pat", "ring"),
}
# The variables that turn them off (src/transport/nvls.cc, src/init.cc, src/graph/tuning.cc), and
# what leaves them on beside no variable at all.
_NVLS_ON: Final[dict[str, tuple[str, ...]]] = {"NCCL_NVLS_ENABLE": ("1", "2")}
_LEAVES_ON: Final[dict[Algorithm, dict[str, tuple[str, ...]]]] = {
    "nvls": _NVLS_ON,
    "nvls_tree": _NVLS_ON,
    "collnet": {"NCCL_COLLNET_NODE_THRESHOLD": ("0", "1", "2")},
    "pat": {"NCCL_PAT_ENABLE": ("1", "2")},
}
_TURNS_ON: Final[dict[Algorithm, dict[str, str]]] = {"collnet": {"NCCL_COLLNET_ENABLE": "1"}}
_SINCE: Final[dict[str, str]] = {
    **{rule.algorithm: rule.since for rule in LIBRARY_RULES["nccl"] if rule.since},
    "NCCL_ALGO by function": "2.24",
}
# What would have NCCL take something else than it does by itself.
_OVERRULING: Final = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_TUNER_PLUGIN")
# What a plan may make of NCCL's calls: one, or one for each part of a hierarchy.
_CALLED: Final = frozenset({"singleton", *_NAMES, "hierarchical", "three_level"})
_MAX_COLLNET_RANKS: Final = 8  # of a node (NCCL_MAX_DIRECT_ARITY + 1)
_NUM_CHOICES_SHOWN: Final = 3
_ANY_SIZE: Final = (1 << 64) - 1  # the plugin reads sizes with strtoull into a size_t
_MAX_CTAS: Final = 64  # user guide, NCCL_MAX_CTAS
_MAX_CGA_CLUSTER_SIZE: Final = 8  # user guide, NCCL_CGA_CLUSTER_SIZE
_EXAMPLE_PLUGIN: Final = "libnccl-tuner-example.so"


@dataclass(frozen=True, slots=True)
class TunerRule:
    """What the tuner's file says: this algorithm, for these bytes, in groups of this shape.

    Attributes:
        op: Operation.
        min_bytes: Smallest S, included.
        max_bytes: Largest S, included.
        algorithm: One of NCCL's.
        num_nodes: Nodes of the group, as NCCL counts them.
        num_ranks: Ranks of the group.
    """

    op: Collective
    min_bytes: int
    max_bytes: int
    algorithm: Algorithm
    num_nodes: int
    num_ranks: int

    def lines(self) -> list[str]:
        """Return its lines, without what is optional: the algorithm, and what replaces it.

        >>> TunerRule("all_reduce", 0, 1023, "tree", 4, 32).lines()
        ['allreduce,0,1023,tree,simple,0,4,32']
        >>> TunerRule("all_gather", 0, 9, "pat", 4, 4).lines()
        ['allgather,0,9,pat,simple,0,4,4', 'allgather,0,9,ring,simple,0,4,4']
        """
        return [
            f"{_TUNED[self.op]},{self.min_bytes},{self.max_bytes},{name},simple,0,"
            f"{self.num_nodes},{self.num_ranks}"
            for name in _NAMES[self.algorithm]
        ]

    def why_not(self) -> str | None:
        """Return why NCCL never takes the algorithm for such calls; None if it may.

        Source: src/graph/tuning.cc; src/enqueue.cc, updateCollCostTable. NVLS across nodes needs
        what CollNet needs, and is not what a plan means by nvls.
        """
        if self.algorithm not in _ALGORITHMS[self.op]:
            return f"NCCL has no {self.algorithm} for {self.op}"
        nodes, per_node = self.num_nodes, -(-self.num_ranks // self.num_nodes)
        is_small = self.op == "all_reduce" or per_node <= NVLS_MOST_SHARDS
        needs: dict[Algorithm, tuple[bool, str]] = {
            "nvls": (
                nodes == 1 and is_small,
                "one node" + f" of at most {NVLS_MOST_SHARDS} ranks" * (self.op != "all_reduce"),
            ),
            "nvls_tree": (nodes > 1 and per_node > 1, "several nodes of several ranks"),
            "collnet": (
                nodes > 1 and per_node <= _MAX_COLLNET_RANKS,
                f"several nodes of at most {_MAX_COLLNET_RANKS} ranks",
            ),
            "pat": (nodes > 1 and per_node == 1, "several nodes of one rank"),
        }
        is_met, needed = needs.get(self.algorithm, (True, ""))
        if is_met:
            return None
        ranks = f"{self.num_ranks} ranks on {nodes} node" + "s" * (nodes > 1)
        return f"{self.algorithm} for {self.op} needs {needed}, got {ranks}"

    def contradicts(self, other: "TunerRule") -> bool:
        """Return whether both match some call and want different algorithms for it."""
        return (
            (self.op, self.num_nodes, self.num_ranks)
            == (other.op, other.num_nodes, other.num_ranks)
            and self.algorithm != other.algorithm
            and self.min_bytes <= other.max_bytes
            and other.min_bytes <= self.max_bytes
        )


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What the group of an axis is made with; None and False leave it to NCCL.

    Attributes:
        min_ctas: Fewest thread blocks of a call.
        max_ctas: Most of them.
        cga_cluster_size: Thread blocks of a cluster, on compute capability 9 and later.
        zero_cta: No thread blocks where copy engines can do it: the policy of copy_engine choices.
        is_high_priority: Calls run on a stream of high priority.
    """

    min_ctas: int | None = None
    max_ctas: int | None = None
    cga_cluster_size: int | None = None
    zero_cta: bool = False
    is_high_priority: bool = False

    def __repr__(self) -> str:
        """Return what is not left to NCCL: ``GroupSettings(max_ctas=16)``."""
        values = [(field, getattr(self, field.name)) for field in fields(self)]
        given = [f"{field.name}={value}" for field, value in values if value is not field.default]
        return f"GroupSettings({', '.join(given)})"


@dataclass(frozen=True, slots=True)
class NcclSettings:
    """A plan as NCCL understands it.

    Attributes:
        environment: Variables to set, but for the path of the tuner's file.
        accepted: Variables that must be unset, or have one of these values: they would override
            the rest. (So would NCCL_PROTO without Simple: it must have it where there are lines.)
        tuner_rules: What the tuner's file says, the first that matches first; empty = no file.
        groups: Settings of the group of every axis.
    """

    environment: Mapping[str, str]
    accepted: Mapping[str, tuple[str, ...]]
    tuner_rules: tuple[TunerRule, ...]
    groups: Mapping[Axis, GroupSettings]

    def __repr__(self) -> str:
        """Return all but the groups that are left to NCCL."""
        groups = {axis: group for axis, group in self.groups.items() if group != GroupSettings()}
        return (
            f"NcclSettings(environment={self.environment}, accepted={self.accepted}, "
            f"tuner_rules={self.tuner_rules}, groups={groups})"
        )

    def tuner_text(self) -> str:
        """Return the tuner's file."""
        return "".join(f"{line}\n" for rule in self.tuner_rules for line in rule.lines())

    def apply(
        self,
        environment: MutableMapping[str, str],
        tuner_file: Path | None = None,
        *,
        runtime: Any = torch,
    ) -> None:
        """Set the variables, and write the tuner's file if there is one; all or nothing.

        A variable that is set already and means the same stays as it is.

        Args:
            environment: Of this process, which NCCL reads when it makes its first group.
            tuner_file: Where to write; ranks of a host may share it, they write the same.
            runtime: The torch module, which knows its NCCL's version if it is built for CUDA.

        Raises:
            PlanMismatchError: Groups exist already, variables are set to other values, or NCCL is
                too old: each is named.
        """
        if dist.is_available() and dist.is_initialized():
            raise PlanMismatchError(
                "NCCL settings come too late: torch.distributed is initialized, and NCCL reads "
                "them once; apply them before init_process_group"
            )
        if self.tuner_rules and tuner_file is None:
            raise PlanMismatchError(
                f"the plan needs a tuner's file for {len(self.tuner_rules)} rules and no path was "
                "given; give tuner_file"
            )
        if too_new := tuple(self._newer_than(runtime)):
            version = ".".join(map(str, runtime.cuda.nccl.version()))
            raise PlanMismatchError(
                f"NCCL is {version} here, and the plan needs {', '.join(too_new)}; install a torch "
                "with a later one, or run without the plan's NCCL settings"
            )
        wanted = dict(self.environment)
        if self.tuner_rules and tuner_file is not None:
            wanted["NCCL_TUNER_CONFIG_FILE"] = str(tuner_file.absolute())
        conflicts = [
            *_conflicts(environment, wanted, self.accepted),
            *_conflicts_of_protocol(environment, self.tuner_rules),
        ]
        if conflicts:
            raise PlanMismatchError(
                f"the environment contradicts the plan: {'; '.join(conflicts)}; unset these, or "
                "run without the plan's NCCL settings"
            )
        if self.tuner_rules and tuner_file is not None:
            _replace(tuner_file, self.tuner_text())
        for name, value in wanted.items():
            environment.setdefault(name, value)

    def _newer_than(self, runtime: Any) -> Iterator[str]:
        """Yield what this NCCL does not have yet, where torch knows its version."""
        if runtime.version.cuda is None:
            return
        used: list[str] = [rule.algorithm for rule in self.tuner_rules]
        used += ["NCCL_ALGO by function"] if "NCCL_ALGO" in self.environment else []
        for what in dict.fromkeys(used):
            since = _SINCE.get(what, "0")
            if tuple(runtime.cuda.nccl.version()) < tuple(map(int, since.split("."))):
                yield f"{since} for {what}"


def _conflicts(
    environment: Mapping[str, str],
    wanted: Mapping[str, str],
    accepted: Mapping[str, Collection[str]],
) -> Iterator[str]:
    for name, value in wanted.items():
        if not _means(name, environment.get(name, value), value):
            yield f"{name}={environment[name]!r}, the plan sets {value!r}"
    for name, values in accepted.items():
        if name in environment and environment[name].upper() not in values:
            needed = " or ".join(map(repr, values))
            yield f"{name}={environment[name]!r}, the plan needs {needed or 'it unset'}"


def _means(name: str, value: str, wanted: str) -> bool:
    """Return whether a variable says what is wanted: of NCCL_ALGO, for the functions it names."""
    if name != "NCCL_ALGO":
        return value == wanted
    functions = [part.partition(":")[0] for part in wanted.split(";")]
    return all(_listed(value, f) == _listed(wanted, f) for f in functions)


def _conflicts_of_protocol(
    environment: Mapping[str, str], rules: Sequence[TunerRule]
) -> Iterator[str]:
    """Yield NCCL_PROTO if it takes the protocol of the lines out of the table before the tuner."""
    value = environment.get("NCCL_PROTO")
    if value is None:
        return
    functions = dict.fromkeys(_TUNED[rule.op] for rule in rules)
    without = [function for function in functions if not _enables(value, function, "simple")]
    if without:
        yield f"NCCL_PROTO={value!r}, the plan needs Simple for {', '.join(without)}, or it unset"


def _enables(value: str, function: str, name: str) -> bool:
    listed = _listed(value, function)
    if listed is None:
        return True
    is_negated, names = listed
    return (name in names) != is_negated


def _listed(value: str, function: str) -> tuple[bool, frozenset[str]] | None:
    """Return whether the list for a function is negated, and its names; None if there is no list.

    NCCL_ALGO and NCCL_PROTO are lists of names in any case, parted by ``;``: each is preceded by a
    function and ``:``, or is for all functions; a leading ``^`` negates. The last list that is for
    the function counts (user guide, "NCCL_ALGO"; ``src/graph/tuning.cc``, ``parseList``).

    >>> _listed("Ring;allreduce:^Tree", "allreduce")
    (True, frozenset({'tree'}))
    """
    found = None
    for part in filter(None, value.lower().split(";")):
        prefix, colon, names = part.rpartition(":")
        if not colon or prefix == function:
            found = (names.startswith("^"), frozenset(names.removeprefix("^").split(",")))
    return found


def _replace(path: Path, text: str) -> None:
    """Write a file that another process may be reading, or writing just so."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


# ----------------------------------------------------------------------------- plan to settings


def nccl_settings(
    plan: Plan,
    *,
    min_ctas: int | None = None,
    max_ctas: int | None = None,
    cga_cluster_size: int | None = None,
    high_priority: Collection[Axis] = (),
    tuner_plugin: str = _EXAMPLE_PLUGIN,
) -> NcclSettings:
    """Return how NCCL is told what ``plan`` chose.

    A plan says nothing of CTAs, clusters and priorities: no figure of this project says what they
    gain, so they are asked for or left to NCCL.

    Args:
        plan: Of a job on NCCL.
        min_ctas: 1 to 64, for all groups.
        max_ctas: 1 to 64, for all groups.
        cga_cluster_size: 0 to 8, for all groups.
        high_priority: Axes whose calls run on a stream of high priority, such as those whose
            result the next layer waits for.
        tuner_plugin: NCCL's example plugin, built, or one that reads the same file.

    Raises:
        ValueError: A number is out of its range.
        UnsupportedPlanError: Methods are none of NCCL's (those of a plan for gloo), NCCL has no
            such algorithm for an operation or a group, or cannot tell apart two groups that choose
            differently; ``fields`` names all of them.
    """
    _check_range("min_ctas", min_ctas, 1, _MAX_CTAS)
    _check_range("max_ctas", max_ctas, min_ctas or 1, _MAX_CTAS)
    _check_range("cga_cluster_size", cga_cluster_size, 0, _MAX_CGA_CLUSTER_SIZE)
    _check_methods(plan)
    own = _nccls_own(plan)
    rules = () if own else _tuner_rules(plan)
    zero_cta = _axes_with_copy_engines(plan)
    accepted = {
        "NCCL_MIN_CTAS": _words(min_ctas),
        "NCCL_MIN_NCHANNELS": _words(min_ctas),  # the deprecated name; the larger wins
        "NCCL_MAX_CTAS": _words(max_ctas),
        "NCCL_MAX_NCHANNELS": _words(max_ctas),
        "NCCL_CGA_CLUSTER_SIZE": _words(cga_cluster_size),
        "NCCL_CTA_POLICY": ("2", "ZERO") if zero_cta else (),
    }
    overriding = {name: values for name, values in accepted.items() if values}
    groups = {
        axis: GroupSettings(
            min_ctas, max_ctas, cga_cluster_size, axis in zero_cta, axis in high_priority
        )
        for axis in AXES
    }
    algorithms = own or tuple(rule.algorithm for rule in rules)
    turned_on = {k: v for name in algorithms for k, v in _TURNS_ON.get(name, {}).items()}
    left_on = {k: v for name in algorithms for k, v in _LEAVES_ON.get(name, {}).items()}
    if own:
        unset = dict.fromkeys(_OVERRULING, ())
        return NcclSettings(turned_on, {**overriding, **unset, **left_on}, (), groups)
    if all(rule.algorithm == "ring" for rule in rules):
        functions = dict.fromkeys(_TUNED[rule.op] for rule in rules)
        rings = ";".join(f"{function}:ring" for function in functions)
        return NcclSettings({"NCCL_ALGO": rings} if rings else {}, overriding, (), groups)
    # NCCL_ALGO takes algorithms out of the table before the tuner sees it
    return NcclSettings(
        {"NCCL_TUNER_PLUGIN": tuner_plugin, **turned_on},
        {**overriding, "NCCL_ALGO": (), **left_on},
        rules,
        groups,
    )


def _check_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise ValueError(f"{name}={value}; NCCL takes {low} to {high} here")


def _words(value: int | None) -> tuple[str, ...]:
    return () if value is None else (str(value),)


def _check_methods(plan: Plan) -> None:
    foreign = tuple(
        f"{choice.op} on {choice.axis} by {method}"
        for choice in plan.collectives
        for method in sorted(choice.methods())
        if not _is_nccls(choice.op, method)
    )
    if foreign:
        shown = ", ".join(foreign[:_NUM_CHOICES_SHOWN])
        more = len(foreign) - _NUM_CHOICES_SHOWN
        raise UnsupportedPlanError(
            f"plan {plan.id} is for gloo: {shown}"
            + (f" and {more} more" if more > 0 else "")
            + "; NCCL has no such methods: plan for the GPUs of the job, or run this plan on gloo "
            "without NCCL settings",
            foreign,
        )


def _is_nccls(op: Collective, method: Method) -> bool:
    """Return whether NCCL's calls do it, or those of a GPU's copy engines."""
    if method.path == "library" and op in _TUNED:
        return method.algorithm in _CALLED
    return method.path not in ("executor", "shm")


def _nccls_own(plan: Plan) -> tuple[Algorithm, ...]:
    """Return the plan's algorithms if NCCL is known to take all of them by itself; else empty.

    A plan says what the library takes at one size of a choice: it has to be the only one sent.
    """
    choices = [c for c in plan.collectives if c.op in _TUNED and plan.layout.degree(c.axis) > 1]
    for choice in choices:
        sent = {op.size_bytes for op in plan.ops if (op.axis, op.op) == (choice.axis, choice.op)}
        taken = choice.library_default and Method(choice.library_default)
        if sent - {choice.size_bytes} or choice.method_for(choice.size_bytes) != taken:
            return ()
    return tuple(choice.library_default for choice in choices if choice.library_default)


def _axes_with_copy_engines(plan: Plan) -> frozenset[Axis]:
    """Return the axes whose group needs the policy; axes of the same ranks share one group."""
    asked = [
        plan.groups(choice.axis)
        for choice in plan.collectives
        if any(method.path == "nccl_zero_cta" for method in choice.methods())
    ]
    return frozenset(axis for axis in AXES if plan.groups(axis) in asked)


def _tuner_rules(plan: Plan) -> tuple[TunerRule, ...]:
    """Return a rule for every range of bytes in every shape of group, once."""
    wanted_by: dict[TunerRule, str] = {}
    conflicts: list[str] = []
    for choice in plan.collectives:
        for rule in _rules_of(plan, choice):
            wanted_by.setdefault(rule, f"{choice.axis}.{choice.op}")
    rules = tuple(wanted_by)
    for number, rule in enumerate(rules):
        if (reason := rule.why_not()) is not None:
            conflicts.append(f"{wanted_by[rule]}: {reason}")
        conflicts += [
            f"{wanted_by[rule]} takes {rule.algorithm} and {wanted_by[other]} {other.algorithm} "
            f"for {max(rule.min_bytes, other.min_bytes)} bytes, both by groups of {rule.num_ranks} "
            f"ranks on {rule.num_nodes} nodes"
            for other in rules[number + 1 :]
            if rule.contradicts(other)
        ]
    if conflicts:
        raise UnsupportedPlanError(
            f"NCCL cannot be told all of plan {plan.id}: {'; '.join(conflicts)}; leave the choice "
            "to NCCL by not applying settings, or plan with other algorithms",
            tuple(conflicts),
        )
    return rules


def _rules_of(plan: Plan, choice: CollectiveChoice) -> Iterator[TunerRule]:
    """Yield the rules of one choice: of its own groups, and of those a hierarchy is made of."""
    if choice.op not in _TUNED:
        return
    low = 0
    steps = [(step.up_to_bytes, step.algorithm, step.path) for step in choice.thresholds]
    for up_to, algorithm, path in [*steps, (None, choice.algorithm, choice.path)]:
        high = _ANY_SIZE if up_to is None else up_to
        if low <= high and path == "library":
            yield from _rules_between(plan, choice, algorithm, low, high)
        low = max(low, high + 1)


def _rules_between(
    plan: Plan, choice: CollectiveChoice, algorithm: Algorithm, low: int, high: int
) -> Iterator[TunerRule]:
    groups = plan.groups(choice.axis)
    if algorithm in ("hierarchical", "three_level"):
        yield from _rules_of_hierarchy(plan, choice.op, groups, three=algorithm == "three_level")
    elif algorithm in _NAMES:
        for num_nodes, num_ranks in _shapes(plan, groups):
            yield TunerRule(choice.op, low, high, algorithm, num_nodes, num_ranks)


def _rules_of_hierarchy(
    plan: Plan, op: Collective, groups: Sequence[tuple[int, ...]], *, three: bool
) -> Iterator[TunerRule]:
    """Yield rings for the parts of a hierarchy, which the planner prices as rings, at all sizes."""
    inside_ops: tuple[Collective, ...] = (
        ("reduce_scatter", "all_gather") if op == "all_reduce" else (op,)
    )
    inside, across = _split(groups, plan.ranks.unit_of)
    parts = [(part, inside) for part in inside_ops]
    if three:
        middle, across = _split(across, plan.ranks.outer_unit_of)
        parts += [(part, middle) for part in inside_ops]
    for part, members in [*parts, (op, across)]:
        for num_nodes, num_ranks in _shapes(plan, members):
            yield TunerRule(part, 0, _ANY_SIZE, "ring", num_nodes, num_ranks)


def _split(
    groups: Sequence[tuple[int, ...]], unit_of: Callable[[int], int]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the groups inside units, and those of one rank of each (of uneven units, the first).

    >>> _split([(0, 1, 2, 3)], lambda rank: rank // 2)
    ([(0, 1), (2, 3)], [(0, 2), (1, 3)])
    """
    inside: list[tuple[int, ...]] = []
    across: list[tuple[int, ...]] = []
    for ranks in groups:
        units: dict[int, list[int]] = {}
        for rank in ranks:
            units.setdefault(unit_of(rank), []).append(rank)
        inside += [tuple(members) for members in units.values()]
        across += zip(*units.values(), strict=False)
    return inside, across


def _shapes(plan: Plan, groups: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]:
    """Return (nodes, ranks) of all groups of several ranks, each once.

    A node is what NCCL's rings cross without a network: a host, or all hosts of one NVLink domain
    (``src/init.cc``, ``nNodes``).
    """
    unit_of = plan.ranks.unit_of
    found = {
        (
            min(
                len({rank // plan.ranks.ranks_per_node for rank in ranks}),
                len({unit_of(rank) for rank in ranks}),
            ),
            len(ranks),
        )
        for ranks in groups
        if len(ranks) > 1
    }
    return sorted(found)


# ------------------------------------------------------------------------------ group options


def group_options(settings: NcclSettings, axis: Axis, *, calls: Any = dist) -> Any:
    """Return ``pg_options`` for ``new_group``, or None where NCCL's own are to be used.

    For a dim of a ``DeviceMesh``: ``backend_override={dim: ("nccl", options)}``.

    Args:
        settings: Of the plan.
        axis: Whose group it is.
        calls: ``torch.distributed``.

    Raises:
        ValueError: The settings have no such axis.
        UnsupportedPlanError: This torch has no NCCL, or no such option.
    """
    if axis not in settings.groups:
        raise ValueError(
            f"the NCCL settings have no axis {axis!r}; theirs are {', '.join(settings.groups)}"
        )
    wanted = settings.groups[axis]
    if wanted == GroupSettings():
        return None
    nccl = getattr(calls, "ProcessGroupNCCL", None)
    if nccl is None:
        raise UnsupportedPlanError(
            f"{axis} needs options of NCCL, and torch {torch.__version__} is built without it; "
            "install a CUDA build, or plan for gloo",
            ("ProcessGroupNCCL",),
        )
    options = nccl.Options(is_high_priority_stream=wanted.is_high_priority)
    for name, value in (
        ("min_ctas", wanted.min_ctas),
        ("max_ctas", wanted.max_ctas),
        ("cga_cluster_size", wanted.cga_cluster_size),
        ("cta_policy", getattr(nccl, "NCCL_CTA_POLICY_ZERO", 2) if wanted.zero_cta else None),
    ):
        if value is None:
            continue
        if not hasattr(options.config, name):
            raise UnsupportedPlanError(
                f"{axis} needs NCCL's {name}={value}, which torch {torch.__version__} does not "
                "pass on; use a torch built with NCCL 2.28 or later",
                (name,),
            )
        setattr(options.config, name, value)
    return options
