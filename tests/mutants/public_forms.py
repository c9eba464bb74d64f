"""Drafters of the forms that are published, at their true sizes, as sparse files: true headers, holes for weights, only
the maps filled in. Config values are those of public configs (SpecForge, TorchSpec, speculators, ModelOpt, AngelSlim);
where a published file could not be confirmed, the form counts and not the number.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tiny_pair import write_sparse

from draftsmith.check.headers import BITS, read_weights

Shapes = dict[str, tuple[str, tuple[int, ...]]]
YARN_64 = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
           "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip


@dataclass
class Form:
    """target and drafter: their configs. tensors: of the drafter. engine: a kind of engine_tree.py."""

    target: dict[str, Any]
    drafter: dict[str, Any]
    tensors: Shapes
    draft_vocab: int | None
    vocab: int
    options: dict[str, Any] = field(default_factory=dict)
    engine: str = "modern-v2"

    def write(self, root: Path) -> tuple[Path, Path]:
        target, drafter = root / "target", root / "model-eagle3"
        for folder, config in ((target, self.target), (drafter, self.drafter)):
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(config))
        write_sparse(drafter / "model.safetensors", self.tensors, BITS)
        fill_t2d(drafter, self.draft_vocab)
        return target, drafter


def fill_t2d(drafter: Path, draft_vocab: int | None) -> None:
    """d2t is a hole, i.e. zeros: the first ids; t2d must then mark them."""
    t = read_weights(drafter).tensors.get("t2d")
    if t is not None and draft_vocab is not None:
        with t.file.open("r+b") as f:
            f.seek(t.start)
            f.write(np.ones(draft_vocab, dtype="?").tobytes())


def llama_tensors(
    h: int, inter: int, heads: int, kv: int, dim: int, vocab: int, draft: int | None, *,
    layer: str = "midlayer.", aux: int = 3, target_hidden: int | None = None, t2d: bool = True, layers: int = 1,
    bias: bool = False, embed: bool = False, qk_norm: bool = False, dtype: str = "BF16",
) -> Shapes:  # fmt: skip
    g = target_hidden or h
    out: Shapes = {"fc.weight": (dtype, (h, aux * g)), "norm.weight": (dtype, (h,))}
    for k in range(layers):
        p = layer if layers == 1 else f"layers.{k}."
        wide = 2 * h if k == 0 else h
        out |= {
            p + "self_attn.q_proj.weight": (dtype, (heads * dim, wide)),
            p + "self_attn.k_proj.weight": (dtype, (kv * dim, wide)),
            p + "self_attn.v_proj.weight": (dtype, (kv * dim, wide)),
            p + "self_attn.o_proj.weight": (dtype, (h, heads * dim)),
            p + "mlp.gate_proj.weight": (dtype, (inter, h)),
            p + "mlp.up_proj.weight": (dtype, (inter, h)),
            p + "mlp.down_proj.weight": (dtype, (h, inter)),
            p + "input_layernorm.weight": (dtype, (h,)),
            p + "hidden_norm.weight": (dtype, (h,)),
            p + "post_attention_layernorm.weight": (dtype, (h,)),
        }
        if bias:  # attention_bias gives o_proj one too (vllm/model_executor/models/llama.py: bias_o_proj)
            sizes = {"q": heads * dim, "k": kv * dim, "v": kv * dim, "o": h}
            out |= {f"{p}self_attn.{n}_proj.bias": (dtype, (wide,)) for n, wide in sizes.items()}
        if qk_norm:
            out |= {p + "self_attn.q_norm.weight": (dtype, (dim,)), p + "self_attn.k_norm.weight": (dtype, (dim,))}
    out["lm_head.weight"] = (dtype, (draft or vocab, h))
    if draft is not None:
        out["d2t"] = ("I64", (draft,))
        if t2d:
            out["t2d"] = ("BOOL", (vocab,))
    if embed:
        out["embed_tokens.weight"] = (dtype, (vocab, h))
    return out


def mla_tensors(h: int, inter: int, heads: int, vocab: int, draft: int | None, layer: str = "midlayer.") -> Shapes:
    """Kimi's and DeepSeek's attention sizes: q_lora 1536, kv_lora 512, nope 128, rope 64, v 128."""
    out = llama_tensors(h, inter, heads, heads, 128, vocab, draft, layer=layer)
    for n in ("q", "k", "v", "o"):
        del out[f"{layer}self_attn.{n}_proj.weight"]
    a = layer + "self_attn."
    return out | {
        a + "q_a_proj.weight": ("BF16", (1536, 2 * h)),
        a + "q_a_layernorm.weight": ("BF16", (1536,)),
        a + "q_b_proj.weight": ("BF16", (heads * 192, 1536)),
        a + "kv_a_proj_with_mqa.weight": ("BF16", (576, 2 * h)),
        a + "kv_a_layernorm.weight": ("BF16", (512,)),
        a + "kv_b_proj.weight": ("BF16", (heads * 256, 512)),
        a + "o_proj.weight": ("BF16", (h, heads * 128)),
    }


def target(arch: str, kind: str, h: int, layers: int, heads: int, kv: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [arch], "model_type": kind, "hidden_size": h, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab, "eos_token_id": 2,
        "intermediate_size": 4 * h,
    } | more  # fmt: skip


def llama_config(h: int, inter: int, heads: int, kv: int, vocab: int, draft: int | None, **more: Any) -> dict[str, Any]:
    out = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": h, "intermediate_size": inter,
        "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_cache": True,
    }  # fmt: skip
    return out | ({} if draft is None else {"draft_vocab_size": draft}) | more


def speculators(layer: dict[str, Any], draft: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": draft,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "x/y", "architectures": ["X"]},
        },
        "transformer_layer_config": layer, "torch_dtype": "bfloat16",
    } | more  # fmt: skip


QWEN_235B = target("Qwen3MoeForCausalLM", "qwen3_moe", 4096, 94, 64, 4, 151936, head_dim=128, rope_theta=1e6,
                   max_position_embeddings=40960, num_experts=128)  # fmt: skip
QWEN_8B = target("Qwen3ForCausalLM", "qwen3", 4096, 36, 32, 8, 151936, head_dim=128, rope_theta=1e6,
                 max_position_embeddings=40960)  # fmt: skip
QWEN_30B = target("Qwen3MoeForCausalLM", "qwen3_moe", 2048, 48, 32, 4, 151936, head_dim=128, rope_theta=1e6,
                  max_position_embeddings=40960)  # fmt: skip
KIMI_TEXT = target("DeepseekV3ForCausalLM", "kimi_k2", 7168, 61, 64, 64, 163840, max_position_embeddings=262144,
                   rope_theta=5e4, rope_scaling=YARN_64, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
                   qk_rope_head_dim=64, v_head_dim=128)  # fmt: skip
KIMI = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": KIMI_TEXT,
        "vision_config": {"hidden_size": 1152}, "media_placeholder_token_id": 163605}  # fmt: skip
MLA = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": 1536,
       "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 5e4,
       "rope_scaling": YARN_64, "max_position_embeddings": 262144}  # fmt: skip

FORMS: dict[str, Callable[[], Form]] = {}


def form(function: Callable[[], Form]) -> Callable[[], Form]:
    FORMS[function.__name__] = function
    return function


@form
def reference_eagle3() -> Form:
    """SafeAILab: midlayer names, no ids, no rope, 2048 positions; served with what it was trained for."""
    t = target("LlamaForCausalLM", "llama", 5120, 40, 40, 40, 32000, max_position_embeddings=4096)
    c = llama_config(5120, 13824, 40, 40, 32000, 8000, max_position_embeddings=2048)
    return Form(t, c, llama_tensors(5120, 13824, 40, 40, 128, 32000, 8000), 8000, 32000, {"max_model_len": 2048})


@form
def specforge_qwen3_235b() -> Form:
    """SpecForge: nested ids that count outputs. The V2 runner ignores them; its default is what they mean."""
    c = llama_config(4096, 24576, 64, 4, 151936, 32000, head_dim=128, rope_theta=1e6, max_position_embeddings=40960,
                     eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 46, 90], "use_aux_hidden_state": True},
                     bos_token_id=151643, eos_token_id=151645)  # fmt: skip
    return Form(QWEN_235B, c, llama_tensors(4096, 24576, 64, 4, 128, 151936, 32000), 32000, 151936)


@form
def specforge_qwen3_8b() -> Form:
    """SpecForge without ids."""
    c = llama_config(4096, 12288, 32, 8, 151936, 32000, head_dim=128, rope_theta=1e6, max_position_embeddings=40960)
    return Form(QWEN_8B, c, llama_tensors(4096, 12288, 32, 8, 128, 151936, 32000), 32000, 151936, engine="modern-v1")


@form
def specforge_eagle31() -> Form:
    """EAGLE-3.1: fc_norm and norm_output."""
    c = llama_config(2048, 12288, 32, 4, 151936, 32000, head_dim=128, rope_theta=1e6, max_position_embeddings=2048,
                     fc_norm=True, norm_output=True)  # fmt: skip
    tensors = llama_tensors(2048, 12288, 32, 4, 128, 151936, 32000)
    tensors |= {f"fc_norm.{i}.weight": ("BF16", (2048,)) for i in range(3)}
    return Form(QWEN_30B, c, tensors, 32000, 151936, {"max_model_len": 2048})


@form
def specforge_qwq_32b() -> Form:
    """model_type qwen2 under a Llama drafter class."""
    t = target("Qwen3ForCausalLM", "qwen2", 5120, 64, 40, 8, 152064, rope_theta=1e6, max_position_embeddings=40960)
    c = llama_config(
        5120, 27648, 40, 8, 152064, 32000, rope_theta=1e6, max_position_embeddings=40960, model_type="qwen2"
    )
    return Form(t, c, llama_tensors(5120, 27648, 40, 8, 128, 152064, 32000), 32000, 152064)


@form
def specforge_phi4() -> Form:
    t = target("Phi3ForCausalLM", "phi3", 5120, 40, 40, 10, 100352, rope_theta=250000, max_position_embeddings=16384)
    c = llama_config(
        5120, 17920, 40, 10, 100352, 32000, rope_theta=250000, max_position_embeddings=16384, model_type="phi3"
    )
    return Form(t, c, llama_tensors(5120, 17920, 40, 10, 128, 100352, 32000), 32000, 100352)


@form
def specforge_qwen25_vl() -> Form:
    """mrope keys, on a multimodal target."""
    text = target("Qwen2ForCausalLM", "qwen2_5_vl_text", 3584, 28, 28, 4, 152064, rope_theta=1e6,
                  rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}, max_position_embeddings=128000)  # fmt: skip
    t = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "text_config": text,
         "vision_config": {"hidden_size": 1280}, "image_token_id": 151655}  # fmt: skip
    c = llama_config(3584, 18944, 28, 4, 152064, 32000, head_dim=128, rope_theta=1e6, max_position_embeddings=8192,
                     rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]})  # fmt: skip
    return Form(t, c, llama_tensors(3584, 18944, 28, 4, 128, 152064, 32000), 32000, 152064,
                {"max_model_len": 8192}, "modern-v1")  # fmt: skip


@form
def specforge_full_vocab() -> Form:
    """LongCat's: the draft vocabulary is the whole one, no map."""
    t = target("DeepseekV3ForCausalLM", "longcat_flash", 6144, 28, 64, 64, 131072, rope_theta=1e7,
               max_position_embeddings=131072, head_dim=128)  # fmt: skip
    c = llama_config(6144, 12288, 64, 16, 131072, 131072, head_dim=128, rope_theta=1e7, max_position_embeddings=131072)
    return Form(t, c, llama_tensors(6144, 12288, 64, 16, 128, 131072, None), None, 131072)


