"""The few weights of a target that a drafter needs: embedding rows, final norm, lm_head rows, one layer.

Found by exact key from a table of where published models keep them; a suffix counts only where it is unique (DeepSeek's
multi-token layer carries a second `embed_tokens`); otherwise the error lists the candidates that were seen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.errors import UserError
from draftsmith.target.config import VOCAB, size_of, text_config
from draftsmith.target.dequantise import QUANTISED, dequantised
from draftsmith.target.tensors import Checkpoint

PREFIXES = (
    "model.",
    "language_model.model.",  # Kimi-K2.5, Llava, InternVL
    "model.language_model.",  # Qwen-VL, Gemma-3, Mistral3 since transformers 4.52
    "model.language_model.model.",
    "language_model.",
    "model.text_model.",
    "thinker.model.",  # Qwen-Omni
    "",
    "backbone.",  # NemotronH, Mamba
    "transformer.",  # GPT-2's family, ChatGLM
    "gpt_neox.",
    "model.decoder.",  # OPT
)
EMBEDDING = (
    "embed_tokens.weight",
    "tok_embeddings.weight",  # consolidated files, InternLM2
    "embeddings.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embedding.word_embeddings.weight",
    "embed_in.weight",
    "embed.weight",
)
NORM = (
    "norm.weight",
    "norm_f.weight",
    "ln_f.weight",
    "final_layernorm.weight",
    "final_layer_norm.weight",
    "encoder.final_layernorm.weight",
)
HEAD_PREFIXES = ("", "language_model.", "model.", "model.language_model.", "thinker.", "transformer.")
HEAD = ("lm_head.weight", "output.weight", "head.weight", "embed_out.weight", "output_layer.weight")

PLUS_ONE = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    }
)
"""Model types whose RMS norm multiplies by 1 + weight (transformers, modeling_<type>.py)."""

EPS_KEYS = ("rms_norm_eps", "layer_norm_epsilon", "norm_eps", "layer_norm_eps", "norm_epsilon")


@dataclass(frozen=True)
class HeadRule:
    """How logits come from the last state: RMS norm with `eps`, times the norm's weight, through lm_head, times
    `scale`, then softcap·tanh(logits/softcap) where given."""

    eps: float
    scale: float = 1.0
    softcap: float | None = None


def head_rule(cfg: dict[str, Any]) -> HeadRule:
    """The rule from a target's config. Granite divides by logits_scaling, Cohere multiplies by logit_scale."""
    text = text_config(cfg)
    eps = next((float(text[k]) for k in EPS_KEYS if isinstance(text.get(k), (int, float))), 1e-6)
    scale = float(text.get("logit_scale") or 1.0) / float(text.get("logits_scaling") or 1.0)
    cap = text.get("final_logit_softcapping")
    return HeadRule(eps, scale, float(cap) if cap else None)


def _missing(point: Checkpoint, what: str, tails: Sequence[str], seen: Sequence[str]) -> UserError:
    looked = ", ".join(tails[:3])
    near = sorted(seen)[:8] or sorted(point.entries, key=lambda k: (k.count("."), k))[:8]
    return UserError(
        f"{point.name}: the {what} was not found (looked for {looked} …; candidates seen: {', '.join(near) or 'none'})",
        "a guess among several would load the wrong table without a word",
        "check that the checkpoint is whole; if its names are new, report them",
    )


def find_key(point: Checkpoint, what: str, prefixes: Sequence[str], tails: Sequence[str]) -> str:
    """The exact name of one tensor of `point`; a unique suffix counts, anything else is a UserError."""
    names = point.entries
    for tail in tails:
        for prefix in prefixes:
            for form in (tail, *(tail.removesuffix("weight") + q for q in QUANTISED)):
                if prefix + form in names:
                    return prefix + tail
    seen: list[str] = []
    for tail in tails:
        hits = [n for n in names if n.endswith("." + tail) and not re.search(r"\.\d+\.", n)]
        if len(hits) == 1:
            return hits[0]
        seen += [n for n in names if n.endswith(tail)]
    raise _missing(point, what, tails, seen)


def tied(cfg: dict[str, Any]) -> bool | None:
    """Whether lm_head is the embedding: what the config says (inner first), else its class's default, else None."""
    text = text_config(cfg)
    for source in (text, cfg):
        if isinstance(source.get("tie_word_embeddings"), bool):
            return bool(source["tie_word_embeddings"])
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = text.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        found = CONFIG_MAPPING[kind]().to_dict().get("tie_word_embeddings")
        return found if isinstance(found, bool) else None
    return None


