"""Mutants of switches, layers, the pair and the launch, and what only the weights tell. One function, one fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tiny_pair as tp
from mutant_case import Case, P, mutant, to_speculators
from tiny_pair import as_f32, bf16, read_tensors, write_raw

# --- norms and switches


@mutant
def input_norm_without_switch(case: Case) -> None:
    case.t["input_norm.weight"] = bf16(np.full(3 * tp.HIDDEN, 0.5))


@mutant
def norm_before_fc_without_tensor(case: Case) -> None:
    case.c["norm_before_fc"] = True
    case.contract = None


@mutant
def fc_norm_without_switch(case: Case) -> None:
    for i in range(3):
        case.t[f"fc_norm.{i}.weight"] = bf16(np.full(tp.HIDDEN, 0.5))


@mutant
def fc_norm_without_tensors(case: Case) -> None:
    case.c["fc_norm"] = True
    case.contract = None


def _trained_with(name: str, switch: str) -> None:
    def run(case: Case) -> None:
        assert case.contract is not None
        case.contract["norms"][switch] = True
        del case.c[switch]

    run.__name__ = name
    mutant(run)


_trained_with("norm_output_lost", "norm_output")
_trained_with("norm_before_residual_lost", "norm_before_residual")


@mutant
def speculators_without_norm_before_residual(case: Case) -> None:
    to_speculators(case)
    del case.c["norm_before_residual"]
    case.contract = None


@mutant
def speculators_with_phi3_layer(case: Case) -> None:
    to_speculators(case)
    case.c["transformer_layer_config"]["model_type"] = "phi3"


@mutant
def bias_without_switch(case: Case) -> None:
    for n, wide in (("q_proj", tp.HEADS * tp.HEAD_DIM), ("k_proj", 64), ("v_proj", 64)):
        case.t[f"{P}self_attn.{n}.bias"] = bf16(np.full(wide, 0.1))


@mutant
def bias_switch_without_tensors(case: Case) -> None:
    case.c["attention_bias"] = True


@mutant
def fc_norm_on_an_old_release(case: Case) -> None:
    case.engine = "old"
    case.c["fc_norm"] = case.c["norm_output"] = True
    for i in range(3):
        case.t[f"fc_norm.{i}.weight"] = bf16(1 + 0.02 * np.random.default_rng(i).standard_normal(tp.HIDDEN))
    case.contract = None


@mutant
def speculators_norm_before_fc_on_an_old_release(case: Case) -> None:
    to_speculators(case)
    case.engine = "old"
    case.c["norm_before_fc"] = True
    case.t["input_norm.weight"] = bf16(1 + 0.02 * np.random.default_rng(7).standard_normal(3 * tp.HIDDEN))
    case.contract = None


@mutant
def sliding_layer(case: Case) -> None:
    case.c["layer_types"], case.c["sliding_window"] = ["sliding_attention"], 16


@mutant
def layer_types_of_the_target(case: Case) -> None:
    case.c["layer_types"] = ["full_attention"] * tp.LAYERS


# --- aux layers


@mutant
def ids_lost(case: Case) -> None:
    del case.c["eagle_aux_hidden_state_layer_ids"]


@mutant
def ids_off_by_one(case: Case) -> None:
    case.c["eagle_aux_hidden_state_layer_ids"] = [1, 3, 5]


@mutant
def ids_nested_outputs_on_v1(case: Case) -> None:
    """SpecForge's way: nested, counting outputs. The V1 runner takes them literally (vllm#43671)."""
    del case.c["eagle_aux_hidden_state_layer_ids"]
    case.c["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    case.contract = None


@mutant
def ids_nested_on_v2(case: Case) -> None:
    """Nested in the engine's own meaning, not its default: the V2 runner ignores them."""
    del case.c["eagle_aux_hidden_state_layer_ids"]
    case.c["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}
    case.engine = "modern-v2"
    case.contract = None


@mutant
def ids_unsorted(case: Case) -> None:
    case.c["eagle_aux_hidden_state_layer_ids"] = [6, 2, 4]


@mutant
def ids_repeated(case: Case) -> None:
    case.c["eagle_aux_hidden_state_layer_ids"] = [2, 2, 6]
    case.contract = None


@mutant
def id_out_of_range(case: Case) -> None:
    case.c["eagle_aux_hidden_state_layer_ids"] = [2, 4, 99]
    case.contract = None


@mutant
def two_lists_disagree(case: Case) -> None:
    case.c["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}


@mutant
def shallow_target_without_ids(case: Case) -> None:
    case.pair.target_config["num_hidden_layers"] = 6
    for n in [n for n in case.pair.target if n.startswith(("model.layers.6.", "model.layers.7."))]:
        del case.pair.target[n]
    del case.c["eagle_aux_hidden_state_layer_ids"]
    case.contract = None


@mutant
def last_layer_on_an_old_loop(case: Case) -> None:
    case.engine = "middle"
    case.pair.target_config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    case.c["eagle_aux_hidden_state_layer_ids"] = [2, 4, 8]
    case.contract = None


# --- the pair


@mutant
def target_weights_cut(case: Case) -> None:
    def cut(target: Path, drafter: Path) -> None:
        path = target / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1000])

    case.after.append(cut)


def shards_of_target(target: Path) -> list[Path]:
    """The target's one file as two shards with an index, the embedding in the second."""
    tensors = read_tensors(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    parts: list[dict[str, Any]] = [{}, {}]
    for i, (name, x) in enumerate(sorted(tensors.items(), reverse=True)):
        parts[i * 2 // len(tensors)][name] = x
    paths = [target / f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
    for path, part in zip(paths, parts, strict=True):
        write_raw(path, part)
    table = {n: path.name for path, part in zip(paths, parts, strict=True) for n in part}
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return paths


@mutant
def target_shard_missing(case: Case) -> None:
    case.after.append(lambda t, d: shards_of_target(t)[0].unlink())


@mutant
def target_shard_cut(case: Case) -> None:
    """A shard that holds nothing which the check looks at otherwise."""

    def cut(target: Path, drafter: Path) -> None:
        path = shards_of_target(target)[0]
        path.write_bytes(path.read_bytes()[:-1000])

    case.after.append(cut)


@mutant
def positions_too_few(case: Case) -> None:
    case.c["max_position_embeddings"] = 128


@mutant
def positions_too_few_on_an_old_release(case: Case) -> None:
    case.engine = "old"
    case.c["max_position_embeddings"] = 128


@mutant
def rope_not_the_trained_one(case: Case) -> None:
    case.c["rope_theta"] = 1e6
    case.c["rope_parameters"] = {"rope_theta": 1e6, "rope_type": "default"}


@mutant
def rope_scaling_added_at_export(case: Case) -> None:
    case.c["rope_scaling"] = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}
    del case.c["rope_parameters"]


@mutant
def rope_not_the_targets(case: Case) -> None:
    case.c["rope_parameters"] = {"rope_theta": 1e6, "rope_type": "default"}
    case.c["rope_theta"] = 1e6
    case.contract = None


@mutant
def rope_unreadable(case: Case) -> None:
    case.c["rope_scaling"] = {"type": "yarn"}
    del case.c["rope_parameters"]


@mutant
def tokenizer_changed(case: Case) -> None:
    vocab = case.tokenizer["model"]["vocab"]
    vocab["w10"], vocab["w11"] = vocab["w11"], vocab["w10"]


@mutant
def template_changed(case: Case) -> None:
    case.template += " "


@mutant
def target_of_another_depth(case: Case) -> None:
    assert case.contract is not None
    case.contract["target"]["num_layers"] = 12


@mutant
def target_of_another_revision(case: Case) -> None:
    assert case.contract is not None
    case.contract["target"]["config_hash"] = "0" * 64


@mutant
def config_of_another_drafter(case: Case) -> None:
    assert case.contract is not None
    case.contract["sizes"]["intermediate_size"] = 1024


@mutant
def devices_do_not_divide(case: Case) -> None:
    case.options["tensor_parallel"] = 3


@mutant
def pipeline_on_a_class_without_it(case: Case) -> None:
    case.options["pipeline_parallel"] = 2
    case.pair.target_config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    case.contract = None


@mutant
def devices_too_small(case: Case) -> None:
    case.options |= {"gpu_memory": 2 << 20, "max_model_len": 512}


@mutant
def no_draft_tokens(case: Case) -> None:
    case.options["num_speculative_tokens"] = 0


@mutant
def parallel_drafting_without_mask(case: Case) -> None:
    case.c["pard_token"] = 3


@mutant
def two_kinds_of_cache_on_the_cpu(case: Case) -> None:
    """The Llama form for a target with latent attention: fine on a GPU."""
    case.pair.target_config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    case.pair.target_config |= {"kv_lora_rank": 64, "qk_rope_head_dim": 16}
    case.contract = None


@mutant
def mla_under_kimi_type(case: Case) -> None:
    """An MLA drafter that keeps its target's model_type (vllm#45764)."""
    to_mla(case)
    case.c["model_type"] = "kimi_k2"


@mutant
def mla_under_deepseek_v3(case: Case) -> None:
    """Taken for an MTP head (config/speculative.py: hf_config_override)."""
    to_mla(case)
    case.c["model_type"] = "deepseek_v3"


@mutant
def mla_without_query_rank(case: Case) -> None:
    """q_proj in place of q_a_proj and q_b_proj: the drafter class's loader knows the fused projection only."""
    to_mla(case)
    case.c["q_lora_rank"] = None
    for n in ("q_a_proj", "q_a_layernorm", "q_b_proj"):
        del case.t[f"{P}self_attn.{n}.weight"]
    case.t[f"{P}self_attn.q_proj.weight"] = bf16(
        np.random.default_rng(12).standard_normal((tp.HEADS * 48, 2 * tp.HIDDEN)) * 0.01
    )


@mutant
def llama_form_under_the_targets_type(case: Case) -> None:
    """model_type copied from a target that has MTP heads of its own."""
    case.c["model_type"] = "qwen3_next"


@mutant
def architecture_of_a_target_with_mtp(case: Case) -> None:
    case.c["architectures"] = ["MiMoForCausalLM"]


@mutant
def multimodal_without_image_token(case: Case) -> None:
    case.pair.target_config = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": case.pair.target_config | {"model_type": "llama4_text"},
        "vision_config": {"hidden_size": 64},
    }
    case.contract = None


@mutant
def target_without_the_interface(case: Case) -> None:
    case.pair.target_config |= {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    case.contract = None


@mutant
def target_not_on_an_old_list(case: Case) -> None:
    case.engine = "old"
    case.pair.target_config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    case.contract = None


def to_mla(case: Case) -> None:
    """The drafter in MLA form, sound, for a DeepSeek-like target of the same sizes."""
    rng = np.random.default_rng(11)
    sizes = {"kv_lora_rank": 64, "q_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    case.c.update(sizes, architectures=["Eagle3DeepseekV2ForCausalLM"], model_type="deepseek_v2", num_key_value_heads=4)
    case.c.update(first_k_dense_replace=1, moe_layer_freq=1, head_dim=16)
    for n in ("q_proj", "k_proj", "v_proj", "o_proj"):
        del case.t[f"{P}self_attn.{n}.weight"]
    h, n = tp.HIDDEN, tp.HEADS
    shapes = {"q_a_proj": (48, 2 * h), "q_b_proj": (n * 48, 48), "kv_a_proj_with_mqa": (80, 2 * h),
              "kv_b_proj": (n * 64, 64), "o_proj": (h, n * 32)}  # fmt: skip
    for name, shape in shapes.items():
        case.t[f"{P}self_attn.{name}.weight"] = bf16(rng.standard_normal(shape) * 0.01)
    for name, size in (("q_a_layernorm", 48), ("kv_a_layernorm", 64)):
        case.t[f"{P}self_attn.{name}.weight"] = bf16(1 + 0.02 * rng.standard_normal(size))
    case.contract = None


# --- what only the weights tell (--deep)


@mutant
def embedding_random(case: Case) -> None:
    case.options["deep"] = True
    case.t["embed_tokens.weight"] = bf16(np.random.default_rng(4).standard_normal((tp.VOCAB, tp.HIDDEN)))


@mutant
def norms_untrained(case: Case) -> None:
    case.options["deep"] = True
    case.t[P + "hidden_norm.weight"] = bf16(np.ones(tp.HIDDEN))


@mutant
def final_norm_zero(case: Case) -> None:
    case.options["deep"] = True
    case.t["norm.weight"] = bf16(np.zeros(tp.HIDDEN))


@mutant
def nan_in_fc(case: Case) -> None:
    case.options["deep"] = True
    fc = as_f32(case.t["fc.weight"]).copy()
    fc[5, 7] = np.nan
    case.t["fc.weight"] = bf16(fc)


@mutant
def lm_head_zero(case: Case) -> None:
    case.options["deep"] = True
    case.t["lm_head.weight"] = bf16(np.zeros((tp.DRAFT_VOCAB, tp.HIDDEN)))


@mutant
def lm_head_padded(case: Case) -> None:
    case.options["deep"] = True
    head = as_f32(case.t["lm_head.weight"]).copy()
    head[48:] = head[47]
    case.t["lm_head.weight"] = bf16(head)
