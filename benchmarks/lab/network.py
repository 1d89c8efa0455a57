"""Builds a cluster out of namespaces, bridges, veth pairs and token buckets; counts its bytes.

``build`` must be called by PID 1 of the namespaces that ``ISOLATED`` makes.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from benchmarks.lab.cluster import Cluster
from benchmarks.lab.errors import LabError

__all__ = [
    "EXIT_SKIPPED",
    "ISOLATED",
    "Bytes",
    "Host",
    "build",
    "bytes_since",
    "count_bytes",
    "exit_unless_possible",
    "inside",
    "why_not",
]

EXIT_SKIPPED: Final = 77

# Bytes over each link, both ways: (lower, upper) -> (lower to upper, upper to lower).
Bytes = dict[tuple[str, str], tuple[int, int]]

# Lives as long as PID 1; whatever enters its namespaces is on that host.
Host = subprocess.Popen[str]

# Runs what follows as PID 1 of namespaces of its own, and takes its exit code. Whoever is started
# with this is the shell: when it dies of any signal, PID 1 is killed, and the kernel with it ends
# all that the namespaces hold. (``unshare --fork`` holds SIGTERM back, and a shell that waits for
# a command in the foreground SIGINT. One in the background has no input.)
ISOLATED: Final = (
    *("unshare", "--net", "--pid", "sh", "-c", '"$@" & wait $!; exit $?', "lab"),
    *("setpriv", "--pdeathsig", "KILL", "unshare", "--mount-proc"),
)

_TOOLS: Final = {
    "iproute2": ("ip", "tc"),
    "util-linux": ("unshare", "nsenter", "setpriv", "mount"),
}
# In a container, root may lack the capability.
_ROOT: Final = "root (CAP_SYS_ADMIN)"
# Large frames: fewer packets for the cores to handle.
_MTU_BYTES: Final = 9000
_FRAME_BYTES: Final = 9200  # with its headers
_TIMER_LATE_S: Final = 1e-4
# Its neighbour discovery would be counted among the bytes of an experiment.
_NO_IPV6: Final = """
for scope in all default; do
  setting=/proc/sys/net/ipv6/conf/$scope/disable_ipv6
  [ ! -e $setting ] || echo 1 > $setting
