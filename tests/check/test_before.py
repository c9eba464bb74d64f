"""Before a row is captured: installed or known releases, form, layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from asked import engine
from public_forms import KIMI, QWEN_8B

from draftsmith.check.before import before_training, require_servable
from draftsmith.errors import Exit, UserError


@pytest.fixture
def no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DRAFTSMITH_ENGINE", raising=False)


def write(root: Path, config: dict[str, Any]) -> Path:
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text(json.dumps(config))
    return root


def test_latent_attention_on_the_cpu_leaves_the_mla_form_only(tmp_path: Path) -> None:
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
        "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for kind, says in (("modern-v1", "MLA form (Eagle3DeepseekV2ForCausalLM) only"), ("modern-v2", "or MLA form")):
        row = next(r for r in before_training(tmp_path, engine(kind)).checks if r.id == "form.choice")
        assert row.status == "pass" and says in row.found
        assert bool(row.evidence) is (kind == "modern-v1")


def test_an_mla_target_is_offered_both_forms(tmp_path: Path) -> None:
    verdict = before_training(write(tmp_path, KIMI), engine("modern-v1"))
    rows = {r.id: r for r in verdict.checks}
    assert verdict.verdict == "yes"
    assert "MLA form (Eagle3DeepseekV2ForCausalLM)" in rows["form.choice"].found
    assert "30 = stream entering layer 30 = output of layer 29" in rows["runner.default_ids"].found


def test_the_old_release_says_no_with_both_reasons(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        require_servable(write(tmp_path, KIMI), engine("old"))
    assert caught.value.code == Exit.NO
    assert "kimi_k2" in caught.value.what and "KimiK25ForConditionalGeneration" in caught.value.what


def test_without_an_engine_the_known_releases_answer(tmp_path: Path, no_engine: None) -> None:
    verdict = before_training(write(tmp_path / "t", QWEN_8B))
    assert verdict.verdict == "yes" and verdict.engine.name is None
    assert "known releases that take Qwen3ForCausalLM" in verdict.checks[0].found
    bad = QWEN_8B | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    with pytest.raises(UserError) as caught:
        require_servable(write(tmp_path / "g", bad))
    assert caught.value.code == Exit.NO and "Gemma3ForCausalLM" in caught.value.what


def test_a_shallow_target_is_warned_of(tmp_path: Path) -> None:
    verdict = before_training(write(tmp_path, QWEN_8B | {"num_hidden_layers": 6}), engine("modern-v1"))
    row = next(r for r in verdict.checks if r.id == "runner.default_ids")
    assert row.status == "warn" and "extract.aux_layers" in row.fix and verdict.verdict == "yes"


def test_a_config_without_sizes_is_refused(tmp_path: Path) -> None:
    verdict = before_training(
        write(tmp_path, {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}), engine("old")
    )
    assert next(r.status for r in verdict.checks if r.id == "pair.mappable") == "fail"
