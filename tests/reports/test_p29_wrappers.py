"""P29: wrapper configs (ModelOpt#1417, speculators#626): one `text_config` for all, whoever quantised the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.target.config import target_facts, text_config

SIZES = {"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840}

WRAPPERS: list[tuple[dict[str, Any], str, str]] = [
    ({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", **SIZES}}, "kimi_k2", "kimi_k25"),
    # the same model, quantised by others: the inner type is another one
    ({"model_type": "kimi_k25", "text_config": {"model_type": "deepseek_v3", **SIZES}}, "deepseek_v3", "kimi_k25"),
    ({"model_type": "mistral3", "text_config": {"model_type": "mistral", **SIZES}}, "mistral", "mistral3"),
    ({"model_type": "qwen3_vl_moe", "text_config": {"model_type": "qwen3_vl_moe_text", **SIZES}}, "qwen3_vl_moe_text",
     "qwen3_vl_moe"),
    ({"model_type": "llama", "text_config": None, **SIZES}, "llama", "llama"),
    ({"model_type": "internvl_chat", "llm_config": {"model_type": "qwen3", **SIZES}}, "qwen3", "internvl_chat"),
    ({"model_type": "deepseek_vl_v2", "language_config": {"model_type": "deepseek_v2", **SIZES}}, "deepseek_v2",
     "deepseek_vl_v2"),
    ({"model_type": "qwen3_omni_moe", "thinker_config": {"model_type": "t", "text_config": {"model_type": "qwen3_moe", **SIZES}}},
     "qwen3_moe", "qwen3_omni_moe"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "inner", "outer"), WRAPPERS, ids=[f"{o}-{i}" for _, i, o in WRAPPERS])
def test_sizes_and_both_types_of_every_wrapper(tmp_path: Path, config: dict[str, Any], inner: str, outer: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], **config}))
    facts = target_facts(tmp_path)
    assert (facts.model_type, facts.outer_model_type) == (inner, outer)
    assert (facts.hidden_size, facts.num_layers, facts.vocab_size) == (7168, 61, 163840)
    assert text_config(config)["hidden_size"] == 7168
