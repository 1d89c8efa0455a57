"""Slurm's topology files: real ones by eye, odd ones repaired or refused with their line."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.topology.importers.dump import FabricDump, TopologyTextError
from planner.topology.importers.fabric.slurm import read_slurm_conf, read_slurm_yaml
from planner.topology.importers.hostlist import collect

SAMPLES = Path(__file__).parent.parent / "samples" / "topology" / "slurm"


def sample(name: str) -> FabricDump:
    read = read_slurm_yaml if name.endswith(".yaml") else read_slurm_conf
    return read((SAMPLES / name).read_bytes(), name)


def conf(*lines: str) -> FabricDump:
    return read_slurm_conf("\n".join(lines), "topology.conf")


def units_of(dump: FabricDump) -> list[set[frozenset[str]]]:
    """Return the sets of hosts of every tier; asserts that they add up and nest."""
    found = []
    for tier in (*dump.tiers, *([dump.domains] if dump.domains else [])):
        assert sum(tier.units) == len(dump.hosts)
        assert len(tier.units) == len(tier.unit_names) == len(set(tier.unit_names))
        bounds = itertools.pairwise(itertools.accumulate(tier.units, initial=0))
        found.append({frozenset(dump.hosts[start:end]) for start, end in bounds})
    for inner, outer in itertools.pairwise(found[: len(dump.tiers)]):
        assert all(any(unit <= other for other in outer) for unit in inner)
    return found


def said(dump: FabricDump) -> str:
    return "\n".join(map(str, (*dump.remarks, *dump.assumptions)))


# Facts counted in the files by eye: tiers as (name, sizes).
@pytest.mark.parametrize(
    ("name", "tiers", "first", "last"),
    [
        (
            "tree-4level-large.conf",
            [
                ("leaf", (20,) * 500),
                ("spine", (400,) * 12 + (200, 200) + (400,) * 12),
                ("core", (5000, 5000)),
                ("tier4", (10000,)),
            ],
            "peta10000",
            "peta19999",
        ),
        ("tree-comma-list.conf", [("leaf", (4, 4, 2)), ("spine", (10,))], "n1", "g1"),
        ("tree-leaves-only.conf", [("leaf", (18, 18, 18, 18, 7))], "n019", "node-a080"),
        ("tree-single-switch.conf", [("leaf", (4,))], "slurm_node1", "slurm_node4"),
        (
            "tree-topograph-oci.conf",
            [("leaf", (8,) * 12), ("spine", (16,) * 6), ("core", (96,))],
            "srv1101",
            "srv6208",
        ),
        (
            "tree-with-comments.conf",
            [("leaf", (4, 2, 2, 2)), ("spine", (10,))],
            "cl-c-001",
            "cl-dgx1-002",
        ),
        ("man-topology-0.yaml", [("leaf", (2, 2)), ("spine", (4,))], "node01", "node04"),
    ],
)
def test_real_trees_have_the_tiers_that_an_eye_counts(name, tiers, first, last):
    dump = sample(name)
    assert [(tier.name, tier.units) for tier in dump.tiers] == tiers
    assert (dump.hosts[0], dump.hosts[-1]) == (first, last)
    assert dump.domains is None
    units_of(dump)


def test_blocks_are_domains_and_aggregated_sizes_are_stages():
    dump = sample("block.conf")
    assert dump.domains is not None
    assert dump.domains.units == (4,) * 8
    assert [(tier.name, tier.units) for tier in dump.tiers] == [
        ("blocks2", (8, 8, 8, 8)),
        ("blocks4", (16, 16)),
        ("blocks8", (32,)),
    ]
    assert [str(remark) for remark in dump.remarks] == [
        "line 9: block size 64 is larger than all 8 blocks together: no further stage"
    ]
    units_of(dump)


def test_topographs_comments_give_the_real_names():
    dump = sample("block-topograph-nvl.conf")
    assert dump.domains is not None
    assert dump.domains.unit_names[:2] == ("nvl-1-1", "nvl-1-2")
    assert [tier.units for tier in dump.tiers] == [(16,) * 6, (32,) * 3]
    tree = sample("tree-topograph-oci.conf")
    assert tree.tiers[0].unit_names[-1] == "leaf-6-2"
    assert tree.tiers[2].unit_names == ("core",)


def test_leaves_without_a_spine_are_left_apart():
    dump = sample("tree-leaves-only.conf")
    assert [len(tier.units) for tier in dump.tiers] == [5]
    assert dump.assumptions == ()  # who builds the document decides what joins them
    # node-a051 is written under s2 (041-058) and s4.
    assert "node-a051: on leaf switches of 2 units" in said(dump)
    assert dump.hosts.count("node-a051") == 1


def test_slurms_own_negative_file_is_refused_with_its_line():
    with pytest.raises(TopologyTextError, match=r"line 16: .*mapping of keys, is text"):
        sample("invalid-block_blocks_not_list.yaml")


def test_every_topology_of_the_manual_is_read_or_refused_by_name():
    text = (SAMPLES / "man-topology-0.yaml").read_text().replace("true", "false", 1)
    parts = ["- topology:" + part for part in text.split("- topology:")[1:]]
    topo1, topo2, topo3, topo3a, topo4, topo5 = parts
    assert read_slurm_yaml(topo1, "y").tiers[0].units == (2, 2)
    blocks = read_slurm_yaml(topo2, "y")
    assert blocks.domains is not None
    assert (blocks.domains.units, blocks.tiers[0].units) == ((4,) * 4, (16,))
    for flat in (topo3, topo3a):
        dump = read_slurm_yaml(flat, "y")
        assert not dump.hosts
        assert not dump.tiers
        assert "flat" in said(dump)
    for kind, refused in (("ring", topo4), ("torus3d", topo5)):
        with pytest.raises(TopologyTextError, match=rf"'{kind}'.*there is no model"):
            read_slurm_yaml(refused, "y")
    # Without a default, the first is read.
    assert "'topo1', the first" in said(read_slurm_yaml(text, "y"))
    second = text.replace("topo2\n  cluster_default: false", "topo2\n  cluster_default: True")
    assert "'topo2', the cluster's default" in said(read_slurm_yaml(second, "y"))


def test_keys_in_any_case_quotes_continuations_and_link_speed():
    dump = conf(
        'SWITCHNAME=a nodes="n[1-2]" LinkSpeed=100 # a comment = here',
        "switchname=b \\",
        "  NODES = n10,n9",
        "SwitchName=top Switches=a,b Colour=red",
    )
    assert dump.hosts == ("n1", "n2", "n9", "n10")
    assert [str(remark) for remark in dump.remarks] == [
        "line 1: LinkSpeed is not used, as in Slurm; its unit is arbitrary",
        "line 4: 'colour' is not known and not used",
    ]


def test_hosts_on_the_same_leaves_are_one_unit():
    dump = conf(
        "SwitchName=r0 Nodes=n[1-4]",
        "SwitchName=r1 Nodes=n[1-4]",
        "SwitchName=q0 Nodes=m[1-4]",
        "SwitchName=q1 Nodes=m[1-4]",
        "SwitchName=x Switches=r0,q0",
        "SwitchName=y Switches=r1,q1",
    )
    assert [(tier.units, tier.unit_names) for tier in dump.tiers] == [
        ((4, 4), ("r[0-1]", "q[0-1]")),
        ((8,), ("x,y",)),
    ]
    assert "8 node(s) hang on several leaf switches" in said(dump)


def test_parallel_spines_are_one_unit():
    dump = conf(
        "SwitchName=a Nodes=n[1-2]",
        "SwitchName=b Nodes=n[3-4]",
        "SwitchName=s1 Switches=a,b",
        "SwitchName=s2 Switches=a,b",
    )
    assert [tier.units for tier in dump.tiers] == [(2, 2), (4,)]
    assert "line 4: 2 switches (first 'a') hang on several switches" in said(dump)
    assert dump.assumptions == ()


def test_spines_that_overlap_in_some_leaves_are_one_unit():
    dump = conf(
        *(f"SwitchName={leaf} Nodes={leaf}[1-2]" for leaf in "abc"),
        "SwitchName=s1 Switches=a,b",
        "SwitchName=s2 Switches=c,b",
    )
    assert [tier.units for tier in dump.tiers] == [(2, 2, 2), (6,)]


def test_a_leaf_straight_under_the_core_stands_for_itself_between():
    dump = conf(
        "SwitchName=a Nodes=n[1-2]",
        "SwitchName=b Nodes=n[3-4]",
        "SwitchName=far Nodes=z1",
        "SwitchName=s Switches=a,b",
        "SwitchName=top Switches=s,far",
    )
    assert [tier.units for tier in dump.tiers] == [(2, 2, 1), (4, 1), (5,)]
    assert dump.tiers[1].unit_names == ("s", "far")
    assert "line 5: switch 'far' hangs directly on 'top'" in said(dump)


def test_what_leads_nowhere_is_left_out_with_a_remark():
    dump = conf("SwitchName=a Nodes=n1,n1", "SwitchName=top Switches=a,gone[1-3]", "# end")
    assert dump.hosts == ("n1",)
    assert "line 2: switch 'top' joins gone[1-3], which the file does not define" in said(dump)
    assert "line 1: switch 'a' names some twice" in said(dump)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["SwitchName=a Nodes=n1", "SwitchName=a Nodes=n2"], "line 2: defines switch 'a' again"),
        (["SwitchName=a Nodes=n1 Switches=b"], "line 1: switch 'a' has both"),
        (["SwitchName=a"], "has switches but no node"),
        (["SwitchName=a Switches=b", "SwitchName=b Switches=a"], "line 1: switch 'a' lies below"),
        (["SwitchName=a Nodes=ALL"], "line 1: switch 'a' names ALL"),
        (["", "include leafs.conf"], "line 2: includes another file"),
        (["NodeName=n1 CPUs=4"], "line 1: 'nodename' begins no line"),
        (["SwitchName=a Nodes=n[1-"], "line 1: 'n[1-' is no list of hosts"),
        (["SwitchName=a Nodes=n1 and more"], "line 1: cannot read 'and more'"),
        (["SwitchName=a Nodes=n1 nodes=n2"], "line 1: gives nodes twice"),
        (["SwitchName=a Nodes=n1 \\"], "line 1: the line goes on"),
        (["SwitchName=a Nodes=n1", "BlockName=b Nodes=n1"], "line 2: has switches and blocks"),
        (["RingName=r Nodes=n[1-8]"], "line 1: RingName: there is no model"),
        (["BlockSizes=4"], "has no switch and no block"),
        (["BlockName=a Nodes=n1", "BlockName=b Nodes=n1"], "line 2: node 'n1' is in block 'b'"),
        (["BlockName=a Nodes=n1", "BlockName=a Nodes=n2"], "line 2: defines block 'a' again"),
        (["BlockName=a Nodes=n1", "BlockSizes=4,12"], "line 2: block size 12 is no power of two"),
        (["BlockName=a Nodes=n1", "BlockSizes=4,x"], "line 2: block size 'x'"),
        (["BlockName=a Nodes=n1", "BlockSizes=4", "BlockSizes=8"], "line 3: gives the block sizes"),
        (["BlockName=a"], "has blocks but no node"),
        ([f"SwitchName=s{i + 1} Switches=s{i}" for i in range(20)] + ["SwitchName=s0 Nodes=n"],
         "line 16: switch 's16' has 16 stages"),
        (["# only comments"], "has no switch"),
    ],
)  # fmt: skip
def test_what_slurm_refuses_is_refused_with_its_line(lines: list[str], told: str) -> None:
    with pytest.raises(TopologyTextError) as caught:
        conf(*lines)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: &a [x]\nb: *a\n", "line 2: uses a YAML alias"),
        ("[" * 100, "nested more than 32"),
        ("- " * 100 + "x", "nested more than 32"),
        ("x" * 1_000_001, "more than 1,000,000 bytes"),
        ("a: 1\na: 2\n", "line 2: gives the key 'a' twice"),
        ("a: 1\n---\nb: 1\n", "line 2: has several YAML documents"),
        ("a: [1\n", "is no YAML"),
        ("? [a]\n: b\n", "line 1: has a key that is a list"),
        ("# nothing\n", "no YAML document"),
        ("switches:\n  s1:\n    switches: [s2]\n", "line 1: is no topology.yaml"),
        ("- topology: t\n", "topology 't' has nothing"),
        ("- topology: t\n  tree: 1\n  block: 2\n", "topology 't' has tree, block"),
        ("- topology: t\n  tree: x\n", "line 2: tree must be a mapping of keys, is text"),
        ("- topology: t\n  tree:\n    switchs: x\n", "line 3: needs the key 'switches'"),
        ("- topology: [t]\n  tree: x\n", "line 1: topology must be text, is a list"),
        ("- topology: t\n  hypercube: {a: b}\n", "line 2: topology 't' is 'hypercube'"),
    ],
)
def test_yaml_that_is_no_topology_is_refused_with_its_line(text: str, told: str) -> None:
    with pytest.raises(TopologyTextError) as caught:
        read_slurm_yaml(text, "topology.yaml")
    assert told in str(caught.value)


def test_yaml_takes_lists_of_names_and_says_which_keys_it_does_not_use():
    dump = read_slurm_yaml(
        "topology: t\ntree:\n  switches:\n  - {switch: a, nodes: ['n[1-2]', n7], colour: red}\n",
        "y",
    )
    assert dump.hosts == ("n1", "n2", "n7")
    assert "line 4: the key 'colour' is not known" in said(dump)


@st.composite
def trees(draw: st.DrawFn) -> list[list[list[str]]]:
    """Draw spines of leaves of hosts."""
    numbers = iter(range(1, 1000))
    sizes = draw(
        st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4)
    )
    return [[[f"n{next(numbers)}" for _ in range(size)] for size in leaf] for leaf in sizes]


def entries(tree: list[list[list[str]]]) -> list[tuple[str, str, list[str]]]:
    """Return (switch, kind of members, members) of a three-stage tree."""
    found = [("top", "children", [f"s{i}" for i in range(len(tree))])]
    for i, spine in enumerate(tree):
        found.append((f"s{i}", "children", [f"l{i}x{j}" for j in range(len(spine))]))
        found.extend((f"l{i}x{j}", "nodes", hosts) for j, hosts in enumerate(spine))
    return found


@settings(max_examples=60, deadline=None)
@given(trees(), st.randoms(use_true_random=False))
def test_a_tree_is_the_same_however_its_lines_and_lists_are_ordered(tree, random):
    lines, items = [], []
    for name, kind, members in random.sample(entries(tree), len(entries(tree))):
        shuffled = random.sample(members, len(members))
        text = random.choice([collect, ",".join])(shuffled)
        key = {"children": "Switches", "nodes": "Nodes"}[kind]
        lines.append(f"SwitchName={name} {key}={text}")
        items.append(f"    - {{{kind}: '{text}', switch: {name}}}")
    yaml = "\n".join(["- topology: t", "  tree:", "    switches:", *items])
    expected = [
        {frozenset(leaf) for spine in tree for leaf in spine},
        {frozenset(itertools.chain(*spine)) for spine in tree},
        {frozenset(itertools.chain(*itertools.chain(*tree)))},
    ]
    assert units_of(conf(*lines)) == units_of(read_slurm_yaml(yaml, "y")) == expected
