"""ibnetdiscover: two real subnets by eye, odd ones repaired with a remark or refused."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.topology.importers.dump import FabricDump, TopologyTextError
from planner.topology.importers.fabric.ibnetdiscover import read_ibnetdiscover

SAMPLES = Path(__file__).parent.parent / "samples" / "topology" / "ibnetdiscover"
POD = (SAMPLES / "gb200-pod-ndr.out").read_text()
HDR = (SAMPLES / "fattree-hdr-superbench.txt").read_text()

End = tuple[str, int]


def read(text: str) -> FabricDump:
    return read_ibnetdiscover(text, "ib.txt")


def units_of(dump: FabricDump) -> list[set[frozenset[str]]]:
    """Return the sets of hosts of every tier; asserts that they add up and nest."""
    found = []
    for tier in dump.tiers:
        assert sum(tier.units) == len(dump.hosts)
        assert len(tier.units) == len(tier.unit_names) == len(set(tier.unit_names))
        bounds = itertools.pairwise(itertools.accumulate(tier.units, initial=0))
        found.append({frozenset(dump.hosts[start:end]) for start, end in bounds})
    for inner, outer in itertools.pairwise(found):
        assert all(any(unit <= other for other in outer) for unit in inner)
    return found


def said(dump: FabricDump) -> str:
    return "\n".join(map(str, (*dump.remarks, *dump.assumptions)))


def subnet(
    names: dict[str, str], links: list[tuple[str, str]], rate: Callable[[str, str], str]
) -> list[str]:
    """Return the records of a subnet, one text each; ports are counted up on both ends."""
    ports: dict[str, list[str]] = {name: [] for name in names}
    used = dict.fromkeys(names, 0)
    for one, other in links:
        used[one] += 1
        used[other] += 1
        for here, there in ((one, other), (other, one)):
            own = f"[{used[here]}]" + ("(abc)" if here[0] == "H" else "")
            ports[here].append(
                f'{own} \t"{there}"[{used[there]}]\t# "{names[there]}" lid 1 {rate(one, other)}'
            )
    words = {"S": "Switch", "H": "Ca", "R": "Rt"}
    return [
        "\n".join([f'{words[name[0]]}\t9 "{name}"\t# "{names[name]}" base', *lines, ""])
        for name, lines in ports.items()
    ]


def test_a_director_switch_is_two_stages_with_its_real_oversubscription():
    dump = read(HDR)
    assert [(tier.name, tier.units) for tier in dump.tiers] == [
        ("leaf", (2, 2, 2, 2, 2)),
        ("spine", (6, 4)),
        ("core", (10,)),
    ]
    # Two 4xHDR hosts on every leaf, one 4xHDR link up; 3 and 2 of these into a line card, one up.
    assert [tier.oversubscription for tier in dump.tiers] == [2.0, 2.5, None]
    assert dump.tiers[1].unit_names == (
        "swx-0101-0908-01ib1-A/L01",
        "swx-0101-0908-01ib1-A/L02",
    )
    assert (dump.nics_per_host, dump.nic_bytes_per_s, dump.kind) == (1, 25e9, "infiniband")
    assert dump.hosts[:2] == ("RMD701091901003", "RMD701091901019")
    assert "1 aggregation nodes" in said(dump)
    assert dump.assumptions == ()


def test_a_real_gb200_pod_is_eight_rail_groups_under_nine_spines():
    dump = read(POD)
    # Counted in the file: 122 named hosts, 69 adapters with a product name (7+5+3+1+3 hosts by
    # the free leaf ports of racks 1, 2, 6, 7 and 8), 40 aggregation nodes.
    assert len(dump.hosts) == 122 + 19
    by_rack = dict(zip(dump.tiers[0].unit_names, dump.tiers[0].units, strict=True))
    assert by_rack == {
        "A09-P1-IBLEAF-[01-02,04]-01": 18,
        "A09-P1-IBLEAF-[01-04]-02": 16,
        "A09-P1-IBLEAF-[01-04]-03": 18,
        "A09-P1-IBLEAF-[01-04]-04": 17,
        "B09-P1-IBLEAF-[01-04]-05": 18,
        "B09-P1-IBLEAF-[01-04]-06": 18,
        "B09-P1-IBLEAF-[01-04]-07": 17,
        "B09-P1-IBLEAF-[01-04]-08": 19,
    }
    assert dump.tiers[1].units == (141,)
    assert (dump.nics_per_host, dump.nic_bytes_per_s) == (4, 50e9)
    # Ports down to up, rack by rack: 54/53 64/66 72/67 68/68 72/70 72/70 68/67 72/71, from the
    # port lines; rack 2 has more up than down.
    assert dump.tiers[0].oversubscription == pytest.approx(
        (54 + 64 + 72 + 68 + 72 + 72 + 68 + 72) / (53 + 64 + 67 + 68 + 70 + 70 + 67 + 71), abs=1e-12
    )
    assert "40 aggregation nodes are no hosts" in said(dump)
    assert "18 of 141 hosts have 3 linked ports" in said(dump)
    assert "2 of 141 hosts have 2 linked ports, most have 4: B11-P1-CUFM-02,ubuntu" in said(dump)
    assert "69 adapters answer with a product name" in dump.assumptions[0]


def test_either_end_of_a_link_is_enough():
    cut = POD[: POD.index("\nCa")]  # the switches' records alone
    assert units_of(read(cut)) == units_of(read(POD))


def test_adapters_of_one_system_image_are_one_host():
    records = subnet(
        {"S-1": "leaf", "H-1": "node1 HCA-1", "H-2": "MT4129 ConnectX7   Mellanox Technologies"},
        [("S-1", "H-1"), ("S-1", "H-2")],
        lambda *_: "4xNDR",
    )
    text = records[0] + "sysimgguid=0x5\n" + records[1] + "sysimgguid=0x5\n" + records[2]
    dump = read(text)
    assert (dump.hosts, dump.nics_per_host, dump.assumptions) == (("node1",), 2, ())
    # Without it each adapter is a host, and the text says so.
    alone = read(text.replace("sysimgguid=0x5\n", ""))
    assert alone.hosts == ("H-2", "node1")
    assert "1 adapters answer with a product name" in alone.assumptions[0]


def test_unnamed_hosts_of_a_rail_group_are_as_many_as_its_fullest_leaf_has():
    product = "MT4129 ConnectX7   Mellanox Technologies"
    names = {"S-1": "r1", "S-2": "r2", "H-1": "n1 mlx5_0", "H-2": "n1 mlx5_1"}
    names |= {f"H-{i}": product for i in (3, 4, 5)}
    links = [("S-1", "H-1"), ("S-2", "H-2"), ("S-1", "H-3"), ("S-1", "H-4"), ("S-2", "H-5")]
    dump = read("".join(subnet(names, links, lambda *_: "4xNDR")))
    assert set(dump.hosts) == {"n1", "H-3", "H-4"}
    assert dump.tiers[0].units == (3,)
    assert "counted as 2 hosts" in said(dump)


def test_one_name_with_the_same_device_twice_is_two_hosts():
    names = {"S-1": "leaf", "H-1": "localhost HCA-1", "H-2": "localhost HCA-1", "H-3": "a HCA-1"}
    links = [("S-1", f"H-{i}") for i in (1, 2, 3)]
    dump = read("".join(subnet(names, links, lambda *_: "4xHDR")))
    assert len(dump.hosts) == 3
    assert "several adapters answer as one device of 'localhost'" in said(dump)


def test_a_server_on_a_spine_makes_it_no_leaf():
    names = {"S-9": "spine", "H-99": "ufm HCA-1"} | {f"S-{i}": f"leaf{i}" for i in range(4)}
    links = [("S-9", "H-99")] + [("S-9", f"S-{i}") for i in range(4)]
    for host in range(32):
        names[f"H-{host}"] = f"n{host} mlx5_0"
        links.append((f"S-{host // 8}", f"H-{host}"))
    dump = read("".join(subnet(names, links, lambda *_: "4xHDR")))
    assert [tier.units for tier in dump.tiers] == [(8,) * 4, (32,)]
    assert dump.tiers[0].oversubscription == 8.0
    assert "1 host(s) hang on switches above the leaves" in said(dump)


def test_leaves_linked_to_each_other_are_joined_and_others_left_apart():
    names = {"S-1": "a", "S-2": "b", "H-1": "n1 x", "H-2": "n2 x"}
    hosts = [("S-1", "H-1"), ("S-2", "H-2")]
    apart = read("".join(subnet(names, hosts, lambda *_: "4xEDR")))
    assert [tier.units for tier in apart.tiers] == [(1, 1)]
    assert apart.assumptions == ()
    meshed = read("".join(subnet(names, [*hosts, ("S-1", "S-2")], lambda *_: "2xEDR")))
    assert [tier.units for tier in meshed.tiers] == [(1, 1), (2,)]
    assert meshed.assumptions == ()
    assert "1 links join leaf switches directly" in said(meshed)
    assert meshed.nic_bytes_per_s == 6.25e9


@pytest.mark.parametrize(
    ("rate", "bytes_per_s"),
    [("4xSDR", 1e9), ("4xQDR", 4e9), ("4xFDR10", 5e9), ("4xFDR", 6.82e9), ("4xEDR", 12.5e9),
     ("4xHDR", 25e9), ("2xHDR", 12.5e9), ("4xNDR", 50e9), ("2xNDR", 25e9), ("4xXDR", 100e9),
     ("1xXDR", 25e9), ("", None), ("4xZDR", None)],
)  # fmt: skip
def test_rates_are_lanes_times_the_data_rate_of_one(rate: str, bytes_per_s: float | None) -> None:
    names = {"S-1": "a", "S-2": "b", "S-3": "c", "H-1": "n1 x", "H-2": "n2 x"}
    links = [("S-1", "H-1"), ("S-2", "H-2"), ("S-1", "S-3"), ("S-2", "S-3")]
    dump = read("".join(subnet(names, links, lambda *_: rate)))
    assert dump.nic_bytes_per_s == bytes_per_s
    assert dump.tiers[0].oversubscription == (None if bytes_per_s is None else 1.0)


def test_idle_uplinks_do_not_count_as_oversubscription_above():
    # One host on a leaf with four links up; the spine has two: nothing is scarce.
    names = {
        "S-1": "a",
        "S-2": "b",
        "S-3": "s1",
        "S-4": "s2",
        "S-5": "top",
        "H-1": "n1",
        "H-2": "n2",
    }
    links = [("S-1", "H-1"), ("S-2", "H-2"), ("S-3", "S-5"), ("S-4", "S-5")]
    links += [("S-1", "S-3"), ("S-2", "S-4")] * 4
    dump = read("".join(subnet(names, links, lambda *_: "4xHDR")))
    assert [tier.oversubscription for tier in dump.tiers] == [1.0, 1.0, None]


def test_what_cannot_be_read_is_said_with_its_line():
    text = HDR.replace('[9]     "H-00298683f1f1c665"', "[9]  H-00298683f1f1c665", 1)
    dump = read('\t[1] "S-1"[1] # "x"\n' + text + 'Switch 40 "S-\n' + "y" * 5000 + "\n")
    assert len(dump.hosts) == 10
    assert "line 1: a port before any switch or adapter" in said(dump)
    assert "line 43: cannot read '[9]  H-00298683f1f1c665" in said(dump)
    assert "cannot read 'Switch 40 \"S-': left out" in said(dump)
    assert "longer than 4,096 characters" in said(dump)


def test_routers_unlinked_and_contradicting_ends_are_said():
    names = {"S-1": "a", "R-1": "rt", "H-1": "n1 x", "H-2": "n2 x"}
    text = "".join(subnet(names, [("S-1", "H-1"), ("S-1", "R-1")], lambda *_: "4xHDR"))
    text += '[1](0) "S-1"[1] # lid 1 lmc 0 "a" lid 2 4xHDR\n'  # H-2 on H-1's port
    text += 'Ca 1 "H-1" # "n1 x"\n[1](0) "S-1"[1] # lid 1 lmc 0 "a" lid 2 4xNDR\n'
    dump = read(text)
    assert dump.hosts == ("n1",)
    assert dump.nic_bytes_per_s == 25e9
    for remark in (
        "1 port(s) of a router",
        "has a second link: the first is kept",
        "1 adapter(s) with no link to a switch: left out, first 'n2 x'",
        "H-1 has a second record",
        "disagree about its rate",
    ):
        assert remark in said(dump)


def test_grouped_output_with_chassis_headings_is_read():
    text = (
        "Chassis 1 (guid 0x5)\nSpine 1\n\nNon-Chassis Nodes\n"
        'Switch 24 "S-1" # "ISR9024" base port 0 lid 6 lmc 0\n'
        '[22][ext 13] "H-2"[1](3) \t\t# "atlas35" lid 4 4xSDR\n'
    )
    assert (read(text).hosts, read(text).remarks) == (("atlas35",), ())


def test_a_chain_of_switches_ends():
    names = {f"S-{i}": f"s{i}" for i in range(40)} | {"H-1": "n1 x"}
    links = [("H-1", "S-0")] + [(f"S-{i}", f"S-{i + 1}") for i in range(39)]
    dump = read("".join(subnet(names, links, lambda *_: "4xHDR")))
    assert len(dump.tiers) == 16
    assert "leads to no host in 15 links" in said(dump)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("VM_hostname vm1\n0a224ccecb68d81d\n", "has no record of a switch"),
        ('Switch 1 "S-1" # "a"\n', "has no host on a switch"),
        ('Ca 1 "H-1" # "n1 x"\n[1](0) "H-2"[1](0) # "n2 x"\n', "has no record of a switch"),
        ("\0", "is binary"),
        ("", "is empty"),
    ],
)
def test_other_texts_are_refused_with_what_to_paste(text: str, told: str) -> None:
    with pytest.raises(TopologyTextError, match=told):
        read(text)


@settings(max_examples=60, deadline=None)
@given(
    num_groups=st.integers(1, 4),
    num_hosts=st.integers(1, 5),
    num_rails=st.integers(1, 3),
    num_spines=st.integers(1, 3),
    num_parallel=st.integers(1, 2),
    random=st.randoms(use_true_random=False),
)
def test_a_fat_tree_is_the_same_however_its_records_are_ordered(
    num_groups, num_hosts, num_rails, num_spines, num_parallel, random
):
    names, links, groups = {}, [], set()
    for group, rail in itertools.product(range(num_groups), range(num_rails)):
        leaf = f"S-{group:x}{rail:x}"
        names[leaf] = f"MF0;leaf-{group}-{rail}:MQM9701/U1"
        for host in range(num_hosts):
            adapter = f"H-{group:x}{host:x}{rail:x}"
            names[adapter] = f"g{group}n{host} mlx5_{rail}"
            links.append((leaf, adapter))
        for spine in range(num_spines):
            names[f"S-f{spine:x}"] = f"MF0;spine-{spine}:MQM9701/U1"
            links += [(leaf, f"S-f{spine:x}")] * num_parallel
    groups = {
        frozenset(f"g{group}n{host}" for host in range(num_hosts)) for group in range(num_groups)
    }
    records = subnet(names, random.sample(links, len(links)), lambda *_: "4xNDR")
    dump = read("\n".join(random.sample(records, len(records))))
    assert units_of(dump) == [groups, {frozenset().union(*groups)}]
    assert dump.nics_per_host == num_rails
    assert dump.tiers[0].oversubscription == max(1.0, num_hosts / (num_spines * num_parallel))
    assert dump.assumptions == ()
