"""JSON from outside, read strictly, and pydantic's complaints in the planner's words.

Every document that enters (a request, a file, a run) passes ``parse_json`` and ``validated``,
so that a mistake reads the same on the command line and over REST.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Final, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from planner.errors import InvalidInputError

__all__ = ["MAX_DEPTH", "MAX_INTEGER_DIGITS", "explain_errors", "parse_json", "validated"]

# No document of ours nests deeper than 10; far below the depth at which serialisers give up.
MAX_DEPTH: Final = 64
# Longer integers are never a count of anything; CPython itself stops at 4300 digits.
MAX_INTEGER_DIGITS: Final = 30
_MAX_SHOWN_ERRORS: Final = 4
# A hostile document has a million errors; to tell which were meant, the first are enough.
_MAX_READ_ERRORS: Final = 10_000

# How pydantic's messages begin: "Input should", "String should", ...
_SUBJECT: Final = re.compile(r"^[A-Z][a-z]+ should")

# Fields of inference planners; a request with one was not meant for a training plan.
_INFERENCE_FIELDS: Final = frozenset(
    {"inference", "serving", "decode", "prefill", "mode", "isl", "osl", "ttft", "tpot", "itl"}
    | {"input_len", "output_len", "prompt_len", "max_tokens", "max_new_tokens"}
    | {"max_output_tokens", "kv_cache", "num_beams"}
)

DocumentT = TypeVar("DocumentT", bound=BaseModel)


def parse_json(text: str | bytes, *, source: str) -> Any:
    """Return the value of a JSON text that keeps to RFC 8259 and repeats no key.

    Args:
        text: UTF-8 bytes, or text.
        source: What the text is, for messages: a file name, or ``body``.

    Raises:
        InvalidInputError: It is no JSON, nests deeper than ``MAX_DEPTH``, or holds NaN, an
            infinite number, an absurdly long integer, half a surrogate pair or a key twice.
    """
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(
            decoded,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_sane_int,
            object_pairs_hook=_distinct_keys,
        )
        if "\\ud" in decoded.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as exc:
        raise InvalidInputError(
            f"{source}: not valid UTF-8 text ({exc.reason}); save it as UTF-8", where=source
        ) from exc
    except json.JSONDecodeError as exc:
        raise InvalidInputError(
            f"{source}: not valid JSON: {exc.msg} at line {exc.lineno} column {exc.colno}",
            where=source,
        ) from exc
    except (ValueError, RecursionError) as exc:
        reason = "nested too deeply" if isinstance(exc, RecursionError) else str(exc)
        raise InvalidInputError(f"{source}: {reason}", where=source) from exc
    if _deeper_than(value, MAX_DEPTH):
        raise InvalidInputError(
            f"{source}: nested deeper than {MAX_DEPTH} levels; no document here needs that",
            where=source,
        )
    return value


def validated(document: type[DocumentT], value: Any, *, source: str = "") -> DocumentT:
    """Return ``value`` as a ``document``.

    Raises:
        InvalidInputError: With the path of the first offending field in ``where``.
    """
    try:
        return document.model_validate(value)
    except ValidationError as exc:
        raise explain_errors(exc.errors(include_url=False), value, source=source) from exc


def explain_errors(
    errors: Sequence[ErrorDetails], value: Any, *, source: str = ""
) -> InvalidInputError:
    """Return pydantic's ``errors`` about ``value`` as one error: where, needed, got, what to try.

    Where a union was tried, only the member that came closest is spoken of.
    """
    read = errors[:_MAX_READ_ERRORS]
    located = [(*_locate(error, value), error) for error in read]
    kept = _without_echoes(_closest_members(located))
    lines = [_sentence(path, error) for path, error in kept[:_MAX_SHOWN_ERRORS]]
    if len(kept) > _MAX_SHOWN_ERRORS:
        lines.append(f"and {len(kept) - _MAX_SHOWN_ERRORS + len(errors) - len(read)} more")
    prefix = f"{source}: " if source else ""
    return InvalidInputError(prefix + "; ".join(lines), where=kept[0][0] or source)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number; give a finite number or leave the field out")


def _finite_float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"number {text[:40]} is too large for a 64-bit float")
    return number


def _sane_int(text: str) -> int:
    num_digits = len(text.lstrip("-"))
    if num_digits > MAX_INTEGER_DIGITS:
        raise ValueError(
            f"integer {text[:20]}... has {num_digits} digits; at most {MAX_INTEGER_DIGITS}"
        )
    return int(text)


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        # Counted, not searched for one by one: a hostile object has a million keys.
        ((repeated, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {repeated[:60]!r} appears twice in one object; keep one")
    return value


def _deeper_than(value: Any, limit: int) -> bool:
    layer = [value]
    for _ in range(limit):
        layer = [
            child
            for item in layer
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not layer:
            return False
    return True


def _locate(error: ErrorDetails, value: Any) -> tuple[str, tuple[str, str] | None]:
    """Return (JSON path, (path of a union, member tried) or None) of one pydantic error.

    Pydantic mixes names of union members into its location; they are what the value lacks.
    """
    path, member, loc = "", None, error["loc"]
    for position, part in enumerate(loc):
        is_missing = error["type"] == "missing" and position == len(loc) - 1
        if isinstance(value, dict) and part in value:
            path, value = f"{path}.{part}" if path else str(part), value[part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            path, value = f"{path}[{part}]", value[part]
        elif is_missing:
            path = f"{path}.{part}" if path else str(part)
        elif member is None:
            member = (path, str(part))
    return path, member


def _closest_members(
    located: Sequence[tuple[str, tuple[str, str] | None, ErrorDetails]],
) -> list[tuple[str, ErrorDetails]]:
    """Drop the errors of union members that were not meant.

    Meant is the member of the right JSON type, then the one with the fewest unknown fields, then
    the one with the fewest errors.
    """
    scores: dict[tuple[str, str], tuple[int, int, int]] = {}
    for path, member, error in located:
        if member is not None:
            wrong_type, unknown, count = scores.get(member, (0, 0, 0))
            scores[member] = (
                wrong_type + (path == member[0] and error["type"].endswith("_type")),
                unknown + (error["type"] == "extra_forbidden"),
                count + 1,
            )
    best: dict[str, str] = {}
    for union, name in sorted(scores, key=lambda member: scores[member]):
        best.setdefault(union, name)
    return [
        (path, error)
        for path, member, error in located
        if member is None or best[member[0]] == member[1]
    ]


def _without_echoes(kept: Sequence[tuple[str, ErrorDetails]]) -> list[tuple[str, ErrorDetails]]:
    """Drop that a list is too short where that is so because pydantic left out its bad items."""
    lists = {path.rpartition("[")[0] for path, _ in kept if "[" in path}
    return [
        (path, error) for path, error in kept if error["type"] != "too_short" or path not in lists
    ]


def _sentence(path: str, error: ErrorDetails) -> str:
    """Return one error as ``path: needed; got; try``."""
    where = path or "document"
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return f"{where} is missing; add it"
    if kind == "extra_forbidden":
        if path.rsplit(".", 1)[-1].lower() in _INFERENCE_FIELDS:
            return f"{where}: inference is not planned for, only training; leave it out"
        return f"{where} is not a known field; remove it or check its spelling"
    message = error["msg"].removeprefix("Value error, ")
    message = _SUBJECT.sub("must", message).replace("must be a valid", "must be a")
    message = message.replace("must be a integer", "must be an integer").split(", unable to")[0]
    if kind in ("value_error", "assertion_error"):
        return f"{where}: {message}" if path else message
    text = f"{where} {message}, got {_short(error['input'])}"
    return text + _hint(error["input"], context)


def _hint(got: Any, context: dict[str, Any]) -> str:
    if "expected" in context and isinstance(got, str):
        words = [
            word.strip("'\"") for word in context["expected"].replace(" or ", ", ").split(", ")
        ]
        near = get_close_matches(got, words, n=1, cutoff=0.4)
        return f"; try {near[0]!r}" if near else ""
    for bound in ("ge", "le"):
        if bound in context:
            return f"; try {context[bound]}"
    return ""


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with {len(value)} fields"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    return text if len(text) <= 60 else text[:57] + "..."
