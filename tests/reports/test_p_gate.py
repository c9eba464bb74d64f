"""P01–P05: the model-type list and the interface are two questions, both always answered, both before training too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from asked import ask, ask_verdict, engine
from mutant_case import Case

from draftsmith.check.before import before_training, require_servable
from draftsmith.engine.releases import answers
from draftsmith.errors import Exit, UserError


def kimi(case: Case) -> None:
    """kimi_k25 wrapping kimi_k2, at the tiny pair's sizes."""
    text = case.pair.target_config | {"model_type": "kimi_k2"}
    case.pair.target_config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {"hidden_size": 64},
        "media_placeholder_token_id": 7,
    }


def test_p01_kimi_is_refused_by_list_and_by_interface(tmp_path: Path) -> None:
    """vllm#31254: one reason alone would send people to patch the list and meet the second 25 minutes later."""
    verdict = ask_verdict(tmp_path, kimi, "old")
    rows = {r.id: r for r in verdict.checks}
    assert verdict.verdict == "no"
    assert rows["gate.list"].status == rows["gate.interface"].status == "fail"
    listed = rows["gate.list"].found
    assert "kimi_k2" in listed and "kimi_k25" in listed and "minicpm" in listed
    assert any(e.file == "vllm/config/speculative.py" for e in rows["gate.list"].evidence)


def test_p02_the_list_takes_qwen3_moe_but_the_class_does_not(tmp_path: Path) -> None:
    """vllm#25134: `qwen3_moe` contains "qwen"."""

    def change(case: Case) -> None:
        case.pair.target_config |= {"architectures": ["Gemma3ForCausalLM"], "model_type": "qwen3_moe"}

    rows = ask(tmp_path, change, "old")
    assert rows["gate.list"].status == "pass" and rows["gate.interface"].status == "fail"


def test_p03_the_release_that_first_takes_qwen3_next_is_named() -> None:
    """vllm#33329: "qwen" is on every list since 0.10.1, the class has the interface since 0.24."""
    found = {a.version: a for a in answers({"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"})}
    takers = [version for version, a in found.items() if a.takes]
    assert takers[0].startswith("0.24.")
    old = found["0.19.1"]
    assert old.listed and old.interface is False and old.takes is False


def test_p04_support_is_never_inferred_from_the_list(tmp_path: Path) -> None:
    """The other way round: a class with the interface whose type is not listed."""

    def change(case: Case) -> None:
        case.pair.target_config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}

    rows = ask(tmp_path, change, "old")
    assert rows["gate.list"].status == "fail" and rows["gate.interface"].status == "pass"


@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "Glm4MoeForCausalLM"])
def test_p05_a_target_without_interface_is_refused_before_training(tmp_path: Path, name: str) -> None:
    """vLLM passes config creation for these and fails after loading; a week of training would be wasted."""
    config = {
        "architectures": [name], "model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26,
        "num_attention_heads": 4, "vocab_size": 262144,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    verdict = before_training(tmp_path, engine("modern-v1"))
    assert verdict.verdict == "no"
    with pytest.raises(UserError) as caught:
        require_servable(tmp_path, engine("modern-v1"))
    assert caught.value.code == Exit.NO and name in caught.value.what
