"""Take single values out of a ``config.json``, with the path of each and what was assumed."""

from collections.abc import Mapping
from typing import Final, TypeGuard

from planner.errors import InvalidInputError

__all__ = ["KEYS", "MAX_COUNT", "ConfigReader", "is_integer", "is_set", "shown"]

# Quantity -> keys, transformers' name first; dots go into nested objects. The last of hidden_size,
# num_layers, num_heads, ffn_size and positions are those of llm-analysis (github.com/cli99).
KEYS: Final[dict[str, tuple[str, ...]]] = {
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model", "hidden_dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "attn_config.kv_n_heads"),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "ffn_size": (
        "intermediate_size",
        "n_inner",
        "ffn_dim",
        "ffn_config.ffn_hidden_size",
        "ffn_embed_dim",
    ),
    "dense_ffn_size": ("intermediate_size_mlp",),
    "num_experts": (
        "num_local_experts",
        "num_experts",
        "n_routed_experts",
        "ffn_config.moe_num_experts",
    ),
    "expert_size": ("moe_intermediate_size",),
    "top_k": ("num_experts_per_tok", "experts_per_token", "moe_top_k", "ffn_config.moe_top_k"),
    "num_shared_experts": ("n_shared_experts",),
    "shared_size": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "window": ("sliding_window", "attention_chunk_size", "window_size"),
    "index_heads": ("index_n_heads",),
    "index_head_dim": ("index_head_dim",),
    "index_top_k": ("index_topk",),
    "num_mtp_modules": ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"),
}

# As the sizes of ModelSpec.
MAX_COUNT: Final = 1 << 24


class ConfigReader:
    """A config, its path in the request, and what had to be assumed while reading it."""

    def __init__(self, data: object, name: str, path: str = "model.huggingface") -> None:
        self.name = name
        self.path = path
        self.assumptions: list[str] = []
        if not isinstance(data, Mapping):
            raise self.refusal(
                "", f"is {shown(data)}; need an object; give the parsed config.json of the model"
            )
        self.data = data

    def refusal(self, key: str, reason: str) -> InvalidInputError:
        """Return the error that says what is wrong with ``key``."""
        where = f"{self.path}.{key}" if key else self.path
        return InvalidInputError(f"model {self.name[:120]!r}: {where} {reason}", where=where)

    def assume(self, sentence: str) -> None:
        """Note ``sentence`` once."""
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)

    def get(self, key: str) -> object:
        """Return the value at a dotted key, or None."""
        value: object = self.data
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def language_model(self) -> "ConfigReader":
        """Return the reader of the language model in a multimodal config, else itself."""
        part, nested = self, self.get("text_config")
        if nested is not None:
            part = ConfigReader(nested, self.name, f"{self.path}.text_config")
            outer = self.get("tie_word_embeddings")
            if outer is not None and part.get("tie_word_embeddings") is None:
                part.data = {**part.data, "tie_word_embeddings": outer}
        others = [key for key in ("vision_config", "audio_config") if self.get(key) is not None]
        if nested is not None or others:
            part.assume("only the language model is planned; image and audio parts are left out")
        return part

    def key_of(self, quantity: str) -> str:
        """Return the key under which ``quantity`` is given, else its usual name."""
        keys = KEYS[quantity]
        return next((key for key in keys if self.get(key) is not None), keys[0])

    def integer(self, key: str, *, at_least: int, at_most: int) -> int | None:
        """Return the integer under one key, or None if it is absent or null.

        Raises:
            InvalidInputError: It is no integer, or out of range.
        """
        value = self.get(key)
        if value is None:
            return None
        if not is_integer(value) or not at_least <= value <= at_most:
            raise self.refusal(
                key,
                f"is {shown(value)}; need an integer from {at_least} to {at_most}; "
                "copy it from the model's own config.json",
            )
        return value

    def optional(self, quantity: str, *, at_least: int = 1, at_most: int = MAX_COUNT) -> int | None:
        """Return the integer under any key of ``quantity``, or None if all are absent or null.

        Raises:
            InvalidInputError: It is no integer in range, or two keys disagree.
        """
        first = self.key_of(quantity)
        value = self.integer(first, at_least=at_least, at_most=at_most)
        for key in KEYS[quantity]:
            other = self.integer(key, at_least=at_least, at_most=at_most)
            if other is not None and other != value:
                raise self.refusal(
                    key,
                    f"is {other} but {first} is {value}, and both mean the same; "
                    "remove the wrong one",
                )
        return value

    def count(self, quantity: str, *, at_most: int = MAX_COUNT) -> int:
        """Return the integer of ``quantity``, which must be there."""
        value = self.optional(quantity, at_most=at_most)
        if value is None:
            first, *others = KEYS[quantity]
            elsewhere = f" here or under {', '.join(others)}" if others else ""
            raise self.refusal(
                first,
                f"is {'null' if first in self.data else 'missing'}; need a positive integer"
                f"{elsewhere}; give the model's own config.json, not a shortened copy",
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean; absent or null is ``default``, and noted."""
        value = self.get(key)
        if value is None:
            self.assume(f"{key} is not given: {str(default).lower()}, the family's default")
            return default
        if not isinstance(value, bool):
            raise self.refusal(key, f"is {shown(value)}; need true or false")
        return value

    def set_keys(self) -> list[str]:
        """Return the sorted names of all keys that mean something."""
        return sorted(k for k, value in self.data.items() if isinstance(k, str) and is_set(value))

    def string(self, key: str) -> str | None:
        """Return a string, or None if it is absent or null."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refusal(key, f"is {shown(value)}; need a string")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; absent or null is empty."""
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise self.refusal(key, f"is {shown(value)}; need a list of strings")
        return tuple(value)

    def integers(self, key: str) -> tuple[int, ...] | None:
        """Return a list of non-negative integers, or None if absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(is_integer(v) and v >= 0 for v in value):
            raise self.refusal(key, f"is {shown(value)}; need a list of integers from 0")
        return tuple(value)


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_set(value: object) -> bool:
    """Return whether a key means something: not null, false, zero or empty."""
    return value is not None and value is not False and value not in (0, "", [], {})


def shown(value: object) -> str:
    """Return a value for a message, short and without descending into it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    if isinstance(value, int | float):
        return repr(value)
    return "an object" if isinstance(value, Mapping) else f"a {type(value).__name__}"
