"""The dialects beside vLLM's: speculators, sglang (SpecForge) and eagle (SafeAILab). What one cannot express is refused.

speculators: nested config; layers.0.*; ids at top level in our meaning; Llama layer; width equal to the target's.
sglang: ids nested in eagle_config, counted as layer outputs; always takes the residual after the norm's input.
eagle: no ids and no switches at all: only what equals the reference defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.check.dialect import SIGNED
from draftsmith.dialects import vllm
from draftsmith.dialects.checkpoint import (
    DTYPES,
    Checkpoint,
    require_inventory,
    require_map,
    save_tensors,
    verify_written,
)
from draftsmith.drafter.config import WEIGHTS
from draftsmith.errors import UserError
from draftsmith.record import write_json

Refusals = list[tuple[bool, str, str]]
"""(applies, what cannot be expressed, why)."""

TOP_ONLY = ("eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states")
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def _base(c: Checkpoint, dtype: str, extra: dict[str, Any] | None) -> dict[str, Any]:
    return vllm.config_json(c.config, dtype, extra)


def _deepseek_target(c: Checkpoint) -> bool:
    return bool(c.contract and c.contract.target.architecture.startswith(("Deepseek", "Kimi")))


def refusals_speculators(c: Checkpoint) -> Refusals:
    k = c.config
    return [
        (k.form == "mla", "an MLA drafter", "speculators has Llama and Qwen3 layers only"),
        (
            k.hidden_size != k.target_hidden_size,
            "a drafter width other than the target's",
            "its fc takes the drafter's own width",
        ),
        (k.norms.norm_before_fc and k.norms.fc_norm, "norm_before_fc with fc_norm", "its config forbids both"),
    ]


def speculators_config(c: Checkpoint, dtype: str, extra: dict[str, Any] | None) -> dict[str, Any]:
    """config.json of the speculators package (0.9.0: config.py, models/eagle3/config.py)."""
    flat = _base(c, dtype, extra)
    layer_keys = (
        "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "attention_dropout", "mlp_bias", "vocab_size",
        "max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling", "tie_word_embeddings", "use_cache",
    )  # fmt: skip
    layer = {k: flat[k] for k in layer_keys if k in flat} | {"architectures": ["LlamaForCausalLM"]}
    target = c.contract.target if c.contract else None
    proposal = {"proposal_type": "greedy", "speculative_tokens": (c.contract and c.contract.ttt_steps) or 3}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": target.name if target else "UNSET",
                "architectures": [target.architecture] if target else [],
            },
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": c.config.draft_vocab_size,
        "target_hidden_size": c.config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": flat["eagle_aux_hidden_state_layer_ids"],
        SIGNED: flat[SIGNED],
        **{s: flat[s] for s in SWITCHES},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def sglang_ids(c: Checkpoint) -> list[int]:
    """Our ids in the numbers that SGLang's class for this target will turn back into our layers.

    Most classes add 1. The DeepSeek class (Kimi too) adds 1 only if the first id is 1 (sglang#25454), so any other
    list is written unshifted there."""
    ids = list(c.config.aux_layer_ids or [])
    if _deepseek_target(c) and ids[0] != 2:
        return ids
    return [i - 1 for i in ids]


def refusals_sglang(c: Checkpoint) -> Refusals:
    ids = c.config.aux_layer_ids or []
    return [
        (
            c.config.norms.norm_before_residual,
            "norm_before_residual",
            "SGLang's drafter class always keeps the state before the norm",
        ),
        (
            0 in ids and not _deepseek_target(c),
            "aux id 0 (the embedding)",
            "SGLang numbers layer outputs from 0, which is our 1",
        ),
        (
            _deepseek_target(c) and len(ids) > 0 and ids[0] == 1,
            "aux ids that begin with 1 for a DeepSeek-class target",
            "SGLang would take the 1 for the other numbering and shift them all",
        ),
    ]


def sglang_config(c: Checkpoint, dtype: str, extra: dict[str, Any] | None) -> dict[str, Any]:
    flat = _base(c, dtype, extra)
    nested = {"eagle_aux_hidden_state_layer_ids": sglang_ids(c), "use_aux_hidden_state": True}
    if c.config.norms.norm_before_fc:
        nested["norm_before_fc"] = True
    return {k: v for k, v in flat.items() if k != TOP_ONLY[0]} | {"eagle_config": nested}


def refusals_eagle(c: Checkpoint) -> Refusals:
    k = c.config
    layers = c.contract.target.num_layers if c.contract else None
    default = [2, layers // 2, layers - 3] if layers else None
    on = [s for s in SWITCHES if getattr(k.norms, s)]
    return [
        (bool(on), f"switch {', '.join(on)}", "the reference form has none"),
        (k.form == "mla", "an MLA drafter", "the reference form is a Llama layer"),
        (
            default is None,
            "aux ids without a contract",
            "the reference form writes none, so the target's depth must be known",
        ),
        (
            default is not None and k.aux_layer_ids != default,
            f"aux ids {k.aux_layer_ids}",
            f"the reference form writes none; readers take {default}",
        ),
        (k.num_aux_layers != 3, f"{k.num_aux_layers} aux layers", "the reference form has three"),
        (
            k.hidden_size != k.target_hidden_size,
            "a drafter width other than the target's",
            "the reference form writes one width for both",
        ),
    ]


def eagle_config(c: Checkpoint, dtype: str, extra: dict[str, Any] | None) -> dict[str, Any]:
    flat = _base(c, dtype, extra)
    return {k: v for k, v in flat.items() if k not in (*TOP_ONLY, *SWITCHES, SIGNED, "target_hidden_size")}


NATIVE_NAMES: Callable[[str], str] = str
WRITERS: dict[str, tuple[Callable[[Checkpoint], Refusals], Callable[..., dict[str, Any]], Callable[[str], str]]] = {
    "speculators": (refusals_speculators, speculators_config, NATIVE_NAMES),
    "sglang": (refusals_sglang, sglang_config, vllm.file_name),
    "eagle": (refusals_eagle, eagle_config, vllm.file_name),
}
"""dialect → (what it cannot express, its config, its tensor names)."""


def write(
    dialect: str, checkpoint: Checkpoint, folder: Path, dtype: str | None = None, extra: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Write `checkpoint` in `dialect`. dtype None keeps the tensors' own. Returns {"sha256", "tensors", "cast"}."""
    have = sorted({str(t.dtype).removeprefix("torch.") for t in checkpoint.tensors.values() if t.is_floating_point()})
    dtype = dtype or (have[0] if len(have) == 1 else "bfloat16")
    if dialect == "vllm":
        return vllm.write(checkpoint, folder, dtype, extra)
    refusals, config, name = WRITERS[dialect]
    if checkpoint.config.aux_layer_ids is None and dialect != "eagle":
        vllm.config_json(checkpoint.config, dtype)  # says what is missing
    for applies, what, why in refusals(checkpoint):
        if applies:
            raise UserError(f"{dialect} cannot express {what}", why, "keep it in the vllm dialect, or train without it")
    require_inventory(checkpoint.config, checkpoint.tensors, "the checkpoint")
    require_map(checkpoint.config, checkpoint.tensors, "the checkpoint")
    tensors = {name(n): t for n, t in checkpoint.cast(DTYPES[dtype]).tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / WEIGHTS, tensors)
    written = verify_written(folder / WEIGHTS, tensors)
    if checkpoint.contract is not None:
        checkpoint.contract.save(folder)
    write_json(folder / "config.json", config(checkpoint, dtype, extra))
    return {"sha256": written["sha256"], "tensors": int(written["tensors"]), "cast": [d for d in have if d != dtype]}
