"""Names of GPUs that stand around a listing: people paste more than the one command.

``nvidia-smi -L``, the table of ``nvidia-smi``, ``--query-gpu=... --format=csv``, the environment
reports of PyTorch, vLLM and SGLang, ``rocm-smi --showproductname`` and ``amd-smi static`` name the
GPUs, each with the number by which the listing calls them, or without one for all.
"""

import re
from collections.abc import Sequence
from typing import Final

from planner.topology.importers.smi.rows import without_prefix

__all__ = ["printed_models"]

# A product: a vendor or a line of products, or a code such as "H100"; up to a comma, a bracket,
# a cell of a table, two blanks, or the end.
_PRODUCT: Final = (
    r"((?:NVIDIA|Tesla|GeForce|Quadro|TITAN|AMD|Radeon|Instinct|(?:RTX|GTX)(?=[ \d])"
    r"|[A-Z]{1,2}\d{2,4}(?=[ \-\n]|$))(?:[ ]?[\w.\-/+]){0,60})"
)
# What the table prints behind the name: persistence mode.
_MODE: Final = r"(?:On|Off|N/A|WDDM|TCC|MCDM)"
_AT_END: Final = re.compile(rf"\s{_MODE}$")
_NUMBERS: Final = r"(\d{1,3}(?:,[ ]?\d{1,3}){0,63})"
_BEFORE: Final = r"(?:^|[\s:])"
_PATTERNS: Final = (
    # GPU 0: NVIDIA H100 80GB HBM3 (UUID: ...); GPU 0,1,2,3: NVIDIA H20
    re.compile(rf"{_BEFORE}GPU {_NUMBERS}:[ \t]{{1,9}}{_PRODUCT}"),
    # |   0  NVIDIA L40S         On  |   00000000:01:00.0 Off |
    re.compile(
        rf"^\s{{0,9}}(\d{{1,3}})\s{{1,4}}{_PRODUCT}\s{{1,60}}(?:{_MODE}\s{{1,9}})?"
        r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:"
    ),
    # 0, NVIDIA H200, 143771 MiB; NVIDIA H200, 143771 MiB; the same in a table
    re.compile(rf"^\s{{0,9}}(?:(\d{{1,3}})\s?[,\t]\s{{0,9}})?{_PRODUCT}[ ]?[,\t]\s{{0,9}}\d+ MiB"),
    # GPU[0] : Card Series: AMD Instinct MI300X; of older versions "Card series"
    re.compile(rf"\bGPU\[(\d{{1,3}})\]\s*:\s*(?:Card [Ss]eries|Device Name):\s*{_PRODUCT}"),
    # GPU: 8 * NVIDIA H100 80GB HBM3; of a count of GPUs nothing else is taken
    re.compile(rf"{_BEFORE}()\d{{1,2}}[ ]?[x*][ ]?(?=NVIDIA|Tesla|AMD){_PRODUCT}"),
    # GPU models and configuration: AMD Instinct MI300X (gfx942...); Product Name : ...
    re.compile(
        r"^\s{0,40}()(?:GPU models and configuration|Product Name|MARKET_NAME)\s{0,40}:"
        rf"\s{{0,9}}{_PRODUCT}"
    ),
)
# A row of the table has 91; patterns are tried at each letter of a line.
_MAX_LINE_CHARACTERS: Final = 400
_HINTS: Final = ("GPU", "NVIDIA", "MiB", "Product Name", "MARKET_NAME", "00:")


def printed_models(lines: Sequence[str]) -> dict[int, str]:
    """Return the name of each GPU by its number, -1 for one that holds for all others.

    A name that is cut off ("Tesla V100-SXM2...") is none. Of several names for a number the first
    counts: what follows is of another node.
    """
    found: dict[int, str] = {}
    for line in lines:
        if len(line) > _MAX_LINE_CHARACTERS or not any(hint in line for hint in _HINTS):
            continue
        for pattern in _PATTERNS:
            if match := pattern.search(line) or pattern.search(without_prefix(line)):
                name = _AT_END.sub("", match[2].strip()).strip()
                for number in _numbers(match[1]):
                    if name and not name.endswith(".."):
                        found.setdefault(number, name)
                break
    if found and -1 not in found and len(set(found.values())) == 1:
        found[-1] = next(iter(found.values()))  # a table of some GPUs speaks for the rest
    return found


def _numbers(text: str | None) -> list[int]:
    return [int(part) for part in text.split(",")] if text else [-1]
