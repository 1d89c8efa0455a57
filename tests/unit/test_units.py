"""Sizes as people write them."""

import pytest

from planner.units import parse_bytes, parse_number, parse_whole


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("7", 7),
        ("7B", 7),
        ("1K", 1 << 10),
        ("64M", 64 << 20),
        ("8G", 8 << 30),
        ("8g", 8 << 30),
        ("2T", 2 << 40),
        ("64MiB", 64 << 20),
        ("64 mib", 64 << 20),
        ("1GB", 10**9),
        ("1kB", 1000),
        ("0.5K", 512),
        ("1.3MB", 1_300_000),
        ("0", 0),
        (" 12 ", 12),
    ],
)
def test_a_prefix_alone_is_binary_as_in_nccl_tests_and_b_makes_it_decimal(
    text: str, size: int
) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "K",
        "-4",
        "1.5",
        "0.3K",
        "1e9",
        "1iB",
        "1 X",
        "1KK",
        "64Mb/s",
        "\u0663",
        "1\u212a",
        "9" * 5000,
    ],
)
def test_what_is_no_whole_number_of_bytes_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"need whole bytes.* 1M or 1MiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "text", ["1_000", "\u0661\u0660", "\uff11\uff10", "nan", "inf", "0x10", "", "."]
)
def test_numbers_have_the_digits_0_to_9_and_nothing_else_that_python_reads(text: str) -> None:
    for parse in (parse_number, parse_whole):
        with pytest.raises(ValueError, match="need the digits 0 to 9"):
            parse(text)
    assert (parse_number("-1.5e3"), parse_number(".5"), parse_whole(" 12 ")) == (-1500, 0.5, 12)
