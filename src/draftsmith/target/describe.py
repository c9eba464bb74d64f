"""What draftsmith sees in a target: sizes, wrapper, where its few needed weights lie, tokenizer; one reading for the user
to check before anything runs. Only headers are read, also on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.target.config import default_aux_layers, facts_of, load_config, text_config
from draftsmith.target.tensors import Checkpoint
from draftsmith.target.tokenizer import chat_template, stop_ids, tokenizer_hash
from draftsmith.target.weights import (
    EMBEDDING,
    HEAD,
    HEAD_PREFIXES,
    NORM,
    PREFIXES,
    find_key,
    head_rule,
    layer_prefix,
    tied,
)


def _found(point: Checkpoint, what: str, prefixes: tuple[str, ...], tails: tuple[str, ...]) -> dict[str, Any]:
    try:
        key = find_key(point, what, prefixes, tails)
    except UserError as e:
        return {"key": None, "why": e.what}
    entry = point.entries.get(key)
    if entry is None:  # packed: the parts stand in its place
        parts = sorted(n for n in point.entries if n.startswith(key.removesuffix("weight")))
        return {"key": key, "stored": "packed", "parts": parts}
    return {"key": key, "stored": entry.dtype, "shape": list(entry.shape)}


def quantisation(config: dict[str, Any]) -> str | None:
    """The quantisation's name as the config gives it (fp8, modelopt/NVFP4, gptq, awq, compressed-tensors), or None."""
    for source in (config, text_config(config)):
        found = source.get("quantization_config") or source.get("compression_config")
        if isinstance(found, dict):
            words = (found.get("quant_method"), found.get("quant_algo") or found.get("format"))
            return "/".join(str(w) for w in words if w) or "unnamed"
    return None


def attention_kinds(text: dict[str, Any]) -> dict[str, int]:
    """How many layers of each kind a hybrid or sliding-window target has; empty where all are alike."""
    kinds = text.get("layer_types") or text.get("layers_block_type") or text.get("hybrid_override_pattern")
    out: dict[str, int] = {}
    for kind in kinds or []:
        out[str(kind)] = out.get(str(kind), 0) + 1
    return out


def describe(source: Path | str, name: str | None = None) -> dict[str, Any]:
    """All facts of a target folder or hub id as one JSON-able mapping. UserError where there is no target at all."""
    config = load_config(source)
    facts = facts_of(config, name or str(source))
    text, rule = text_config(config), head_rule(config)
    out: dict[str, Any] = {
        **facts.model_dump(),
        "quantisation": quantisation(config),
        "layers": attention_kinds(text),
        "sliding_window": text.get("sliding_window"),
        "tied": tied(config),
        "norm_eps": rule.eps,
        "logit_scale": rule.scale,
        "logit_softcap": rule.softcap,
    }
    try:
        out["default_aux_layers"] = default_aux_layers(facts.num_layers)
    except UserError as e:
        out["default_aux_layers"] = None
        out["aux_note"] = e.what
    try:
        point = Checkpoint.open(source)
    except UserError as e:
        out["weights"] = {"why": e.what}
    else:
        out["weights"] = {
            "tensors": len(point.entries),
            "embedding": _found(point, "embedding", PREFIXES, EMBEDDING),
            "final_norm": _found(point, "final norm", PREFIXES, NORM),
            "lm_head": "the embedding (tied)" if tied(config) else _found(point, "lm_head", HEAD_PREFIXES, HEAD),
            "last_layer": _layer(point, facts.num_layers - 1),
        }
    folder = Path(source).expanduser()
    if folder.is_dir():
        out["tokenizer"] = {
            "hash": tokenizer_hash(folder),
            "chat_template": chat_template(folder) is not None,
            "stop_ids": stop_ids(folder),
        }
    return out


def _layer(point: Checkpoint, k: int) -> str | None:
    try:
        return layer_prefix(point, k)
    except UserError:
        return None