@form
def torchspec_kimi_llama() -> Form:
    """A plain-attention drafter for an MLA target: yarn under the key `type`, no draft_vocab_size, no ids."""
    c = llama_config(7168, 12288, 64, 64, 163840, None, head_dim=128, rope_theta=5e4, rope_scaling=YARN_64,
                     max_position_embeddings=262144)  # fmt: skip
    return Form(KIMI, c, llama_tensors(7168, 12288, 64, 64, 128, 163840, None), None, 163840)


@form
def kimi_mla() -> Form:
    """An MLA drafter with a reduced vocabulary, ids at top level."""
    c = llama_config(7168, 18432, 64, 64, 163840, 32000) | MLA | {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}
    return Form(KIMI, c, mla_tensors(7168, 18432, 64, 163840, 32000), 32000, 163840, engine="modern-v1")


@form
def kimi_mla_eagle31() -> Form:
    """MLA with EAGLE-3.1's norms; nested ids that count outputs, on the V2 runner."""
    c = llama_config(7168, 18432, 64, 64, 163840, 163840) | MLA
    c |= {"fc_norm": True, "norm_output": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}}
    tensors = mla_tensors(7168, 18432, 64, 163840, None) | {f"fc_norm.{i}.weight": ("BF16", (7168,)) for i in range(3)}
    return Form(KIMI, c, tensors, None, 163840)


