"""How often the model of NCCL's own choice agrees with what published tables say NCCL took.

    python -m benchmarks.nccl_default benchmarks/data/collectives.csv

Only rows that name what the library took by itself count. Where the source made it take that (its
notes say "forced", or its command sets NCCL_ALGO) there is nothing to compare, and "auto" names
nothing. Machines are the bundled topologies that ``topologies/machines.csv`` gives them.
A claim is a source's word for a whole run ("NVLS"), without a log that shows the calls.
"""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from planner.cost.nccl_tuner import ALGORITHMS, PROTOCOLS, default_choice
from planner.layout.groups import lay_group
from planner.plan import Algorithm
from planner.topology.bundled import load_topology, machine_topologies
from planner.topology.compile import compile_fabric
from planner.validate.rows import Row, read_rows, without_outcomes

# As tables name them, brackets left out.
NAMED: dict[str, tuple[Algorithm, ...]] = {
    "ring": ("ring",),
    "tree": ("tree",),
    "nvls": ("nvls",),
    "nvlstree": ("nvls_tree",),
    "p2p": ("direct", "point_to_point"),
}
# In the label or the notes of rows whose source set the algorithm: by name, by its environment, to
# study or compare it, or on the command line (the runs with CUDA graphs, -G).
WIDTH = 84
FORCED = ("forced", "env shown", "thread subject", "ring 190 vs tree", "-g 10")


def main() -> None:
    """Print a line for every source, and the sums."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    path = Path(sys.argv[1])
    rows = [row for row in read_rows(path.read_bytes(), source=path.name) if is_named(row)]
    free = [row for row in rows if not is_forced(row)]
    print(
        f"{len(rows)} rows name an algorithm; {len(rows) - len(free)} of them were made to take it"
    )
    sources = defaultdict[tuple[str, str, str], list[Row]](list)
    for row in free:
        cells = row.cells
        sources[cells["machine"], cells["op"], cells["algorithm"]].append(row)
    titles = f"{'rows':>5}{'algorithm':>11}{'protocol':>10}"
    print(f"{'machine, operation, what the source says':{WIDTH}}{titles}")
    sums = {True: np.zeros(4, dtype=int), False: np.zeros(4, dtype=int)}
    for (machine, op, label), alike in sources.items():
        counts = np.sum([agreement(row) for row in alike], axis=0)
        sums["claimed" in label] += counts
        print(f"{f'{machine}, {op}, {label}':{WIDTH}}{line(counts)}")
    for claimed, name in ((False, "shown"), (True, "claimed")):
        print(f"{f'all that is {name}':{WIDTH}}{line(sums[claimed])}")


def is_named(row: Row) -> bool:
    """Return whether the row says which algorithm ran."""
    return label_of(row) in NAMED


def is_forced(row: Row) -> bool:
    """Return whether the source made the library take it."""
    said = f"{row.cells['algorithm']} {row.cells['notes']}".lower()
    return any(word in said for word in FORCED)


def label_of(row: Row) -> str:
    """Return the algorithm as the source calls it, brackets left out."""
    return row.cells["algorithm"].lower().partition("(")[0].strip()


def agreement(row: Row) -> tuple[int, int, int, int]:
    """Return rows, those whose algorithm agrees, those that name a protocol and agree in it."""
    question = without_outcomes(row)
    document = load_topology(machine_topologies()["collectives", row.cells["machine"]])
    # A partition of a rack is several trays; of some nodes not all GPUs take part.
    trays = -(-question.num_ranks // document.gpus_per_node)
    num_nodes = max(question.num_nodes, trays)
    fabric = compile_fabric(document, num_nodes)
    stride = fabric.num_gpus // question.num_ranks if num_nodes > 1 else 1
    group = lay_group(fabric, np.array([question.num_ranks]), np.array([stride]))
    choice = default_choice(
        question.op,
        fabric,
        group,
        np.array([float(question.size_bytes or 0)]),
        nvls="NCCL_NVLS_ENABLE=0" not in question.algorithm,
    )
    algorithm = ALGORITHMS[int(choice.algorithm[0])] in NAMED[label_of(row)]
    protocol = question.protocol.lower()
    named = protocol in PROTOCOLS
    same = named and PROTOCOLS[int(choice.protocol[0])] == protocol
    return 1, int(algorithm), int(named), int(same)


def line(counts: np.ndarray) -> str:
    """Return the counts as columns; "-" where no row names a protocol."""
    rows, algorithms, named, protocols = counts.tolist()
    by_protocol = f"{protocols}/{named}" if named else "-"
    return f"{rows:5}{f'{algorithms}/{rows}':>11}{by_protocol:>10}"


if __name__ == "__main__":
    main()
