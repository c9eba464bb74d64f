"""A drafter in memory, in native names: what every dialect is read into and written from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from draftsmith.contract import Contract
from draftsmith.drafter.config import DrafterConfig
from draftsmith.errors import UserError
from draftsmith.record import sha256_file
from draftsmith.tensor_file import write_tensors

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
MAP_TENSORS = ("d2t", "t2d")
"""Never cast: the draft vocab map is int64 offsets and bool."""


@dataclass
class Checkpoint:
    """config and tensors in native names (drafter/config.py); notes: every patch made while reading, in words."""

    config: DrafterConfig
    tensors: dict[str, Tensor]
    contract: Contract | None = None
    notes: list[str] = field(default_factory=list)

    def cast(self, dtype: torch.dtype) -> Checkpoint:
        """The same with floating tensors in `dtype`; the map untouched."""
        tensors = {n: t if n in MAP_TENSORS else t.to(dtype) for n, t in self.tensors.items()}
        return Checkpoint(self.config, tensors, self.contract, list(self.notes))


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Native name → shape: the whole inventory that a drafter of this config must have, no more and no less
    (biases included where `attention_bias`; `embed_tokens.weight` where `own_embedding`)."""
    H, G, A, D, V = (
        config.hidden_size,
        config.target_hidden_size,
        config.num_aux_layers,
        config.draft_vocab_size,
        config.vocab_size,
    )
    inter, n, kv, d = config.intermediate_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    layer, attn = "layers.0.", "layers.0.self_attn."
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, A * G)}
    if config.norms.norm_before_fc:
        shapes["input_norm.weight"] = (A * G,)
    if config.norms.fc_norm:
        shapes |= {f"fc_norm.{a}.weight": (G,) for a in range(A)}
    shapes |= {f"{layer}{norm}.weight": (H,) for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    if config.form == "llama":
        shapes |= {
            f"{attn}q_proj.weight": (n * d, 2 * H),
            f"{attn}k_proj.weight": (kv * d, 2 * H),
            f"{attn}v_proj.weight": (kv * d, 2 * H),
            f"{attn}o_proj.weight": (H, n * d),
        }
        if config.attention_bias:
            # vLLM gives o_proj one too (models/llama.py: bias_o_proj = attention_bias).
            shapes |= {
                f"{attn}{p}_proj.bias": (rows,) for p, rows in (("q", n * d), ("k", kv * d), ("v", kv * d), ("o", H))
            }
    else:
        shapes |= _mla_shapes(config, attn)
    shapes |= {
        f"{layer}mlp.gate_proj.weight": (inter, H),
        f"{layer}mlp.up_proj.weight": (inter, H),
        f"{layer}mlp.down_proj.weight": (H, inter),
        "norm.weight": (H,),
        "lm_head.weight": (D, H),
        "d2t": (D,),
        "t2d": (V,),
    }
    if config.own_embedding:
        shapes["embed_tokens.weight"] = (V, H)
    return shapes


def _mla_shapes(config: DrafterConfig, attn: str) -> dict[str, tuple[int, ...]]:
    """MLA tensors; the first projections take [embedding; state], 2H wide (vllm/model_executor/models/deepseek_eagle3.py)."""
    mla = config.mla
    assert mla is not None
    H, n = config.hidden_size, config.num_attention_heads
    qk = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    if mla.q_lora_rank is None:
        shapes[f"{attn}q_proj.weight"] = (n * qk, 2 * H)
    else:
        shapes |= {
            f"{attn}q_a_proj.weight": (mla.q_lora_rank, 2 * H),
            f"{attn}q_a_layernorm.weight": (mla.q_lora_rank,),
            f"{attn}q_b_proj.weight": (n * qk, mla.q_lora_rank),
        }
    return shapes | {
        f"{attn}kv_a_proj_with_mqa.weight": (mla.kv_lora_rank + mla.qk_rope_head_dim, 2 * H),
        f"{attn}kv_a_layernorm.weight": (mla.kv_lora_rank,),
        f"{attn}kv_b_proj.weight": (n * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        f"{attn}o_proj.weight": (H, n * mla.v_head_dim),
    }


MAX_VOCAB = 1 << 24
"""No vocabulary is larger; tensors of its length are made while the map is read."""


def require_sane_map(config: DrafterConfig, tensors: dict[str, Tensor], source: str) -> None:
    """UserError where vocabulary or map are longer than any real one; looks at sizes alone."""
    longest = max(
        config.vocab_size, config.draft_vocab_size, *(tensors[n].numel() if n in tensors else 0 for n in MAP_TENSORS)
    )
    if longest > MAX_VOCAB:
        raise UserError(
            f"{source}: a vocabulary or map of {longest:,} tokens",
            f"none has more than {MAX_VOCAB:,}; reading it would fill the memory",
            "correct vocab_size and draft_vocab_size in the drafter's config, and d2t and t2d with them",
        )


def require_inventory(config: DrafterConfig, tensors: dict[str, Tensor], source: str) -> None:
    """UserError naming missing, unexpected and misshapen tensors: an engine would leave a missing one uninitialised
    without a word (vllm-facts 2.2a; speculators#1114)."""
    require_sane_map(config, tensors, source)
    want = tensor_shapes(config)
    missing = sorted(set(want) - set(tensors))
    extra = sorted(set(tensors) - set(want))
    wrong = [
        f"{n} is {tuple(tensors[n].shape)}, must be {s}"
        for n, s in want.items()
        if n in tensors and tuple(tensors[n].shape) != s
    ]
    problems = []
    if missing:
        problems.append(f"missing: {', '.join(missing)}")
    if extra:
        problems.append(f"unexpected: {', '.join(extra)}")
    if wrong:
        problems.append(f"wrong shape: {'; '.join(wrong)}")
    if problems:
        raise UserError(
            f"{source}: {'. '.join(problems)}",
            "the engine leaves a missing tensor uninitialised and ignores or refuses an unknown one",
            "give the whole checkpoint; `draftsmith check` lists what belongs in it",
        )


def require_map(config: DrafterConfig, tensors: dict[str, Tensor], source: str) -> None:
    """UserError unless d2t holds int64 offsets, strictly increasing in target id, inside the vocab and equal to t2d."""
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    fix = "d2t[i] must be target id − i, int64; t2d bool with True at just those ids"
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        raise UserError(f"{source}: d2t is {d2t.dtype}, t2d is {t2d.dtype}", "the engine reads int64 offsets", fix)
    ids = torch.arange(d2t.numel()) + d2t
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size):
        raise UserError(
            f"{source}: d2t maps outside the vocabulary: ids {int(ids.min())}…{int(ids.max())} of {config.vocab_size}",
            "the engine dies at the first draft that hits one",
            fix,
        )
    if bool((ids[1:] <= ids[:-1]).any()):
        raise UserError(f"{source}: i + d2t[i] is not strictly increasing", "two draft ids would mean one token", fix)
    if not torch.equal(torch.nonzero(t2d).flatten(), ids):
        raise UserError(
            f"{source}: t2d is not the inverse of d2t", "engines that read t2d would draft other tokens", fix
        )


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write safetensors atomically, names sorted, so equal tensors give equal bytes."""
    write_tensors(path, {n: tensors[n] for n in sorted(tensors)}, {"format": "pt"})


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or of the shards that an index beside it lists."""
    try:
        with safe_open(path, framework="pt") as f:
            return {n: f.get_tensor(n) for n in f.keys()}  # noqa: SIM118  (safe_open is no dict)
    except Exception as e:
        raise UserError(
            f"{path} is not a readable safetensors file: {e}", "", "copy it again from where it came"
        ) from e


def verify_written(path: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Read `path` back and compare every tensor bit for bit; returns {"sha256", "tensors"}; UserError on a difference."""
    back = load_tensors(path)
    for name, want in tensors.items():
        got = back.pop(name, None)
        if got is None or got.dtype != want.dtype or not torch.equal(_bits(got), _bits(want)):
            raise UserError(
                f"{path}: tensor {name} differs from what was written", "the disk or memory is faulty", "export again"
            )
    if back:
        raise UserError(f"{path}: unexpected tensors {sorted(back)}", "", "export again into an empty folder")
    return {"sha256": sha256_file(path), "tensors": str(len(tensors))}


def _bits(t: Tensor) -> Tensor:
    """A tensor's bytes, so that NaNs compare equal and −0 differs from 0."""
    return t.contiguous().flatten().view(torch.uint8) if t.dtype != torch.bool else t.flatten().to(torch.uint8)
