"""A tiny target and a drafter that really drafts for it, solved in closed form, no training, no torch.

The target (8 Llama layers) has zero attention outputs, so the stream entering layer k is a function of the current
token alone and greedy decoding walks a fixed chain token → f(token). The drafter's fc is solved by least squares so
that, at every token of the chain, fc(states of the trained layers) points at the row of f(f(token)) in lm_head: its
first proposal is always accepted, and the count falls when ids, maps, names or switches are wrong.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, DRAFT_VOCAB = 128, 8, 4, 2, 32, 256, 512, 96
AUX_LAYERS = [2, 4, 6]  # not the engine's default (2, 4, 5): a lost list must show
EPS = 1e-5
PROMPT = [7, 3, 11, 5]
SEED, MIN_GAP = 20, 0.3  # bf16 moves a logit by less than 0.1 here
WRONG_LAYERS = ([2, 4, 5], [1, 3, 5], [3, 5, 7], [2, 4, 8])  # default, off by one either way, last: must not work

_CODES = {"<f4": "F32", "<i8": "I64", "<i4": "I32", "|b1": "BOOL", "<f2": "F16", "<f8": "F64", "|u1": "U8"}


class BF16(np.ndarray):
    """A uint16 array that holds bfloat16 bits."""


def bf16(x: np.ndarray) -> BF16:
    """float32 → bfloat16 bits, rounded to nearest even."""
    u = np.ascontiguousarray(x, dtype="<f4").view("<u4")
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype("<u2").view(BF16)


def as_f32(x: np.ndarray) -> np.ndarray:
    return (np.asarray(x).astype("<u4") << 16).view("<f4") if isinstance(x, BF16) else x


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, blobs, at = {}, [], 0
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        code = "BF16" if isinstance(array, BF16) else _CODES[array.dtype.str]
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [at, at + len(raw)]}
        blobs.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def read_tensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """name → (dtype, shape, bytes)."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    data = raw[8 + length :]
    header = json.loads(raw[8 : 8 + length])
    return {n: (e["dtype"], e["shape"], data[e["data_offsets"][0] : e["data_offsets"][1]]) for n, e in header.items()}


def write_raw(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    header, at = {}, 0
    for name, (code, shape, raw) in tensors.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(raw for _, _, raw in tensors.values()))


def write_sparse(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], bits: dict[str, int]) -> None:
    """A file with a true header and a hole for its data: any size on disk, a few kB in fact."""
    header, at = {}, 0
    for name, (code, shape) in tensors.items():
        size = int(np.prod(shape, dtype=np.int64)) * bits[code] // 8
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + at)


def rms(x: np.ndarray, weight: np.ndarray | float = 1.0) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


