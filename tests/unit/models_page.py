"""The tables of docs/models.md that follow from the code.

``python -m tests.unit.models_page`` writes them anew; ``test_models_page`` fails while page and
code differ.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from planner.errors import InvalidInputError
from planner.model.blocks import (
    model_flop_per_token,
    mtp_parameter_count,
    num_blocks,
    parameter_count,
)
from planner.model.families import FAMILIES, refused_type
from planner.model.huggingface import model_from_config
from planner.model.reader import KEYS
from planner.model.spec import ModelSpec
from tests.unit.published_models import PUBLISHED, REFUSED, SAMPLES, SOURCES
from tests.unit.transformers_models import transformers_count

__all__ = ["DOCS", "with_tables"]

DOCS = Path(__file__).parent.parent.parent / "docs" / "models.md"
_POSITIONS = KEYS["positions"]


def with_tables(text: str) -> str:
    """Return the page with the tables of today."""
    tables = {
        "parameters": _parameters(),
        "blocks": _blocks(),
        "refused": _refused(),
        "families": _families(),
        "sources": _sources(),
    }
    for name, rows in tables.items():
        start, end = (f"<!-- {name}: {edge} -->" for edge in ("start", "end"))
        found = re.search(f"{re.escape(start)}.*{re.escape(end)}", text, re.DOTALL)
        assert found is not None, f"docs/models.md needs the lines {start} and {end}"
        text = f"{text[: found.start()]}{start}\n{_table(rows)}\n{end}{text[found.end() :]}"
    return text


def _table(rows: Iterable[Iterable[str]]) -> str:
    heads, *lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([heads, "|" + "---|" * (heads.count("|") - 1), *lines])


def _parameters() -> list[list[str]]:
    """Return what we count, what was published, and what the module of transformers has."""
    found = [
        ["config", "total", "active", "published", "difference", "source", "transformers", "by"]
    ]
    for name, published in sorted(PUBLISHED.items(), key=lambda item: item[0].lower()):
        model, module = model_from_config(SAMPLES[name], name), transformers_count(SAMPLES[name])
        total, active = parameter_count(model), parameter_count(model, active=True)
        figures, difference = _billions(published.total), _percent(total / published.total - 1)
        if published.active is not None:
            uncounted = 0 if published.lookup_counted else model.vocab_size * model.hidden_size
            figures += f", {_billions(published.active)}"
            difference += f", {_percent((active - uncounted) / published.active - 1)}"
            figures += " [1]" * (not published.lookup_counted)
        same = (total, active) == (module.total, module.active)
        by_class = "the same" if same else _percent(total / module.total - 1)
        counts = [f"{total:,}", "" if active == total else f"{active:,}"]
        found.append([name, *counts, figures, difference, published.source, by_class, module.name])
    return found


def _blocks() -> list[list[str]]:
    """Return the blocks of every model, and its flop at its own context."""
    found = [["config", "blocks", "window", "MTP parameters", "context", "GFLOP per token"]]
    for name in sorted(PUBLISHED, key=str.lower):
        model = model_from_config(SAMPLES[name], name)
        config = SAMPLES[name].get("text_config", SAMPLES[name])
        context = next((config[key] for key in _POSITIONS if key in config), None)
        blocks = ", ".join(
            f"{number} {kind}"
            for kind, number in num_blocks(model).items()
            if kind not in ("embedding", "head")
        )
        flop = "" if context is None else f"{model_flop_per_token(model, context) / 1e9:,.4g}"
        predicted = mtp_parameter_count(model)
        found.append(
            [
                name,
                blocks + "".join(f", {mark}" for mark in _marks(model)),
                "" if model.window is None else f"{model.window.size:,} {model.window.kind}",
                f"{predicted:,}" if predicted else "",
                "not given" if context is None else f"{context:,}",
                flop,
            ]
        )
    return found


def _marks(model: ModelSpec) -> Iterable[str]:
    """Yield what is not in the names of the blocks."""
    if model.attention.kind == "mla":
        yield "latent attention" + " with an indexer" * (model.attention.indexer is not None)
    if model.experts is not None and model.experts.shared_hidden_size:
        yield "shared experts"
    if model.parallel_attention:
        yield "attention beside the feed-forward"
    if model.tied_embeddings:
        yield "tied embeddings"


def _refused() -> list[list[str]]:
    found = [["config", "parameters by transformers", "why"]]
    for name in sorted(REFUSED, key=str.lower):
        try:
            model_from_config(SAMPLES[name], name)
        except InvalidInputError as error:
            why = str(error).split("which is ")[-1].split(";")[0]
        count = transformers_count(SAMPLES[name])
        found.append([name, f"{count.total:,} ({count.name})", why])
    return found


def _families() -> list[list[str]]:
    found = [["understood", "refused, as"]]
    refused: dict[str, list[str]] = {}
    for name in ("mamba", "jamba", "qwen3_next", "minimax", "lfm2", "bert", "t5", "whisper", "vit"):
        refused.setdefault(refused_type(name) or "", []).append(name)
    said = "; ".join(f"{kind}: {', '.join(types)}, ..." for kind, types in refused.items())
    return [*found, [", ".join(sorted(FAMILIES)), said]]


def _sources() -> list[list[str]]:
    return [["config", "from"], *([Path(f).stem, url] for f, url in sorted(SOURCES.items()))]


def _billions(number: float) -> str:
    return f"{number / 1e9:,.10g} B" if number >= 1e9 else f"{number / 1e6:,.10g} M"


def _percent(share: float) -> str:
    return f"{100 * share:+.2f} %"


if __name__ == "__main__":
    DOCS.write_text(with_tables(DOCS.read_text("utf-8")), "utf-8")
