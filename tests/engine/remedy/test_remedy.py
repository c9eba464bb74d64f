"""The ladder on a made-up engine: each rung is proposed where it is the least that suffices, and does what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from draftsmith.cli.main import app

H, V, D = 64, 320, 128
ENGINE = {
    "vllm/__init__.py": "",
    "vllm/engine/__init__.py": "",
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/models/__init__.py": "",
    "vllm/model_executor/models/interfaces.py": """
from typing import ClassVar, Literal, Protocol, runtime_checkable


@runtime_checkable
class SupportsEagle3(Protocol):
    supports_eagle3: ClassVar[Literal[True]] = True

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None: ...


def supports_eagle3(model):
    return isinstance(model, SupportsEagle3)
""",
    "vllm/model_executor/models/able.py": """
from .interfaces import SupportsEagle3


class AbleForCausalLM(SupportsEagle3):
    def set_aux_hidden_state_layers(self, layers):
        self.model.aux_hidden_state_layers = layers
""",
    "vllm/model_executor/models/unable.py": "class UnableForCausalLM:\n    pass\n",
    "vllm/model_executor/models/registry.py": """
_TEXT_GENERATION_MODELS = {
    "AbleForCausalLM": ("able", "AbleForCausalLM"),
    "LlamaForCausalLM": ("able", "AbleForCausalLM"),
    "UnableForCausalLM": ("unable", "UnableForCausalLM"),
}
_SPECULATIVE_DECODING_MODELS = {
    "LlamaForCausalLMEagle3": ("llama_eagle3", "Eagle3LlamaForCausalLM"),
}
_VLLM_MODELS = {**_TEXT_GENERATION_MODELS, **_SPECULATIVE_DECODING_MODELS}
""",
    "vllm/model_executor/models/llama_eagle3.py": """
class Eagle3LlamaForCausalLM:
    def __init__(self, config):
        self.fc_input = config.target_hidden_size * getattr(config, "num_aux_hidden_states", 3)
        self.norm = getattr(config, "norm_before_residual", False)
        self.draft_vocab_size = config.draft_vocab_size
""",
    "vllm/config/__init__.py": "",
    "vllm/config/speculative.py": """
class SpeculativeConfig:
    def _verify_args(self):
        eagle3_target_supported = [
            "llama",
            "qwen",
            "minicpm",
        ]
        if self.method == "eagle3" and self.target_model_config and not any(
            supported_model in self.target_model_config.hf_text_config.model_type
            for supported_model in eagle3_target_supported
        ):
            raise ValueError(
                f"Eagle3 is only supported for {eagle3_target_supported} models. "
                f"Got {self.target_model_config.hf_text_config.model_type=}"
            )
        return self
""",
    "vllm/v1/worker/gpu_model_runner.py": """
class GPUModelRunner:
    def load_model(self):
        if not supports_eagle3(self.get_model()):
            raise RuntimeError("Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested")

    def _get_eagle3_aux_layers_from_config(self):
        hf_config = self.speculative_config.draft_model_config.hf_config
        layer_ids = getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None)
        return tuple(layer_ids) if layer_ids else None
""",
}


def write_engine(site: Path, version: str = "0.16.0") -> Path:
    for name, text in ENGINE.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text.lstrip("\n"))
    (site / "vllm" / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    return site


def write_target(folder: Path, architecture: str, model_type: str) -> Path:
    folder.mkdir(parents=True)
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": H,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": V,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_drafter(folder: Path, aux: int = 3, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    shapes = {
        "fc.weight": (H, aux * H),
        "layers.0.self_attn.q_proj.weight": (64, 2 * H),
        "layers.0.self_attn.k_proj.weight": (64, 2 * H),
        "layers.0.self_attn.v_proj.weight": (64, 2 * H),
        "layers.0.self_attn.o_proj.weight": (H, 64),
        "layers.0.mlp.gate_proj.weight": (128, H),
        "layers.0.mlp.up_proj.weight": (128, H),
        "layers.0.mlp.down_proj.weight": (H, 128),
        "lm_head.weight": (D, H),
    }
    tensors = {name: rng.normal(0, 0.02, shape).astype(np.float16) for name, shape in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"layers.0.{name}.weight"] = rng.normal(1, 0.1, H).astype(np.float16)
    tensors["norm.weight"] = rng.normal(1, 0.1, H).astype(np.float16)
    tensors["d2t"] = np.zeros(D, np.int64)
    tensors["t2d"] = np.arange(V) < D
    save_file(tensors, folder / "model.safetensors")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": V,
        "draft_vocab_size": D,
        "target_hidden_size": H,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    } | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
    return folder


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


def pair(place: Path, architecture: str, model_type: str, name: str = "d-eagle3", **changes: Any) -> tuple[str, str]:
    target = write_target(place / "target", architecture, model_type)
    return str(target), str(write_drafter(place / name, **changes))


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
