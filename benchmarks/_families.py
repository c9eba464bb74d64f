"""Tiny random targets of many families, with learnable answers, as whole model folders.

A random transformer's greedy answers are near noise, which no drafter could learn. Here the weights that write into the
residual stream are made small (`INFLUENCE`), so that the next token depends mostly on the last one and a little on all
others: a drafter can be overfitted to such answers, while every layer still takes part. The head's rows are of unit
length, so that no token wins by its norm. Nothing else differs from transformers' own random initialisation.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB, LAYERS, HIDDEN = 320, 8, 128
INFLUENCE = 0.5
BASE: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 256, "vocab_size": VOCAB, "max_position_embeddings": 2048,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 512,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
DEEPSEEK = MOE | {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 512, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64, "v_head_dim": 32, "head_dim": None, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "rope_parameters": YARN,
}  # fmt: skip


# The CPU's kernel of latent attention knows one size of cache: 512 + 64, the published models' (vllm: cpu_mla.py).
ROUTING = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}


@dataclass(frozen=True)
class Family:
    """name: as people say it. config: over BASE (None = key left out). wrap: the outer config of a wrapper and the prefix
    of its language model's tensors. forms: drafter forms to try. args: engine flags that the family needs. said: keys of
    the published config.json that transformers' class leaves out and the engine reads. table: whether target_table.py
    takes it; the others are for the test of the shim's states."""

    name: str
    architecture: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    forms: tuple[str, ...] = ("llama",)
    args: tuple[str, ...] = ()
    wrap: str = ""
    text_type: str = ""
    said: dict[str, Any] = field(default_factory=dict)
    table: bool = True