def _table(point: Checkpoint, key: str, rows: Sequence[int] | None) -> torch.Tensor:
    """A [V, G] table in V = config's vocab_size rows (published tables may be padded), or its `rows`."""
    vocab = size_of(text_config(point.config), VOCAB, point.name)
    wanted = list(range(vocab)) if rows is None else list(rows)
    entry = point.entries.get(key)
    if entry is not None and entry.shape[0] < vocab:
        raise UserError(
            f"{point.name}: {key} has {entry.shape[0]} rows, config.json says vocab_size {vocab}",
            "ids above the table have no embedding",
            "take config and weights of the same model",
        )
    if entry is not None and entry.shape[0] == vocab and rows is None:
        return dequantised(point, key, None)
    return dequantised(point, key, wanted)


def _open(source: Path | str | Checkpoint) -> Checkpoint:
    return source if isinstance(source, Checkpoint) else Checkpoint.open(source)


def embedding_key(point: Checkpoint) -> str:
    return find_key(point, "embedding", PREFIXES, EMBEDDING)


def read_embedding(source: Path | str | Checkpoint, rows: Sequence[int] | None = None) -> torch.Tensor:
    """The target's embedding [V, G] (V = the config's vocab_size), or the given rows, in the stored type.

    source: a model folder, a hub id (only the needed bytes are fetched), or an open Checkpoint."""
    point = _open(source)
    return _table(point, embedding_key(point), rows)


def read_lm_head(source: Path | str | Checkpoint, rows: Sequence[int] | None = None) -> torch.Tensor:
    """The target's lm_head [V, G], or the given rows; the embedding where the config ties them.

    UserError where the config unties them and no head is stored."""
    point = _open(source)
    tie = tied(point.config)
    if tie:
        return read_embedding(point, rows)
    try:
        key = find_key(point, "lm_head", HEAD_PREFIXES, HEAD)
    except UserError as e:
        if tie is None:
            return read_embedding(point, rows)
        raise UserError(e.what + "; config.json says tie_word_embeddings false", e.why, e.fix) from None
    return _table(point, key, rows)


def read_final_norm(source: Path | str | Checkpoint) -> torch.Tensor:
    """The weight [G] by which the final norm multiplies (float32 where a model type stores it minus one)."""
    point = _open(source)
    base = embedding_key(point)
    prefixes = [p for p in PREFIXES if base.startswith(p)]
    key = find_key(point, "final norm", [*sorted(prefixes, key=len, reverse=True), *PREFIXES], NORM)
    weight = point.read(key)
    if text_config(point.config).get("model_type") in PLUS_ONE:
        return weight.float() + 1.0
    return weight


def layer_prefix(point: Checkpoint, k: int) -> str:
    """The prefix of decoder layer k, e.g. "model.layers.3."."""
    base = embedding_key(point)
    pattern = re.compile(rf"^(.*?)(layers|h|blocks|block)\.{k}\.")
    found = {m.group(0) for n in point.entries if (m := pattern.match(n))}
    beside = [p for p in PREFIXES if base.startswith(p)]
    for prefix in sorted(beside, key=len, reverse=True):
        hits = [p for p in found if p.startswith(prefix) and p[len(prefix) :].count(".") == 2]
        if len(hits) == 1:
            return hits[0]
    if len(found) == 1:
        return found.pop()
    raise _missing(point, f"layer {k}", [f"layers.{k}."], sorted(found))


def layer_weights(source: Path | str | Checkpoint, k: int) -> dict[str, torch.Tensor]:
    """Tensors of decoder layer k, by names relative to it ("self_attn.q_proj.weight"), dequantised where fp8 or int8.

    Experts of a mixture are left out: a drafter's layer is dense."""
    point = _open(source)
    prefix = layer_prefix(point, k)
    names = [n for n in point.entries if n.startswith(prefix) and ".experts." not in n]
    plain = [n for n in names if not n.endswith(tuple("." + q for q in QUANTISED) + SCALE_TAILS)]
    packed = {n.rpartition(".")[0] + ".weight" for n in names if n.endswith(tuple("." + q for q in QUANTISED))}
    return {n.removeprefix(prefix): dequantised(point, n, None) for n in sorted({*plain, *packed})}


SCALE_TAILS = (
    "_scale",
    "_scale_inv",
    "_scale_2",
    "_global_scale",
    "_zero_point",
    "_shape",
    ".g_idx",
    ".scales",
    ".qzeros",
)
