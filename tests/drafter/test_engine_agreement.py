"""Our drafter against vLLM's own drafter class, same weights, all draft steps: agrees as architecture.md defines it."""

import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.bench.parity import ENGINE_SIDE
from draftsmith.dialects import vllm
from draftsmith.dialects.checkpoint import Checkpoint
from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.model import Drafter, Steps
from draftsmith.engine.find import find_engine

K, T, V, D = 4, 11, 320, 96
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
CASES = {
    "plain": {},
    "wide_heads_bias": {"head_dim": 64, "num_key_value_heads": 1, "attention_bias": True},
    "norms_before": {"norms": {"norm_before_residual": True, "norm_before_fc": True}, "rope": LLAMA3},
    "norms_3_1": {"norms": {"fc_norm": True, "norm_output": True}, "rope": YARN},
    "linear_own_width": {
        "rope": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        "hidden_size": 96,
        "own_embedding": True,
        "num_aux_layers": 4,
        "aux_layer_ids": [1, 3, 5, 7],
    },
    "mla": {"form": "mla", "mla": MLA},
    "mla_yarn": {
        "form": "mla",
        "mla": MLA | {"q_lora_rank": 16, "v_head_dim": 12},
        "rope": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "norms": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    },
}


def drafter(case):
    config = DrafterConfig.model_validate(
        {
            "hidden_size": 64,
            "target_hidden_size": 64,
            "aux_layer_ids": [2, 4, 5],
            "vocab_size": V,
            "draft_vocab_size": D,
            "num_attention_heads": 4,
            "num_key_value_heads": 4 if case.get("form") == "mla" else 2,
            "head_dim": 32,
            "intermediate_size": 96,
            "max_position_embeddings": 256,
        }
        | case
    )
    torch.manual_seed(3)
    model = Drafter(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.rand_like(p) + 0.5 if "norm" in name else torch.randn_like(p) * p.shape[-1] ** -0.5)
    chosen = torch.randperm(V)[:D].sort().values
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[chosen] = True
    model.set_vocab(chosen - torch.arange(D), t2d)
    return model


def ours(model, given):
    steps, out = Steps(spans=((0, T),)), {}
    with torch.no_grad():
        state = out["fused"] = model.fuse(given["aux"])
        for s in range(K):
            normed, state = model.step(state, given["embeddings"][s], given["position"] + s, steps)
            out[f"normed.{s}"], out[f"state.{s}"], out[f"logits.{s}"] = normed, state, model.lm_head(normed)
    return out


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def both_sides(tiny_target, tmp_path_factory):
    """case → (our tensors, the engine's), from one process of the engine's interpreter."""
    folder, mine = tmp_path_factory.mktemp("agreement"), {}
    for name, case in CASES.items():
        model = drafter(case)
        place = folder / name
        vllm.write(Checkpoint(model.config, dict(model.state_dict())), place / "drafter-eagle3", dtype="float32")
        c = model.config
        given = {
            "aux": torch.randn(T, c.num_aux_layers * c.target_hidden_size),
            "embeddings": torch.randn(K, T, c.hidden_size),
            "position": torch.arange(T) + 90,
        }
        save_file(given, place / "in.safetensors")
        mine[name] = ours(model, given)
    command = [str(find_engine().python), str(ENGINE_SIDE), str(tiny_target), *(str(folder / n) for n in CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {n: (mine[n], load_file(folder / n / "out.safetensors"), done.stdout) for n in CASES}


@pytest.mark.engine
@pytest.mark.ci
@pytest.mark.parametrize("name", CASES)
def test_every_step_agrees_with_the_engines_class(name, both_sides):
    mine, theirs, said = both_sides[name]
    expected = "Eagle3DeepseekV2ForCausalLM" if name.startswith("mla") else "Eagle3LlamaForCausalLM"
    assert f"{name} {expected}" in said.splitlines()
    assert set(theirs) == set(mine)
    worst = {key: relative(mine[key], value) for key, value in theirs.items()}
    assert max(worst.values()) <= 1e-4, worst
    for s in range(K):
        assert torch.equal(mine[f"logits.{s}"].argmax(-1), theirs[f"logits.{s}"].argmax(-1))
