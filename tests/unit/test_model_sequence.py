"""Keys that queries see, against counting them one by one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from planner.model.sequence import attended
from planner.model.spec import Window
from planner.plan import Packing, TrainingSpec, document_hash


def seen(length: int, window: Window | None) -> list[int]:
    """Return how many keys each query of a document sees, itself included."""
    if window is None:
        return [i + 1 for i in range(length)]
    if window.kind == "sliding":
        return [min(i + 1, window.size) for i in range(length)]
    return [i % window.size + 1 for i in range(length)]


WINDOWS = st.none() | st.builds(
    lambda size, kind: Window(size=size, kind=kind, layers=(0,)),
    st.integers(1, 80),
    st.sampled_from(["sliding", "chunked"]),
)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=6), window=WINDOWS)
def test_keys_per_query_are_those_counted_one_by_one(lengths, window):
    """But for half a pair for every query that sees one more than the last, as published."""
    packing = Packing(lengths=tuple(lengths), counts=(1,) * len(lengths))
    found = attended(64, packing, window).keys_per_query * sum(lengths)
    exact = sum(sum(seen(length, window)) for length in lengths)
    halves = 0.0
    for length in lengths:
        growing = min(length, window.size) if window else length
        if window and window.kind == "chunked":
            growing = length
        halves += growing / 2
    assert found == pytest.approx(exact - halves, rel=1e-12, abs=1e-9)


def test_a_window_of_128_in_8192_tokens_is_within_a_thousandth_of_the_sum_over_positions():
    window = Window(size=128, layers=(0,))
    exact = sum(min(i, 128) for i in range(1, 8193))
    assert attended(8192, window=window).keys_per_query * 8192 == pytest.approx(exact, rel=1e-4)
    # not s * w, which counts keys before the first token
    assert attended(8192, window=window).keys_per_query < 128


@settings(deadline=None)
@given(seq_len=st.integers(1, 4096), size=st.integers(1, 8192))
def test_a_window_never_shows_more_and_a_wide_one_all(seq_len, size):
    full = attended(seq_len)
    for kind in ("sliding", "chunked"):
        window = Window(size=size, kind=kind, layers=(0,))
        narrow = attended(seq_len, window=window)
        assert narrow.keys_per_query <= full.keys_per_query
        assert narrow.kernel_length <= full.kernel_length == seq_len
        assert (narrow == full) == (size >= seq_len or (size == 1 == seq_len))


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 4096), min_size=1, max_size=5, unique=True),
    data=st.data(),
)
def test_the_kernel_length_is_the_flop_weighted_mean(lengths, data):
    counts = [data.draw(st.integers(1, 1000)) for _ in lengths]
    packing = Packing(lengths=tuple(lengths), counts=tuple(counts))
    found = attended(4096, packing)
    pairs = [n * length**2 for n, length in zip(counts, lengths, strict=True)]
    mean = sum(p * length for p, length in zip(pairs, lengths, strict=True)) / sum(pairs)
    assert found.kernel_length == pytest.approx(mean)
    tokens = sum(n * length for n, length in zip(counts, lengths, strict=True))
    assert found.keys_per_query == pytest.approx(sum(pairs) / 2 / tokens)
    more = Packing(lengths=tuple(lengths), counts=tuple(3 * n for n in counts))
    assert attended(4096, more).keys_per_query == pytest.approx(found.keys_per_query)


@pytest.mark.parametrize(
    ("packing", "message"),
    [
        ({"lengths": [4096, 8193], "counts": [1, 1]}, "8193 tokens, but a sequence holds"),
        ({"lengths": [4096], "counts": [1, 2]}, "1 lengths but 2 counts; need one count for each"),
        ({"lengths": [0], "counts": [1]}, "greater than or equal to 1"),
        ({"lengths": [-5], "counts": [1]}, "greater than or equal to 1"),
        ({"lengths": [8], "counts": [0]}, "greater than or equal to 1"),
        ({"lengths": [], "counts": []}, "at least 1 item"),
        ({"lengths": [8.5], "counts": [1]}, "integer"),
        ({"lengths": [8]}, "counts"),
    ],
)
def test_packing_that_cannot_be_is_refused(packing, message):
    with pytest.raises(ValidationError, match=message):
        TrainingSpec.model_validate({"global_batch_size": 8, "seq_len": 8192, "packing": packing})


def test_training_without_packing_keeps_its_hash():
    spec = TrainingSpec(global_batch_size=8, seq_len=8192)
    assert "packing" not in spec.model_dump()
    assert document_hash(spec) == "bcef6a6da823e8e5"
