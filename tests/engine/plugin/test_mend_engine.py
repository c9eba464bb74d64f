"""The mend in a real vLLM: sampled text with speculation is garbage where the source has the fault, and sane with it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.engine.faults import FAULTS
from draftsmith.engine.inject import plugin_env
from draftsmith.engine.plugin_src.draftsmith_vllm.faults import find_in_site

pytestmark = pytest.mark.engine
V = 128


def write_counting_model(folder: Path) -> Path:
    """A Llama that counts: its layers add nothing, and lm_head gives the successor of a token a logit of 12.4, every
    other token 0; at temperature 0.8 a wrong successor has a chance of 3e-5 a token, at an unknown one any chance."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": V,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": V - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.embed_tokens.weight": torch.eye(V),
        "model.norm.weight": torch.ones(V),
        "lm_head.weight": torch.roll(torch.eye(V), 1, 0) * 1.1,
    }
    for n in range(2):
        p = f"model.layers.{n}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{p}{name}.weight"] = torch.ones(V)
        for name, shape in (("q", (128, V)), ("k", (64, V)), ("v", (64, V)), ("o", (V, 128))):
            tensors[f"{p}self_attn.{name}_proj.weight"] = torch.zeros(shape)
        for name, shape in (("gate", (64, V)), ("up", (64, V)), ("down", (V, 64))):
            tensors[f"{p}mlp.{name}_proj.weight"] = torch.zeros(shape)
    save_file({k: t.to(torch.bfloat16).contiguous() for k, t in tensors.items()}, folder / "model.safetensors")
    return folder


def probe(engine: Any, script: str, added: dict[str, str], log: Path, *args: str) -> dict[str, Any] | None:
    """What a probe printed under the engine's python; None where it died."""
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"} | added
    command = [str(engine.python), str(Path(__file__).with_name(script)), *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    log.write_text(done.stdout + done.stderr)
    line = next((row for row in done.stdout.splitlines() if row.startswith("RESULT ")), None)
    if done.returncode != 0 or line is None:
        return None
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def added_env(engine: Any, mended: bool) -> tuple[set[str], dict[str, str]]:
    """(faults that the source of this CPU build proves, environment with or without the plugin's mends)."""
    if engine.platform != "cpu":
        pytest.skip("the fault is one of the CPU build")
    site = engine.package.parent
    proved = {f.fault.id for f in find_in_site(site, tuple(f for f in FAULTS if f.platform == "cpu"))}
    return proved, plugin_env(site, ["mends"]) if mended else {"VLLM_PLUGINS": ""}


def wrong_successors(engine: Any, model: Path, added: dict[str, str], log: Path) -> int:
    found = probe(engine, "sampling_probe.py", added, log, str(model))
    assert found is not None, log.read_text()[-3000:]
    texts = found["tokens"]
    assert [len(t) for t in texts] == [64] * 4
    return sum(two != (one + 1) % V for text in texts for one, two in zip([13, *text], text, strict=False))


@pytest.mark.parametrize("mended", [False, True])
def test_counting_goes_wrong_without_the_mend_only(real_engine: Any, tmp_path: Path, mended: bool) -> None:
    proved, added = added_env(real_engine, mended)
    model = write_counting_model(tmp_path / "counting")
    log = tmp_path / "log"
    wrong = wrong_successors(real_engine, model, added, log)
    said = "mended cpu-expand-lost" in log.read_text()
    if "cpu-expand-lost" in proved and not mended:
        assert wrong >= 10 and not said
    else:
        assert wrong == 0
        assert said == (mended and "cpu-expand-lost" in proved)


@pytest.mark.parametrize("mended", [False, True])
def test_a_seed_with_a_prompt_in_parts_kills_the_worker_without_the_mend_only(
    real_engine: Any, tmp_path: Path, mended: bool
) -> None:
    proved, added = added_env(real_engine, mended)
    log = tmp_path / "log"
    found = probe(real_engine, "seed_probe.py", added, log, str(write_counting_model(tmp_path / "counting")))
    if "cpu-seed-in-parts" in proved and not mended:
        assert found is None and "set_offset" in log.read_text()
    else:
        assert found is not None, log.read_text()[-3000:]
        assert found["parts"] == found["whole"] and len(set(found["whole"])) > 3


@pytest.mark.parametrize("mended", [False, True])
def test_latent_attention_is_rotated_wrongly_without_the_mend_only(
    real_engine: Any, tmp_path: Path, mended: bool
) -> None:
    proved, added = added_env(real_engine, mended)
    log = tmp_path / "log"
    found = probe(real_engine, "rope_probe.py", added, log)
    assert found is not None, log.read_text()[-3000:]
    assert found["flat"] < 1e-5
    assert (found["latent"] > 0.1) is ("cpu-latent-rope" in proved and not mended)


@pytest.mark.parametrize("mended", [False, True])
def test_numba_kills_a_starting_worker_without_the_mend_only(real_engine: Any, tmp_path: Path, mended: bool) -> None:
    proved, added = added_env(real_engine, mended)
    log = tmp_path / "log"
    found = probe(real_engine, "numba_probe.py", added, log)
    if "cpu-numba-at-start" in proved and not mended:
        assert found is None and "_lib_fn_wrapper" in log.read_text()
    else:
        assert found == {"registered": True}, log.read_text()[-3000:]
