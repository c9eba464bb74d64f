"""Any wrapper's text config, the sizes, the hash, and what is said when config.json is missing or broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.recipe import TargetSection
from draftsmith.target.config import (
    check_aux_layers,
    config_hash,
    default_aux_layers,
    facts_of,
    load_config,
    target_facts,
    text_config,
)
from draftsmith.target.resolve import resolve_target

TEXT = {"model_type": "kimi_k2", "hidden_size": 64, "num_hidden_layers": 8, "vocab_size": 512}


@pytest.mark.parametrize(
    "cfg",
    [
        TEXT,
        {"model_type": "kimi_k25", "text_config": TEXT},
        {"model_type": "internvl", "llm_config": TEXT, "vision_config": {"hidden_size": 9}},
        {"model_type": "deepseek_vl_v2", "language_config": TEXT},
        {"model_type": "qwen3_omni", "thinker_config": {"text_config": TEXT, "audio_config": {}}},
        {"model_type": "nested", "text_config": {"text_config": TEXT}},
        {**TEXT, "text_config": None},
    ],
)
def test_text_config_of_any_wrapper(cfg: dict[str, Any]) -> None:
    found = text_config(cfg)
    assert (found["model_type"], found["hidden_size"]) == ("kimi_k2", 64)


def test_facts_hold_both_model_types() -> None:
    facts = facts_of(
        {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": TEXT}, "k"
    )
    assert (facts.model_type, facts.outer_model_type) == ("kimi_k2", "kimi_k25")
    assert (facts.hidden_size, facts.num_layers, facts.vocab_size) == (64, 8, 512)


def test_sizes_left_to_the_class_defaults_are_found() -> None:
    inner = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    facts = facts_of(
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": inner}, "g"
    )
    assert facts.vocab_size == 262208


def test_hash_is_deaf_to_who_saved_it_and_hears_a_changed_size() -> None:
    a = {**TEXT, "torch_dtype": "bfloat16", "_name_or_path": "/a", "transformers_version": "4.55"}
    b = {**TEXT, "dtype": "bfloat16", "transformers_version": "5.2"}
    assert config_hash(a) == config_hash(b)
    assert config_hash(a) != config_hash({**b, "hidden_size": 65})


def test_default_aux_layers_and_their_collapse() -> None:
    assert default_aux_layers(30) == [2, 15, 27]
    assert default_aux_layers(7) == [2, 3, 4]
    for n in (3, 4, 5, 6):
        with pytest.raises(UserError, match=f"target has {n} layers"):
            default_aux_layers(n)


@pytest.mark.parametrize("ids", [[2, 4, 9], [4, 2], [2, 2, 3], [], [-1, 2]])
def test_aux_layers_out_of_range_or_order_are_refused(ids: list[int]) -> None:
    with pytest.raises(UserError):
        check_aux_layers(ids, 8)
    assert check_aux_layers([0, 4, 8], 8) == [0, 4, 8]


def test_missing_and_broken_configs_are_one_block(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is missing"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UserError, match="holds a list"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "architectures": ["X"]}))
    with pytest.raises(UserError, match="hidden_size, n_embd"):
        target_facts(tmp_path)


def test_a_target_that_is_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(UserError, match="neither a folder nor a hub id"):
        resolve_target(TargetSection(model=str(tmp_path / "none")))
    with pytest.raises(UserError, match="model hub does not answer"):
        resolve_target(TargetSection(model="owner/no-such-model"))
    (tmp_path / "f").mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve_target(TargetSection(model=str(tmp_path / "f")))
