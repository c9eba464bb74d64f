"""The vLLM dialect: everything written out, nothing left to a default that differs between releases or runners.

Facts behind each key: aux ids at top level in vLLM's meaning are read by both model runners and all releases from
0.11; `num_aux_hidden_states` sizes fc from 0.22; norm switches have different defaults by format; rope in both
spellings serves transformers 4 and 5; a null where a bool is expected stops config creation (ModelOpt#1417).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.check.dialect import SIGNED
from draftsmith.dialects.checkpoint import (
    DTYPES,
    Checkpoint,
    require_inventory,
    require_map,
    save_tensors,
    verify_written,
)
from draftsmith.drafter.config import WEIGHTS, DrafterConfig
from draftsmith.errors import UserError
from draftsmith.record import write_json

ARCHITECTURES = {"llama": ("LlamaForCausalLMEagle3", "llama"), "mla": ("Eagle3DeepseekV2ForCausalLM", "deepseek_v2")}
"""form → (architecture, model_type). An MLA drafter must say deepseek_v2: vLLM's eagle branch of `is_deepseek_mla`
does not list kimi_k2 (vllm#45764), and a drafter that says deepseek_v3 is taken for an MTP head (config/speculative.py
hf_config_override) and refused as Eagle3DeepSeekMTPModel."""

LAYER = ("layers.0.", "midlayer.")
"""native prefix → file prefix. vLLM reads both spellings, SGLang and SafeAILab only `midlayer.`."""


def rope_keys(rope: dict[str, Any]) -> dict[str, Any]:
    """Both spellings of the same rope: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling` (4)."""
    params = {"rope_type": "default"} | {k: v for k, v in rope.items() if v is not None}
    keys: dict[str, Any] = {"rope_parameters": params, "rope_theta": params.get("rope_theta", 10000.0)}
    if params["rope_type"] != "default":
        scaling = {k: v for k, v in params.items() if k != "rope_theta"}
        keys["rope_scaling"] = scaling | {"type": params["rope_type"]}
    return keys


def config_json(config: DrafterConfig, dtype: str, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """The drafter's config.json in the vLLM dialect. extra: further keys (token ids of the target)."""
    architecture, model_type = ARCHITECTURES[config.form]
    if config.aux_layer_ids is None:
        raise UserError(
            "the checkpoint does not say which aux layers it was trained on",
            "vLLM would use its default (2, n//2, n-3), right or wrong, without a word",
            "give them: aux_layer_ids in drafter.json",
        )
    out: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": config.num_aux_layers,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        SIGNED: list(config.aux_layer_ids),
        "norm_before_residual": config.norms.norm_before_residual,
        "norm_before_fc": config.norms.norm_before_fc,
        "fc_norm": config.norms.fc_norm,
        "norm_output": config.norms.norm_output,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": dtype,
    }
    if config.form == "mla":
        assert config.mla is not None
        # q_lora_rank null is meant: absent, DeepseekV2Config would fill in 1536
        out |= config.mla.model_dump()
    out |= rope_keys(config.rope)
    return out | {k: v for k, v in (extra or {}).items() if v is not None}


def file_name(native: str) -> str:
    """Native tensor name → the file's."""
    return LAYER[1] + native[len(LAYER[0]) :] if native.startswith(LAYER[0]) else native


def write(
    checkpoint: Checkpoint, folder: Path, dtype: str = "bfloat16", extra: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Write config.json, model.safetensors and contract.json into `folder` and read them back, bit for bit.

    Returns {"sha256", "tensors", "cast"}; `cast` names the source dtype where it was not `dtype`. UserError on an
    incomplete checkpoint, a wrong map, or a switch that the form cannot express."""
    config = checkpoint.config
    if config.form == "mla" and config.norms.norm_before_fc:
        raise UserError(
            "norm_before_fc cannot be served for an MLA drafter",
            "vLLM's Eagle3DeepseekV2ForCausalLM has no input_norm and would drop it silently",
            "train with norm_before_fc off (fc_norm is supported)",
        )
    require_inventory(config, checkpoint.tensors, "the checkpoint")
    require_map(config, checkpoint.tensors, "the checkpoint")
    cast = sorted(
        {str(t.dtype).removeprefix("torch.") for n, t in checkpoint.tensors.items() if t.is_floating_point()} - {dtype}
    )
    tensors = {file_name(n): t for n, t in checkpoint.cast(DTYPES[dtype]).tensors.items()}
    if config.draft_vocab_size == config.vocab_size:
        # The engine makes room for a map only where the vocabularies differ, and refuses one that it has no room for.
        tensors = {n: t for n, t in tensors.items() if n not in ("d2t", "t2d")}
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / WEIGHTS, tensors)
    written = verify_written(folder / WEIGHTS, tensors)
    if checkpoint.contract is not None:
        checkpoint.contract.save(folder)
    # config.json last: a folder without it is not a model, so a kill leaves nothing that loads.
    write_json(folder / "config.json", config_json(config, dtype, extra))
    return {"sha256": written["sha256"], "tensors": int(written["tensors"]), "cast": cast}
