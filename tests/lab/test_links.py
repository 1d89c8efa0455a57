"""The network is the document's: its rates, its bytes, nothing beside it."""

import pytest

from benchmarks.lab import Lab, lab_topology, with_nic_rate

pytestmark = pytest.mark.lab

NUM_BYTES = 2_000_000
RATE = 12.5e6  # of every link of lab-4x2, trunks included


def fastest(lab: Lab, pairs: dict[int, int], expected: float) -> float:
    """Return the payload's bytes/s of all senders together: the best of ten, or the first good one.

    On a busy machine the processes, not the links, are late now and then.
    """
    best = 0.0
    for _ in range(10):
        times = lab.run("tests.lab.jobs:send", {"pairs": pairs, "num_bytes": NUM_BYTES})
        best = max(best, len(pairs) * NUM_BYTES / max(t for t in times if t is not None))
        if best > 0.95 * expected:
            break
    return best


def test_a_host_sends_at_the_rate_of_its_nic(lab: Lab) -> None:
    assert fastest(lab, {0: 1}, RATE) == pytest.approx(RATE, rel=0.05)


@pytest.mark.long
def test_a_rate_four_times_as_high_is_kept_too(possible: None) -> None:
    with Lab(with_nic_rate(lab_topology("lab-2x2"), 4 * RATE), order="interleaved") as fast:
        assert fastest(fast, {0: 1}, 4 * RATE) == pytest.approx(4 * RATE, rel=0.05)


def test_two_hosts_behind_a_trunk_share_its_rate(lab: Lab) -> None:
    assert lab.units == ((0, 4), (1, 5), (2, 6), (3, 7)), "0 and 1 are on one leaf"
    assert fastest(lab, {0: 2, 1: 3}, RATE) == pytest.approx(RATE, rel=0.05)
    apart = fastest(lab, {0: 1, 2: 3}, 2 * RATE)
    assert apart == pytest.approx(2 * RATE, rel=0.05), "nothing over the trunk"


def test_every_byte_is_counted_on_the_links_of_its_way_only(lab: Lab) -> None:
    with lab.counting() as crossed:
        lab.run("tests.lab.jobs:send", {"pairs": {1: 6}, "num_bytes": NUM_BYTES})
    way = {("n1/nic", "leaf0"): 0, ("leaf0", "spine0"): 0, ("leaf1", "spine0"): 1}
    way[("n2/nic", "leaf1")] = 1
    assert len(crossed) == len(lab.cluster.links)
    for link, both in crossed.items():
        for direction, counted in enumerate(both):
            sent = NUM_BYTES if way.get(link) == direction else 0
            assert counted == pytest.approx(sent, rel=0.02, abs=0.02 * NUM_BYTES), (link, direction)


def test_ranks_of_one_host_use_no_link(lab: Lab) -> None:
    with lab.counting() as crossed:
        lab.run("tests.lab.jobs:send", {"pairs": {0: 4}, "num_bytes": NUM_BYTES})
    assert max(counted for both in crossed.values() for counted in both) < 0.02 * NUM_BYTES


@pytest.mark.long
def test_a_host_alone_has_no_links(possible: None) -> None:
    with Lab(lab_topology("loopback")) as alone:
        assert alone.bytes_on_links() == {}