@dataclass
class Pair:
    """Folders' contents before they are written: configs and tensors of target and drafter."""

    target_config: dict[str, Any]
    target: dict[str, np.ndarray]
    config: dict[str, Any]
    drafter: dict[str, np.ndarray]
    chain: list[int]

    def write_target(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.target_config, indent=1))
        write_safetensors(folder / "model.safetensors", self.target)
        return folder

    def write_drafter(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
        write_safetensors(folder / "model.safetensors", self.drafter)
        return folder


def target_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": MLP,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    } | changes


def _target_tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    def w(*shape: int, scale: float = 0.09) -> np.ndarray:
        return bf16(rng.standard_normal(shape).astype("f4") * scale)

    t: dict[str, np.ndarray] = {"model.embed_tokens.weight": w(VOCAB, HIDDEN, scale=1.0)}
    for k in range(LAYERS):
        p = f"model.layers.{k}."
        t[p + "input_layernorm.weight"] = bf16(np.ones(HIDDEN))
        t[p + "post_attention_layernorm.weight"] = bf16(1 + 0.1 * rng.standard_normal(HIDDEN))
        t[p + "self_attn.q_proj.weight"] = w(HEADS * HEAD_DIM, HIDDEN)
        t[p + "self_attn.k_proj.weight"] = w(KV_HEADS * HEAD_DIM, HIDDEN)
        t[p + "self_attn.v_proj.weight"] = w(KV_HEADS * HEAD_DIM, HIDDEN)
        t[p + "self_attn.o_proj.weight"] = bf16(np.zeros((HIDDEN, HEADS * HEAD_DIM)))
        t[p + "mlp.gate_proj.weight"] = w(MLP, HIDDEN)
        t[p + "mlp.up_proj.weight"] = w(MLP, HIDDEN)
        t[p + "mlp.down_proj.weight"] = w(HIDDEN, MLP, scale=0.12)
    t["model.norm.weight"] = bf16(1 + 0.1 * rng.standard_normal(HIDDEN))
    t["lm_head.weight"] = w(VOCAB, HIDDEN, scale=0.3)
    return t


def streams(t: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """[V, layers+1, H] stream entering each layer for every token, and logits [V, V]."""
    f = {k: as_f32(v) for k, v in t.items()}
    x = f["model.embed_tokens.weight"].copy()
    out = [x]
    for k in range(LAYERS):
        p = f"model.layers.{k}."
        y = rms(x, f[p + "post_attention_layernorm.weight"])
        gate = y @ f[p + "mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ f[p + "mlp.up_proj.weight"].T)) @ f[p + "mlp.down_proj.weight"].T
        out.append(x)
    logits = rms(x, f["model.norm.weight"]) @ f["lm_head.weight"].T
    return np.stack(out, 1), logits


def _chain(logits: np.ndarray, start: int) -> tuple[list[int], float]:
    """Tokens met from `start` on until one returns, and the smallest gap of the two top logits among them."""
    follow = logits.argmax(-1)
    seen, token = [], start
    while token not in seen:
        seen.append(token)
        token = int(follow[token])
    top = np.sort(logits[seen], -1)
    return seen, float((top[:, -1] - top[:, -2]).min())


def drafter_config(**changes: Any) -> dict[str, Any]:
    """As draftsmith's own exporter writes it (vLLM dialect)."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": MLP,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "attention_bias": False,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        "num_aux_hidden_states": 3,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    } | changes


def make_pair(seed: int = SEED) -> Pair:
    """Target, drafter and the chain of tokens that greedy decoding of `PROMPT` walks (deterministic in `seed`)."""
    rng = np.random.default_rng(seed)
    target = _target_tensors(rng)
    states, logits = streams(target)
    chain, gap = _chain(logits, PROMPT[-1])
    if gap < MIN_GAP or not 8 <= len(chain) <= DRAFT_VOCAB // 2:
        raise ValueError(f"seed {seed}: chain of {len(chain)}, smallest gap {gap:.2f}; take another")
    follow = logits.argmax(-1)
    proposals = {int(follow[follow[t]]) for t in chain}
    filler = [t for t in range(VOCAB) if t not in proposals][: DRAFT_VOCAB - len(proposals)]
    ids = np.array(sorted({*proposals, *filler, 2})[:DRAFT_VOCAB], dtype="<i8")
    missing = proposals - set(ids.tolist())
    if missing:  # the eos pushed one out: give it the place of a filler
        ids[[i for i, t in enumerate(ids) if t in filler and t != 2][-len(missing) :]] = list(missing)
        ids = np.sort(ids)
    row = {int(t): i for i, t in enumerate(ids)}

    directions = np.linalg.qr(rng.standard_normal((HIDDEN, HIDDEN)))[0].astype("f4")[:DRAFT_VOCAB]
    right = [row[int(follow[follow[t]])] for t in chain]
    features = [states[chain][:, ids_].reshape(len(chain), -1) for ids_ in (AUX_LAYERS, *WRONG_LAYERS)]
    away = [(r + 1) % DRAFT_VOCAB for r in right]
    wanted = [directions[right], *[directions[away]] * len(WRONG_LAYERS)]
    fc = np.linalg.lstsq(np.concatenate(features), np.concatenate(wanted) * 4.0, rcond=None)[0].T

    def small(*shape: int) -> np.ndarray:
        return bf16(rng.standard_normal(shape) * 0.01)

    def norm() -> np.ndarray:
        return bf16(1 + 0.02 * rng.standard_normal(HIDDEN))

    p = "layers.0."
    drafter: dict[str, np.ndarray] = {
        "fc.weight": bf16(fc),
        p + "input_layernorm.weight": norm(),
        p + "hidden_norm.weight": norm(),
        p + "self_attn.q_proj.weight": small(HEADS * HEAD_DIM, 2 * HIDDEN),
        p + "self_attn.k_proj.weight": small(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        p + "self_attn.v_proj.weight": small(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        p + "self_attn.o_proj.weight": small(HIDDEN, HEADS * HEAD_DIM),
        p + "post_attention_layernorm.weight": norm(),
        p + "mlp.gate_proj.weight": small(MLP, HIDDEN),
        p + "mlp.up_proj.weight": small(MLP, HIDDEN),
        p + "mlp.down_proj.weight": small(HIDDEN, MLP),
        "norm.weight": norm(),
        "lm_head.weight": bf16(directions),
        "d2t": ids - np.arange(DRAFT_VOCAB, dtype="<i8"),
        "t2d": np.isin(np.arange(VOCAB), ids),
    }
    return Pair(target_config(), target, drafter_config(), drafter, [int(t) for t in chain])
