"""Tiny random targets, made once per session."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch


def build(folder: Path, kind: str = "llama") -> Path:
    """A random model of 6 layers, hidden 32, vocab 96. `kind`: llama, qwen3, gemma3 (a norm of 1 + weight),
    deepseek_v3 (latent attention)."""
    import transformers as tf

    common = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the least that vLLM's CPU attention knows
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if kind == "deepseek_v3":  # latent attention, of the width (512 + 64) that vLLM's kernels know; one dense layer
        common |= {"num_key_value_heads": 4, "head_dim": 64, "q_lora_rank": 16, "kv_lora_rank": 512, "v_head_dim": 32}
        common |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "first_k_dense_replace": 1}
        common |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        # transformers has no use for the last two; vLLM routes by them, as the published configs say
        common |= {"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    cfg, cls = {
        "deepseek_v3": (tf.DeepseekV3Config, tf.DeepseekV3ForCausalLM),
        "llama": (tf.LlamaConfig, tf.LlamaForCausalLM),
        "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM),
        "gemma3": (tf.Gemma3TextConfig, tf.Gemma3ForCausalLM),
    }[kind]
    torch.manual_seed(0)
    model = cls(cfg(**common, tie_word_embeddings=False))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.3)
            else:
                p.uniform_(0.5, 2.0)  # norms that a second application would show
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def build_target() -> Callable[..., Path]:
    """build(folder, kind) → folder."""
    return build


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny-llama"))
