"""What hf_config_override makes of a drafter's config, in the shapes that releases have written it."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

import pytest

from draftsmith.engine.reader import read_engine
from draftsmith.engine.reader.override import Override, override_of

CHAIN = """
    if hf_config.model_type in ("deepseek_v3", "glm_moe_dsa"):
        hf_config.model_type = "deepseek_mtp"
    if hf_config.model_type == "deepseek_mtp":
        hf_config.update({"n_predict": 1, "architectures": ["DeepSeekMTPModel"]})
"""
IN_TEXT = """
    if hf_config.model_type in ("pangu_ultra_moe"):
        hf_config.model_type = "pangu_ultra_moe_mtp"
    if "exaone4_5" in hf_config.model_type:
        hf_config.update({"architectures": ["Exaone4_5_MTP"]})
"""
BOUND = """
    if (arch := hf_config.architectures[0]) in ("MiMoV2ForCausalLM", "MiMoV2OmniForCausalLM"):
        maps = {"MiMoV2ForCausalLM": "MiMoV2MTPModel", "MiMoV2OmniForCausalLM": "MiMoV2OmniMTPModel"}
        hf_config.model_type = "mimo_v2_mtp"
        hf_config.update({"architectures": [maps[arch]]})
"""
BY_NAME = """
    if hf_config.model_type in {"qwen3_5", "qwen3_5_moe"}:
        is_moe = hf_config.model_type == "qwen3_5_moe"
        overrides = {"n_predict": 1}
        overrides["architectures"] = ["Qwen3_5MoeMTP" if is_moe else "Qwen3_5MTP"]
        hf_config.update(overrides)
"""
FIRST = """
    initial_architecture = hf_config.architectures[0]
    if initial_architecture == "BailingForCausalLM":
        hf_config.model_type = "bailing_v3_mtp"
    elif hf_config.model_type == "bailing_hybrid" or "BailingV2" in architectures:
        hf_config.model_type = "bailing_mtp"
    if initial_architecture == "MistralLarge3ForCausalLM":
        hf_config.update({"architectures": ["EagleMistralLarge3ForCausalLM"]})
"""
UNDECIDED = """
    if hf_config.model_type == "nemotron_h" and hf_config.num_nextn_predict_layers > 0:
        hf_config.model_type = "nemotron_h_mtp"
    if read_environment("FORCE_MTP"):
        hf_config.architectures = ["MTP"]
"""


def ask(root: Path, body: str, model_type: str, architecture: str, file: str, **more: object) -> Override | None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    for package in ("vllm", "vllm/engine"):
        (root / package).mkdir(exist_ok=True)
        (root / package / "__init__.py").touch()
    (root / "vllm/version.py").write_text('__version__ = "0.20.0"\n')
    function = "class SpeculativeConfig:\n    @staticmethod\n    def hf_config_override(hf_config):\n"
    path.write_text(function + indent(dedent(body), "        ") + "        return hf_config\n\n\nother = 1\n")
    return override_of(read_engine(root), {"model_type": model_type, "architectures": [architecture], **more})


@pytest.mark.parametrize(("body", "model_type", "architecture", "after"), [
    (CHAIN, "deepseek_v3", "Eagle3DeepseekV2ForCausalLM", ("deepseek_mtp", "DeepSeekMTPModel")),
    (CHAIN, "deepseek_v2", "Eagle3DeepseekV2ForCausalLM", None),
    (CHAIN, "llama", "LlamaForCausalLMEagle3", None),
    (IN_TEXT, "pangu", "X", ("pangu_ultra_moe_mtp", "X")),
    (IN_TEXT, "my_exaone4_5", "X", ("my_exaone4_5", "Exaone4_5_MTP")),
    (BOUND, "mimo", "MiMoV2OmniForCausalLM", ("mimo_v2_mtp", "MiMoV2OmniMTPModel")),
    (BY_NAME, "qwen3_5_moe", "LlamaForCausalLMEagle3", ("qwen3_5_moe", "Qwen3_5MoeMTP")),
    (BY_NAME, "qwen3_5", "LlamaForCausalLMEagle3", ("qwen3_5", "Qwen3_5MTP")),
    (FIRST, "bailing_hybrid", "BailingForCausalLM", ("bailing_v3_mtp", "BailingForCausalLM")),
    (FIRST, "llama", "MistralLarge3ForCausalLM", ("llama", "EagleMistralLarge3ForCausalLM")),
    (UNDECIDED, "nemotron_h", "X", None),
])  # fmt: skip
def test_shapes(tmp_path: Path, body: str, model_type: str, architecture: str, after: tuple[str, str] | None) -> None:
    made = ask(tmp_path, body, model_type, architecture, "vllm/config/speculative.py")
    assert (made and (made.model_type, made.architecture)) == after
    if made is not None:
        assert made.where and all(e.file == "vllm/config/speculative.py" for e in made.where)
        assert "model_type" in made.where[0].text or "architecture" in made.where[0].text


@pytest.mark.parametrize("file", ["vllm/config.py", "vllm/config/__init__.py", "vllm/config/speculative.py"])
def test_it_is_found_where_releases_have_it(tmp_path: Path, file: str) -> None:
    made = ask(tmp_path, CHAIN, "glm_moe_dsa", "E", file)
    assert made is not None and made.architecture == "DeepSeekMTPModel"
    assert made.where[0].line == 5 and made.where[0].file == file


def test_a_written_key_decides_what_an_absent_one_leaves_open(tmp_path: Path) -> None:
    made = ask(tmp_path, UNDECIDED, "nemotron_h", "X", "vllm/config/speculative.py", num_nextn_predict_layers=2)
    assert made is not None and made.model_type == "nemotron_h_mtp"


@pytest.mark.parametrize("config", [{}, {"model_type": 3}, {"model_type": "deepseek_v3"},
                                    {"model_type": "deepseek_v3", "architectures": []},
                                    {"model_type": "deepseek_v3", "architectures": [None]}])  # fmt: skip
def test_configs_that_name_nothing(tmp_path: Path, config: dict[str, object]) -> None:
    ask(tmp_path, CHAIN, "llama", "X", "vllm/config/speculative.py")
    assert override_of(read_engine(tmp_path), config) is None
