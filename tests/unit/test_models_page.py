"""docs/models.md says what the code computes, of every sample and no other."""

import re

from tests.unit.models_page import DOCS, with_tables
from tests.unit.published_models import PUBLISHED, REFUSED, SAMPLES


def test_the_page_is_what_the_code_computes():
    text = DOCS.read_text("utf-8")
    assert text == with_tables(text), "run python -m tests.unit.models_page"


def test_every_sample_is_on_the_page_with_its_difference():
    lines = DOCS.read_text("utf-8").splitlines()
    for name in SAMPLES:
        assert sum(line.startswith(f"| {name} |") for line in lines) == (
            2 if name in REFUSED else 3
        )
    for name in PUBLISHED:
        line = next(line for line in lines if line.startswith(f"| {name} |"))
        differences = re.findall(r"[+-](\d+\.\d+) %", line)
        assert differences
        # of the total: half a per cent, or half the last digit that the publisher gives
        allowed = max(0.5, 50 * PUBLISHED[name].unit / PUBLISHED[name].total)
        assert float(differences[0]) <= allowed + 0.01
