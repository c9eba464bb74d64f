"""The ladder on a made-up engine: each rung is proposed where it is the least that suffices, and does what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from remedy_engine import H, V, pair, write_engine
from typer.testing import CliRunner

from draftsmith.cli.main import app


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    write_engine(tmp_path / "site")
    return tmp_path


def remedy(place: Path, *words: str, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["remedy", *words, "--engine", str(place / "site"), "--platform", "cuda", "--json"])
    assert done.exit_code == code, done.output
    return dict(json.loads(done.stdout))


def test_nothing_is_needed_for_a_pair_in_order(place: Path) -> None:
    found = remedy(place, *pair(place, "LlamaForCausalLM", "llama"))
    assert found["rung"] == "nothing" and found["steps"] == []
    assert '"method": "eagle3"' in found["launch"]


def test_a_folder_name_that_misleads_needs_a_flag(place: Path) -> None:
    found = remedy(place, *pair(place, "LlamaForCausalLM", "llama", name="final"))
    assert [s["rung"] for s in found["steps"]] == ["flags"] and "method" in found["steps"][0]["title"]


def test_the_list_alone_is_the_plugins_work(place: Path) -> None:
    target, drafter = pair(place, "AbleForCausalLM", "able")
    found = remedy(place, target, drafter, "--apply")
    assert found["rung"] == "plugin"
    env = found["applied"]["env"]
    assert Path(env["PYTHONPATH"].split(":")[0], "draftsmith_vllm").is_dir()
    assert env["DRAFTSMITH_VLLM_FEATURES"] == "gate,mends"


def test_an_empty_choice_of_plugins_is_honoured(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "")
    found = remedy(place, *pair(place, "AbleForCausalLM", "able"))
    assert found["rung"] == "patch" and "no plugin is wanted" in found["steps"][-1]["why"]


def test_where_the_class_lacks_the_interface_nobody_pretends(place: Path) -> None:
    for rung in ([], ["--rung", "plugin"], ["--rung", "patch"]):
        found = remedy(
            place, *(pair(place, "UnableForCausalLM", "unable") if not rung else (str(place / "target"), str(place / "d-eagle3"))),
            *rung, code=1,
        )  # fmt: skip
        assert found["rung"] == "none"
        assert {"gate.list", "gate.interface"} <= {r["id"] for r in found["left"]}


def test_the_pair_of_the_story_is_sent_to_the_first_release_that_takes_it(place: Path) -> None:
    target, drafter = pair(place, "KimiK25ForConditionalGeneration", "kimi_k25")
    config = json.loads((place / "target/config.json").read_text())
    inner = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    wrapper = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
               "text_config": inner | {"model_type": "kimi_k2"}}  # fmt: skip
    (place / "target/config.json").write_text(json.dumps(wrapper))
    registry = place / "site/vllm/model_executor/models/registry.py"
    registry.write_text(registry.read_text().replace('"UnableForCausalLM": ', '"KimiK25ForConditionalGeneration": '))
    found = remedy(place, target, drafter)
    assert found["rung"] == "release" and found["steps"][-1]["first"] == "0.18.0"
    assert "kimi_k2" in found["steps"][-1]["why"] and "SupportsEagle3" in found["steps"][-1]["why"]


def test_the_patch_is_shown_applied_and_put_back(place: Path) -> None:
    target, drafter = pair(place, "AbleForCausalLM", "able")
    file = place / "site/vllm/config/speculative.py"
    before = file.read_bytes()
    found = remedy(place, target, drafter, "--rung", "patch")
    assert '+            "able",' in found["diff"] and file.read_bytes() == before
    remedy(place, target, drafter, "--rung", "patch", "--apply")
    assert file.read_bytes().count(b'"able",') == 1
    assert remedy(place, target, drafter)["rung"] == "nothing"
    assert remedy(place, "--revert")["reverted"] == [str(file.resolve())]
    assert file.read_bytes() == before


def test_a_config_that_misleads_becomes_a_shadow_folder(place: Path) -> None:
    target, drafter = pair(
        place, "LlamaForCausalLM", "llama", name="four", aux=4, use_cache=None, norm_before_residual="absent",
        eagle_aux_hidden_state_layer_ids=[1, 2, 4, 5], max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    found = remedy(place, target, drafter, "--apply")
    assert found["rung"] == "shadow"
    made = Path(found["applied"]["drafter"])
    assert made.name == "four-shadow-eagle3"
    config = json.loads((made / "config.json").read_text())
    assert config["num_aux_hidden_states"] == 4 and config["use_cache"] is True
    assert config["norm_before_residual"] is False and config["tie_word_embeddings"] is False
    assert config["max_position_embeddings"] == 512
    assert (made / "model.safetensors").samefile(place / "four/model.safetensors"), "linked, not copied"
    assert json.loads((place / "four/config.json").read_text())["use_cache"] is None, "the drafter itself stays"
    again = remedy(place, target, str(made))
    assert again["rung"] == "nothing"
    assert str(made) in again["launch"]


def test_ids_in_sglangs_meaning_are_moved_and_translated(place: Path) -> None:
    target, drafter = pair(
        place, "LlamaForCausalLM", "llama", name="nested", eagle_aux_hidden_state_layer_ids="absent", use_cache=None,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
    )  # fmt: skip
    made = Path(remedy(place, target, drafter, "--apply")["applied"]["drafter"])
    config = json.loads((made / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"] == {"use_aux_hidden_state": True}
    changes = json.loads((made / "shadow.json").read_text())["changes"]
    assert any("SGLang's meaning" in c["why"] for c in changes)


def test_shadow_and_plugin_together(place: Path) -> None:
    found = remedy(place, *pair(place, "AbleForCausalLM", "able", use_cache=None))
    assert [s["rung"] for s in found["steps"]] == ["shadow", "plugin"] and found["rung"] == "plugin"


def test_what_nothing_mends_is_named(place: Path) -> None:
    found = remedy(place, *pair(place, "LlamaForCausalLM", "llama", vocab_size=300), code=1)
    assert found["rung"] == "none" and "pair.vocab" in {r["id"] for r in found["left"]}


def test_a_folder_of_someone_else_is_not_replaced(place: Path) -> None:
    target, drafter = pair(place, "LlamaForCausalLM", "llama", use_cache=None)
    (place / "mine").mkdir()
    (place / "mine" / "thesis.txt").write_text("years of work")
    done = CliRunner().invoke(
        app, ["remedy", target, drafter, "--engine", str(place / "site"), "--apply", "--out", str(place / "mine")]
    )
    assert "was not made by draftsmith" in str(done.exception)
    assert [p.name for p in (place / "mine").iterdir()] == ["thesis.txt"]
    assert not [p for p in place.iterdir() if p.name.startswith(".mine")]


def test_applied_twice_the_shadow_is_made_anew(place: Path) -> None:
    target, drafter = pair(place, "LlamaForCausalLM", "llama", use_cache=None)
    first = remedy(place, target, drafter, "--apply")["applied"]["drafter"]
    second = remedy(place, target, drafter, "--apply")["applied"]["drafter"]
    assert first == second
    assert sorted(p.name for p in Path(first).iterdir()) == ["config.json", "model.safetensors", "shadow.json"]


def test_the_contract_decides_and_goes_along(place: Path) -> None:
    from draftsmith.contract import Contract, NormSwitches, TargetFacts

    target, drafter = pair(
        place, "LlamaForCausalLM", "llama", use_cache=None, eagle_aux_hidden_state_layer_ids="absent",
        norm_before_residual="absent",
    )  # fmt: skip
    facts = TargetFacts(name="t", config_hash="x", architecture="LlamaForCausalLM", model_type="llama",
                        outer_model_type="llama", hidden_size=H, num_layers=8, vocab_size=V)  # fmt: skip
    norms = NormSwitches(norm_before_residual=True)
    Contract(target=facts, aux_layer_ids=[1, 3, 6], norms=norms).save(Path(drafter))
    done = CliRunner().invoke(
        app, ["remedy", target, drafter, "--engine", str(place / "site"), "--platform", "cuda", "--apply", "--json"]
    )
    made = Path(json.loads(done.stdout)["applied"].get("drafter", ""))
    config = json.loads((made / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6] and config["norm_before_residual"] is True
    assert (made / "contract.json").read_bytes() == (Path(drafter) / "contract.json").read_bytes()