done
"""
_HOST: Final = f"""
set -e
echo "$1" > /proc/sys/kernel/hostname
mount -t tmpfs shm /dev/shm
echo "$2" > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
rm /dev/shm/hosts
{_NO_IPV6}
ip link set lo up
echo ready
read -r _
"""


def why_not() -> str | None:
    """Return why the lab cannot run here, in one line, or None if it can."""
    if not sys.platform.startswith("linux"):
        return f"the lab needs Linux; this is {sys.platform}"
    for package, tools in _TOOLS.items():
        missing = [tool for tool in tools if shutil.which(tool) is None]
        if missing:
            return f"the lab needs {', '.join(missing)} of {package}"
    if os.geteuid() != 0:
        return f"the lab needs {_ROOT}, to make network namespaces"
    tried = (
        "ip link add try0 type veth peer name try1 && ip link add try2 type bridge && "
        f"tc {_shape('try0', 1e6)}"
    )
    probe = subprocess.run((*ISOLATED, "sh", "-c", tried), capture_output=True, text=True)
    if probe.returncode:
        said = probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"]
        return f"the lab needs {_ROOT}, namespaces, veth, bridges and tc tbf; here: {said[-1]}"
    return None


def exit_unless_possible() -> None:
    """Exit with ``EXIT_SKIPPED`` after saying why, where the lab cannot run."""
    if (reason := why_not()) is not None:
        print(f"SKIPPED: {reason}")
        raise SystemExit(EXIT_SKIPPED)


def build(cluster: Cluster) -> list[Host]:
    """Build the cluster and return a process of each host, whose namespaces are the host.

    Raises:
        LabError: A command failed; with what it said.
    """
    names = _hosts_file(cluster)
    hosts = [_start_host(name, names) for name in cluster.hosts]
    if not cluster.links:
        return hosts
    _run(("sh", "-c", _NO_IPV6))
    _run(("ip", "-batch", "-"), [*_bridges(cluster), *_veth_pairs(cluster, hosts)])
    _run(("tc", "-batch", "-"), _shapes_of_bridges(cluster))
    for link in cluster.links:
        if link.host is not None:
            enter = ("nsenter", "-t", str(hosts[link.host].pid), "-n")
            address = f"addr add {cluster.address(link.host)}/16 dev eth0"
            _run((*enter, "ip", "-batch", "-"), [address, "link set eth0 up"])
            _run((*enter, "tc", "-batch", "-"), [_shape("eth0", link.bytes_per_s)])
    return hosts


def inside(host: Host, *, directory: str) -> list[str]:
    """Return what a command is prefixed with to run on a host, and in a directory."""
    return ["nsenter", "-t", str(host.pid), "-n", "-m", "-u", "-i", "env", f"--chdir={directory}"]


def count_bytes(cluster: Cluster, enter: Sequence[str] = ()) -> Bytes:
    """Return the bytes that have crossed each link, frames' headers and acknowledgements included.

    Args:
        cluster: What the lab was built from.
        enter: Command that enters the lab's namespaces; nothing when called inside.
    """
    command = (*enter, "ip", "-s", "-j", "link")
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    counters = {row["ifname"]: row["stats64"] for row in json.loads(output)}
    return {
        (link.lower, link.upper): (counters[end]["rx"]["bytes"], counters[end]["tx"]["bytes"])
        for end, link in ((f"link{i}b", link) for i, link in enumerate(cluster.links))
    }


def bytes_since(before: Bytes, now: Bytes) -> Bytes:
    """Return what crossed each link between two counts."""
    return {link: (now[link][0] - up, now[link][1] - down) for link, (up, down) in before.items()}


def _hosts_file(cluster: Cluster) -> str:
    """Return the names of all hosts; also mapped to IPv6, as which torch looks addresses up."""
    lines = ["127.0.0.1 localhost", "::ffff:127.0.0.1 localhost"]
    for number, name in enumerate(cluster.hosts):
        address = cluster.address(number)
        lines += [f"{address} {name}", f"::ffff:{address} {name}"]
    return "\n".join(lines)


def _start_host(name: str, names: str) -> Host:
    apart = ("unshare", "--net", "--mount", "--uts", "--ipc")
    command = (*apart, "sh", "-c", _HOST, "host", name, names)
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None, "stdout is a pipe"
    if holder.stdout.readline() != "ready\n":
        raise LabError(f"host {name} could not be made; its commands have said why")
    return holder


def _bridges(cluster: Cluster) -> Iterator[str]:
    for i in range(len(cluster.switches)):
        yield f"link add switch{i} mtu {_MTU_BYTES} type bridge stp_state 0 mcast_snooping 0"
        yield f"link set switch{i} up"


def _veth_pairs(cluster: Cluster, hosts: Sequence[Host]) -> Iterator[str]:
    """Yield the links: link{i}b is the upper end of link i, link{i}a or a host's eth0 the lower."""
    for i, link in enumerate(cluster.links):
        lower = f"link{i}a" if link.host is None else f"eth0 netns {hosts[link.host].pid}"
        pair = f"link{i}b mtu {_MTU_BYTES} type veth peer name {lower} mtu {_MTU_BYTES}"
        yield f"link add {pair}"
        yield f"link set link{i}b master switch{cluster.switches.index(link.upper)} up"
        if link.host is None:
            yield f"link set link{i}a master switch{cluster.switches.index(link.lower)} up"


def _shapes_of_bridges(cluster: Cluster) -> Iterator[str]:
    for i, link in enumerate(cluster.links):
        for end in ("a", "b") if link.host is None else ("b",):
            yield _shape(f"link{i}{end}", link.bytes_per_s)


def _shape(interface: str, bytes_per_s: float) -> str:
    """Return tc's words for a token bucket; its "bps" are bytes per second.

    Without a peak rate a bucket lets its burst pass at once, so that short messages are too fast.
    The peak's own bucket holds one frame, and what the link could have sent while the kernel's
    timer was late: with less, every late timer would slow the link. So the first frame after a
    pause passes at once, and a message arrives that much sooner than size / rate: 0.7 ms at
    100 Mbit/s.
    """
    rate, peak = round(bytes_per_s), round(bytes_per_s * 1.01)
    frame = _FRAME_BYTES + round(bytes_per_s * _TIMER_LATE_S)
    return (
        f"qdisc replace dev {interface} root tbf rate {rate}bps burst {2 * frame} "
        f"peakrate {peak}bps mtu {frame} latency 200ms"
    )


def _run(command: Sequence[str], lines: Iterable[str] = ()) -> None:
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"{' '.join(command[:3])} failed: {done.stderr.strip()}")