@form
def modelopt_llama4() -> Form:
    """ModelOpt: full vocabulary, no map, nested ids, tensors without t2d."""
    rope = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0,
            "high_freq_factor": 1.0, "original_max_position_embeddings": 8192}}  # fmt: skip
    text = target("Llama4ForCausalLM", "llama4_text", 5120, 48, 40, 8, 202048, head_dim=128,
                  max_position_embeddings=131072, **rope)  # fmt: skip
    t = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": text,
         "vision_config": {"hidden_size": 1408}, "image_token_index": 200092}  # fmt: skip
    c = llama_config(5120, 16384, 40, 8, 202048, 202048, head_dim=128, max_position_embeddings=131072, **rope)
    c |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 23, 44]}}
    return Form(t, c, llama_tensors(5120, 16384, 40, 8, 128, 202048, None, layer="layers.0."), None, 202048)


@form
def speculators_llama() -> Form:
    """speculators: a Llama layer for a Qwen target, its own embedding, norms before fc and residual."""
    layer = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 1,
             "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
             "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "max_position_embeddings": 40960}  # fmt: skip
    c = speculators(layer, 32000, norm_before_residual=True, norm_before_fc=True,
                    eagle_aux_hidden_state_layer_ids=[2, 18, 33])  # fmt: skip
    tensors = llama_tensors(4096, 12288, 32, 8, 128, 151936, 32000, layer="layers.0.", embed=True)
    return Form(QWEN_8B, c, tensors | {"input_norm.weight": ("BF16", (12288,))}, 32000, 151936)


