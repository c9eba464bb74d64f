"""Typed looks into a config that anyone may have written, and what transformers puts where a key is absent.

A config key has three states: absent (the library's default counts), null, and a value that may be of any type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

LLAMA = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "attention_bias": False,
    "hidden_act": "silu",
}  # fmt: skip
_DEEPSEEK = {
    "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "vocab_size": 129280, "max_position_embeddings": 4096, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": LLAMA | {"intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768},
    "qwen3": LLAMA | {"intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768,
                      "head_dim": 128},
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "deepseek_v2": _DEEPSEEK | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                                "num_attention_heads": 32, "num_key_value_heads": None, "vocab_size": 32000},
}  # fmt: skip
"""What transformers fills in for an absent key, by model_type (transformers/models/*/configuration_*.py): a drafter
without `num_hidden_layers` becomes one of 32 layers."""

SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "max_position_embeddings",
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
"""Keys that are positive whole numbers wherever they are."""

NULLABLE = frozenset(
    {"num_key_value_heads", "head_dim", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states",
     "q_lora_rank"}
)  # fmt: skip
"""Sizes for which null means absent."""

STRICT_BOOLS = ("use_cache", "tie_word_embeddings", "attention_bias", "mlp_bias")
"""Declared bool by transformers 5, which refuses null there (StrictDataclassFieldValidationError)."""

SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def integer(cfg: Config, key: str) -> int | None:
    """The value if it is a whole number, else None."""
    v = cfg.get(key)
    return v if isinstance(v, int) and not isinstance(v, bool) else None


def size(cfg: Config, key: str, model_type: str | None = None) -> int | None:
    """A positive whole number: the value, or where the key is absent transformers' default; None otherwise."""
    v: Any = cfg.get(key)
    if v is None and (key not in cfg or key in NULLABLE):
        v = DEFAULTS.get(model_type or "", {}).get(key)
    return v if isinstance(v, int) and not isinstance(v, bool) and 0 < v < 1 << 40 else None


def number(cfg: Config, key: str) -> float | None:
    v = cfg.get(key)
    return float(v) if isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e300 else None


def mapping(cfg: Config, key: str) -> Config:
    """A nested object; {} where it is absent, null or something else."""
    v = cfg.get(key)
    return v if isinstance(v, dict) else {}


def text(cfg: Config, key: str) -> str | None:
    v = cfg.get(key)
    return v if isinstance(v, str) else None


def ids(value: Any) -> list[int] | None:
    """A list of whole numbers, else None."""
    if isinstance(value, list) and value and all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        return value
    return None


def shown(value: Any, limit: int = 80) -> str:
    """repr for a message, cut: anyone's config may hold anything."""
    s = repr(value)
    return s if len(s) <= limit else s[: limit - 1] + "…"


def release(version: str | None) -> tuple[int, ...]:
    """ "0.32.0+cpu" → (0, 32, 0); () where there is no version."""
    out: list[int] = []
    for part in (version or "").split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not digits or not part[0].isdigit():
            break
        out.append(int(digits[:9]))
    return tuple(out)
