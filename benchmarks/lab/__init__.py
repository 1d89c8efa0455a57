"""An emulated cluster on one Linux machine: real processes, real sockets, links of a known rate.

From the repository root, which has to be on Python's path:

    python -m benchmarks.lab show lab-4x2
    python -m benchmarks.lab run lab-2x2 --bytes -- python train.py
    with Lab(lab_topology("lab-2x2")) as lab:
        results = lab.run("benchmarks.some_module:some_function", {"size_bytes": 1 << 20})

What is emulated is a topology document, the planner's own, so that the planner can be asked about
exactly the cluster on which its answer is tried. ``cluster`` reads it. ``network`` builds it:

- All of it lives in one network, mount and PID namespace. Its first process is PID 1 there; when
  that ends, for whatever reason, the kernel ends all processes and removes all links and mounts.
- A host is one more set of namespaces (network, mounts, host name, IPC): ranks of two hosts share
  no loopback and no shared memory.
- A switch is a bridge, a link a pair of veth devices, each end of which is shaped to the link's
  rate by a token bucket (``tc ... tbf``). Interface counters say what crossed each link.

``run`` starts a command once per rank. ``Lab`` keeps a rank's process alive between experiments
(``driver`` is the caller's side, ``ranks`` that of the lab). ``world`` emulates devices: sleeps
whose lengths come from a file that the planner never reads.

What is not emulated: the cores, which all hosts share, the latency of wires, and rates inside a
host. A topology with other parts is refused. Rates must be low enough that the links, not the
cores, are the limit: on two busy cores one socket over one link carried 99 % of every rate from
50 Mbit/s to 1 Gbit/s (headers take 0.7 %); at 2 Gbit/s two sockets at once carried 67 to 80 %.
Needs Linux, root (CAP_SYS_ADMIN), iproute2 and util-linux.
"""

from benchmarks.lab.cluster import Cluster, Order, RankContext
from benchmarks.lab.documents import lab_topology, with_nic_rate
from benchmarks.lab.driver import Lab
from benchmarks.lab.errors import LabError
from benchmarks.lab.network import exit_unless_possible, why_not
from benchmarks.lab.world import World

__all__ = [
    "Cluster",
    "Lab",
    "LabError",
    "Order",
    "RankContext",
    "World",
    "exit_unless_possible",
    "lab_topology",
    "why_not",
    "with_nic_rate",
]
