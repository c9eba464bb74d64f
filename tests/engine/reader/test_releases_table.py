"""The table of known releases: whole, small, and right about what is known from public reports."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from engine_trees import LIST_LOCAL, write_vllm
from typer.testing import CliRunner

from draftsmith.engine import releases_make
from draftsmith.engine.reader import read_engine
from draftsmith.engine.releases import MEANING, answers, first_release, last_release, table

KIMI: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {"model_type": "kimi_k2", "num_hidden_layers": 61},
}


def target(architecture: str, model_type: str) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_file_is_whole_and_small(engine: str) -> None:
    assert files("draftsmith.engine").joinpath("releases.json").stat().st_size < 300_000  # type: ignore[attr-defined]
    known = table(engine)
    versions = [r.version for r in known.releases]
    assert versions == sorted(set(versions), key=releases_make.release_key)
    assert len(versions) >= (30 if engine == "vllm" else 8)
    assert len(known.architectures) > 100
    for architecture, letters in known.architectures.items():
        assert len(letters) == len(versions), architecture
        assert set(letters) <= set(MEANING), architecture


def test_the_story_kimi_k25() -> None:
    assert first_release(KIMI) == "0.18.0"
    by_version = {a.version: a for a in answers(KIMI)}
    assert (by_version["0.16.0"].listed, by_version["0.16.0"].interface, by_version["0.16.0"].takes) == (
        False,
        False,
        False,
    )
    assert by_version["0.14.1"].takes is not True
    assert last_release(KIMI) == table().releases[-1].version


def test_a_model_type_that_becomes_an_mtp_heads_is_taken_by_no_release() -> None:
    """An MLA drafter must say deepseek_v2: deepseek_v3 is turned into DeepSeekMTPModel in every release."""
    drafter = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
    assert first_release(KIMI, drafter=drafter) == "0.18.0"
    renamed = drafter | {"model_type": "deepseek_v3"}
    assert first_release(KIMI, drafter=renamed) is None
    last = answers(KIMI, renamed)[-1]
    assert last.drafter is False and "turns a drafter of model type deepseek_v3 into an MTP head's" in last.notes


@pytest.mark.parametrize(
    ("architecture", "model_type", "first"),
    [
        ("LlamaForCausalLM", "llama", "0.8.5.post2"),
        ("Qwen3ForCausalLM", "qwen3", "0.10.1.1"),
        ("Qwen3MoeForCausalLM", "qwen3_moe", "0.11.1"),  # vllm#25134, #26485
        ("MiniMaxM2ForCausalLM", "minimax_m2", "0.20.0"),
        ("MistralForCausalLM", "mistral", "0.22.0"),  # the list was in the way (vllm#42536)
        ("Qwen3NextForCausalLM", "qwen3_next", "0.24.0"),  # vllm#33329
        ("Glm4MoeForCausalLM", "glm4_moe", None),
        ("MixtralForCausalLM", "mixtral", None),
        ("Exaone4_5_ForConditionalGeneration", "exaone4_5", None),  # a wrapper around a model that collects nothing
    ],
)
def test_first_releases(architecture: str, model_type: str, first: str | None) -> None:
    assert first_release(target(architecture, model_type)) == first


@pytest.mark.parametrize(
    ("drafter", "first"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "0.8.5.post2"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "0.10.2"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"norm_before_fc": True}}, "0.18.0"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True, "norm_output": True}, "0.22.0"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "0.18.0"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "0.10.1.1"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "fc_norm": True}, "0.25.0"),
        ({"architectures": ["MiniCPMForCausalLMEagle3"]}, None),
        ({}, None),
    ],
)
def test_first_releases_of_a_pair(drafter: dict[str, Any], first: str | None) -> None:
    assert first_release(target("LlamaForCausalLM", "llama"), drafter=drafter) == first


def test_unregistered_targets_are_perhaps_taken_through_transformers() -> None:
    found = answers(target("BrandNewForCausalLM", "llama_brand_new"))
    assert found[0].takes is False
    assert found[-1].takes is None
    assert "Transformers backend" in found[-1].notes[0]
    assert first_release(target("BrandNewForCausalLM", "llama_brand_new")) is None


def test_sglang_has_its_own_table() -> None:
    by_version = {a.version: a for a in answers(KIMI, {"architectures": ["LlamaForCausalLM"]}, "sglang")}
    assert by_version["0.5.3.post3"].interface is False
    newest = table("sglang").releases[-1].version
    assert (by_version[newest].interface, by_version[newest].drafter) == (True, False)  # no prefix is added there
    assert table("sglang").releases[-1].ids_v1 == ("eagle_config.eagle_aux_hidden_state_layer_ids",)


def test_the_generator_keeps_orders_and_replaces(tmp_path: Path) -> None:
    old = write_vllm(tmp_path / "old", LIST_LOCAL, version="0.9.2")
    new = write_vllm(tmp_path / "new", version="0.10.0")
    made = releases_make.make([str(new)], {})
    made = releases_make.make([str(old), str(new)], made)
    assert [r["version"] for r in made["vllm"]["releases"]] == ["0.9.2", "0.10.0"]
    assert [r["model_types"] for r in made["vllm"]["releases"]] == [["llama", "qwen"], None]
    letters = made["vllm"]["architectures"]
    assert (letters["LlamaForCausalLM"], letters["PlainForCausalLM"], letters["LostForCausalLM"]) == ("yy", "nn", "??")
    assert letters["TransformersForCausalLM"] == "tt"
    assert "LlamaForCausalLMEagle3" not in letters
    assert json.loads(releases_make.render(made)) == made
    assert releases_make.describe(read_engine(new))["ids_v2"] == [
        "dflash_config.layer_ids",
        "eagle_aux_hidden_state_layer_ids",
        "eagle_config.layer_ids",
    ]


def test_the_command(tmp_path: Path) -> None:
    from draftsmith.cli.main import app

    (tmp_path / "config.json").write_text(json.dumps(KIMI))
    done = CliRunner().invoke(app, ["releases", str(tmp_path), "--json"])
    assert done.exit_code == 0
    value = json.loads(done.stdout)
    assert (value["first"], value["last"]) == ("0.18.0", table().releases[-1].version)
    assert {"version": "0.16.0", "takes": False}.items() <= next(
        r for r in value["releases"] if r["version"] == "0.16.0"
    ).items()
    (tmp_path / "config.json").write_text(json.dumps(target("MixtralForCausalLM", "mixtral")))
    done = CliRunner().invoke(app, ["releases", str(tmp_path)])
    assert done.exit_code == 1
    assert "no known release of vLLM surely takes it" in done.stdout