FAMILIES: tuple[Family, ...] = (
    Family("Llama", "LlamaForCausalLM", "llama"),
    Family("Qwen3", "Qwen3ForCausalLM", "qwen3"),
    Family("Qwen3-MoE", "Qwen3MoeForCausalLM", "qwen3_moe", MOE | {"num_experts": 4, "norm_topk_prob": True}),
    Family("DeepSeek-V3", "DeepseekV3ForCausalLM", "deepseek_v3", DEEPSEEK, ("mla", "llama"), said=ROUTING),
    Family("Kimi-K2.5", "KimiK25ForConditionalGeneration", "deepseek_v3", DEEPSEEK, ("mla", "llama"),
           ("--language-model-only",), "kimi_k25", "kimi_k2", ROUTING),
    Family("gpt-oss", "GptOssForCausalLM", "gpt_oss",
           {"hidden_size": 192, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32, "head_dim": 64,
            "intermediate_size": 192, "rope_parameters": YARN | {"truncate": False},
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}),
    Family("MiniMax-M2", "MiniMaxM2ForCausalLM", "minimax_m2",
           {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64,
            "rope_parameters": BASE["rope_parameters"] | {"partial_rotary_factor": 0.5}},
           said={"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True}),
    Family("Llama-4 (text)", "Llama4ForCausalLM", "llama4_text",
           {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 64, "intermediate_size_mlp": 256,
            "interleave_moe_layer_step": 1, "attn_temperature_tuning": False, "attention_chunk_size": 1024}),
    Family("Qwen3-VL-MoE (text)", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe",
           MOE | {"num_experts": 4, "norm_topk_prob": True,
                  "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [12, 10, 10],
                                      "mrope_interleaved": True}},
           args=("--language-model-only",), wrap="qwen3_vl_moe"),
    Family("Gemma-3", "Gemma3ForCausalLM", "gemma3_text", {"tie_word_embeddings": True, "rope_parameters": None}),
    Family("GLM-4.5", "Glm4MoeForCausalLM", "glm4_moe",
           MOE | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
                  "first_k_dense_replace": 1}),
    Family("OLMoE", "OlmoeForCausalLM", "olmoe",
           {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4, "head_dim": None}),
    Family("Mixtral", "MixtralForCausalLM", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("Gemma-2", "Gemma2ForCausalLM", "gemma2", {"tie_word_embeddings": True}, table=False),
    Family("GLM-4", "Glm4ForCausalLM", "glm4", table=False),
    Family("Qwen2-MoE", "Qwen2MoeForCausalLM", "qwen2_moe",
           MOE | {"num_experts": 4, "shared_expert_intermediate_size": 64, "head_dim": None}, table=False),
    Family("Granite-MoE", "GraniteMoeForCausalLM", "granitemoe",
           {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": None},
           table=False),
    Family("Cohere", "CohereForCausalLM", "cohere", {"head_dim": None}, table=False),
    Family("Exaone-4", "Exaone4ForCausalLM", "exaone4", {"head_dim": None}, table=False),
    Family("StableLM", "StableLmForCausalLM", "stablelm", {"head_dim": None}, table=False),
)  # fmt: skip


def family(name: str) -> Family:
    return next(f for f in FAMILIES if f.name == name)


def _sizes(f: Family) -> dict[str, Any]:
    # A copy: some config classes write into the rope dictionary that they are given.
    return copy.deepcopy({k: x for k, x in (BASE | f.config).items() if x is not None})


def _model(f: Family, seed: int) -> Any:
    """transformers' model of the family, random, with INFLUENCE applied."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[f.model_type]
    sizes = _sizes(f)
    if f.wrap == "qwen3_vl_moe":
        vision = {"depth": 1, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": HIDDEN,
                  "deepstack_visual_indexes": [0], "patch_size": 16}  # fmt: skip
        config = config_class(text_config=sizes, vision_config=vision, tie_word_embeddings=False,
                              image_token_id=5, video_token_id=6, vision_start_token_id=7, vision_end_token_id=8)  # fmt: skip
    else:
        config = config_class(**sizes)
    cls = transformers.DeepseekV3ForCausalLM if f.wrap == "kimi_k25" else getattr(transformers, f.architecture)
    torch.manual_seed(seed)
    model = cls(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if any(part in name for part in ("o_proj", "down_proj", "dense.weight", "w2")):
                p.mul_(INFLUENCE)
        head = model.get_output_embeddings().weight
        head.div_(head.norm(dim=-1, keepdim=True).clamp(min=1e-6))  # the padding token's row may be zero
        if not config.get_text_config().tie_word_embeddings:
            head.mul_(3.0)
    return model


def write_target(f: Family, folder: Path, seed: int = 0) -> Path:
    """The target as a model folder in float32, with a byte tokenizer and a chat template."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    model = _model(f, seed)
    with torch.no_grad():
        model.save_pretrained(folder)
    if f.said:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | f.said, indent=1))
    if f.wrap == "qwen3_vl_moe":  # the published files hold the experts' matrices the other way round
        tensors = load_file(folder / "model.safetensors")
        turned = {k: t.transpose(1, 2).contiguous() if ".experts." in k else t for k, t in tensors.items()}
        save_file(turned, folder / "model.safetensors", metadata={"format": "pt"})
    if f.wrap == "kimi_k25":
        tensors = {f"language_model.{k}": t for k, t in load_file(folder / "model.safetensors").items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        text = json.loads((folder / "config.json").read_text()) | {"model_type": f.text_type}
        outer = {
            "architectures": [f.architecture], "model_type": f.wrap, "text_config": text, "dtype": "float32",
            "vision_config": {"vt_num_attention_heads": 2, "vt_num_hidden_layers": 1, "vt_hidden_size": 64,
                              "vt_intermediate_size": 64, "mm_hidden_size": 64, "text_hidden_size": HIDDEN},
            "media_placeholder_token_id": 5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            "tie_word_embeddings": False,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(outer, indent=1))
    write_tokenizer(folder)
    return folder


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of five specials, 256 bytes and filler words up to VOCAB."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"Ġfiller{i}" for i in range(VOCAB - len(words))]
    tok = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIALS])
    tok.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIALS[1], "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[0], "unk_token": SPECIALS[0], "clean_up_tokenization_spaces": False,
        "chat_template": CHATML,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