@form
def speculators_qwen3() -> Form:
    """speculators: a Qwen3 layer (q_norm, k_norm)."""
    layer = {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 1,
             "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
             "rope_theta": 1e6, "max_position_embeddings": 40960}  # fmt: skip
    c = speculators(layer, 32000, norm_before_residual=False, eagle_aux_hidden_state_layer_ids=[2, 18, 33])
    tensors = llama_tensors(4096, 12288, 32, 8, 128, 151936, 32000, layer="layers.0.", qk_norm=True)
    return Form(QWEN_8B, c, tensors, 32000, 151936)


@form
def speculators_hybrid_rope() -> Form:
    """A Gemma-like target with one rope per layer type; the drafter has the sliding layers' one."""
    ropes = {"full_attention": {"rope_theta": 1e6, "rope_type": "default"},
             "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}  # fmt: skip
    t = target("MistralForCausalLM", "gemma4_text", 5376, 60, 32, 16, 262144, head_dim=256, rope_parameters=ropes,
               max_position_embeddings=262144)  # fmt: skip
    layer = {"model_type": "llama", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 1,
             "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256, "vocab_size": 262144,
             "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "max_position_embeddings": 262144}  # fmt: skip
    c = speculators(layer, 32000, norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[2, 30, 57])
    return Form(t, c, llama_tensors(5376, 21504, 32, 16, 256, 262144, 32000, layer="layers.0."), 32000, 262144)


@form
def angelslim_qwen3() -> Form:
    """AngelSlim's class name, bf16, own embedding left out."""
    t = target("Qwen3ForCausalLM", "qwen3", 2560, 36, 32, 8, 151936, head_dim=128, rope_theta=1e6,
               max_position_embeddings=40960)  # fmt: skip
    c = llama_config(2560, 9728, 32, 8, 151936, 32000, head_dim=128, rope_theta=1e6, max_position_embeddings=40960,
                     architectures=["Eagle3LlamaForCausalLM"])  # fmt: skip
    return Form(t, c, llama_tensors(2560, 9728, 32, 8, 128, 151936, 32000), 32000, 151936)


@form
def parallel_drafting() -> Form:
    """P-EAGLE: mask_hidden and its token."""
    c = llama_config(4096, 12288, 32, 8, 151936, 32000, head_dim=128, rope_theta=1e6, max_position_embeddings=40960,
                     pard_token=151670, eagle_aux_hidden_state_layer_ids=[2, 18, 33])  # fmt: skip
    tensors = llama_tensors(4096, 12288, 32, 8, 128, 151936, 32000)
    return Form(QWEN_8B, c, tensors | {"mask_hidden": ("BF16", (12288,))}, 32000, 151936)


@form
def two_layers_four_states() -> Form:
    """A head of two layers over four aux states, with attention biases and the count written."""
    c = llama_config(2880, 17280, 64, 8, 201088, 32000, head_dim=64, rope_theta=150000, max_position_embeddings=131072,
                     num_hidden_layers=2, num_aux_hidden_states=4, attention_bias=True,
                     eagle_aux_hidden_state_layer_ids=[2, 12, 24, 36])  # fmt: skip
    t = target("GptOssForCausalLM", "gpt_oss", 2880, 36, 64, 8, 201088, head_dim=64, rope_theta=150000,
               max_position_embeddings=131072)  # fmt: skip
    return Form(t, c, llama_tensors(2880, 17280, 64, 8, 64, 201088, 32000, layers=2, aux=4, bias=True), 32000, 201088)
