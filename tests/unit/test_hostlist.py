"""Host lists: python-hostlist's grammar, bounded, with errors that say where."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.topology.importers.dump import TopologyTextError
from planner.topology.importers.hostlist import MAX_HOSTS, collect, expand, natural_key


def test_order_padding_and_duplicates_stay_as_written():
    assert expand("n[9-11],d[01-02],n9", source="s") == ["n9", "n10", "n11", "d01", "d02", "n9"]


def test_white_space_parts_names_as_in_slurm():
    assert expand(" n1  n[2-3]\nm1,\tm2,", source="s") == ["n1", "n2", "n3", "m1", "m2"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("n[1-999999999]", "999,999,999 hosts"),
        ("n[1-2000]x[1-2000]", "4,000,000 hosts"),
        ("n[1-600000,1-600000]", "1,200,000 hosts"),
        ("n[1-600000],m[1-600000]", "1,200,000 hosts"),
        ("n" + "[1]" * 2000, "255 characters or 16"),
        ("n" * 300, "255 characters"),
        ("x," + "n" * 300 + ",x", "255 characters"),
        ("n[" + "0" * 5000 + "1-2]", "digits"),
        ("n[1-2", "brackets"),
        ("n1-2]", "brackets"),
        ("n[[1]]", "brackets"),
        ("n[3-1]", "start > stop"),
        ("n[a-b]", "bad range"),
        ("n[]", "bad range"),
        ("n[1,,2]", "bad range"),
        ("n\x01", "control character"),
        (" , ", "names no host"),
        ("", "names no host"),
    ],
)
def test_what_is_no_list_or_too_long_is_refused_with_its_line(text: str, told: str) -> None:
    with pytest.raises(TopologyTextError) as caught:
        expand(text, source="topology.conf", line=7)
    assert told in str(caught.value)
    assert str(caught.value).startswith("topology.conf, line 7: ")
    assert len(str(caught.value)) < 300


def test_a_machine_larger_than_the_librarys_own_limit_is_read():
    assert len(expand("fugaku[000001-158976]", source="s")) == 158_976


def test_the_limit_is_the_callers_to_lower():
    assert len(expand("n[1-4]", source="s", max_hosts=4)) == 4
    assert len(expand("a,b,c,,d,", source="s", max_hosts=4)) == 4
    for five in ("n[1-5]", "a,b,c,d,e", "a b,n[1-2]\nc"):
        with pytest.raises(TopologyTextError, match="5 hosts, more than 4"):
            expand(five, source="s", max_hosts=4)
    assert MAX_HOSTS == 2**20


@given(
    st.lists(st.from_regex(r"[a-z]{1,3}[0-9]{0,3}(-[a-z0-9]{1,3})?", fullmatch=True), min_size=1)
)
def test_a_collected_list_expands_to_the_same_names(names: list[str]) -> None:
    assert sorted(expand(collect(names), source="s")) == sorted(set(names))


@given(st.text(alphabet="n1290[]-, \t", max_size=40))
def test_any_text_is_a_list_or_an_error_with_a_reason(text: str) -> None:
    with suppress(TopologyTextError):
        assert expand(text, source="s", max_hosts=1000)


def test_names_that_no_list_can_hold_are_printed_one_by_one():
    assert collect(["b c", "a[1]"]) == "a[1], b c"


def test_numbers_in_names_sort_as_numbers():
    assert sorted(["n10", "n2", "n02", "1x", "n"], key=natural_key) == [
        "1x",
        "n",
        "n02",
        "n2",
        "n10",
    ]
