"""Parameters, memory and arithmetic of a target and a drafter, from their configs alone (no torch).

Letters as everywhere: H drafter hidden, G target hidden, A aux layers, V target vocab, D draft vocab, K draft steps,
T tokens of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OPTIMIZER_BYTES: dict[tuple[str, str], int] = {
    # weight + gradient + master's other half + two moments (train/fused/adamw.py)
    ("adamw", "bfloat16"): 2 + 2 + 2 + 4 + 4,
    ("adamw", "float32"): 4 + 4 + 0 + 4 + 4,
    ("adamw-lean", "bfloat16"): 2 + 2 + 2 + 1 + 1,
    ("adamw-lean", "float32"): 4 + 4 + 0 + 1 + 1,
    ("muon", "bfloat16"): 2 + 2 + 2 + 4,
    ("muon", "float32"): 4 + 4 + 0 + 4,
}
"""Bytes a trained parameter between steps: (optimizer, type of the parameters) → bytes. muon: a hidden matrix's; the rest
are adamw's."""


WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}


def _int(text: dict[str, Any], *names: str, default: int = 0) -> int:
    for name in names:
        value = text.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return default


def _attention(text: dict[str, Any], hidden: int) -> int:
    """Parameters of one attention block: latent (DeepSeek-V2 paper, section 2.1) or grouped."""
    n = _int(text, "num_attention_heads", "n_head", default=1)
    if rank := _int(text, "kv_lora_rank"):
        nope, rope, v = (_int(text, k) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        q_rank = _int(text, "q_lora_rank")
        query = hidden * q_rank + q_rank * n * (nope + rope) if q_rank else hidden * n * (nope + rope)
        return query + hidden * (rank + rope) + rank * n * (nope + v) + n * v * hidden
    d = _int(text, "head_dim", default=hidden // n)
    return hidden * d * (2 * n + 2 * _int(text, "num_key_value_heads", default=n))


def target_params(text: dict[str, Any]) -> tuple[int, int]:
    """(all parameters, those that one token passes through) of a decoder from its text config; norms left out.

    The input embedding is a look-up and counts only in the first; experts count in the second as far as they are
    active."""
    hidden = _int(text, "hidden_size", "n_embd", "d_model", "dim")
    layers = _int(text, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    vocab = _int(text, "vocab_size", "padded_vocab_size")
    experts = _int(text, "n_routed_experts", "num_experts", "num_local_experts")
    dense = 3 * hidden * _int(text, "intermediate_size", "n_inner", default=4 * hidden)
    total = active = vocab * hidden
    if not text.get("tie_word_embeddings"):
        total += vocab * hidden
    for layer in range(layers):
        attention = _attention(text, hidden)
        every = dense, dense
        if experts and layer >= _int(text, "first_k_dense_replace"):
            one = 3 * hidden * _int(text, "moe_intermediate_size", "intermediate_size")
            shared = one * _int(text, "n_shared_experts")
            every = one * experts + shared, one * _int(text, "num_experts_per_tok", default=1) + shared
        total += attention + every[0]
        active += attention + every[1]
    return total, active


@dataclass(frozen=True)
class DrafterShape:
    """What the memory of training depends on. mla: (q rank or 0, kv rank, nope, rope, v) head sizes, or None."""

    hidden: int
    target_hidden: int
    aux_layers: int
    vocab: int
    draft_vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    mla: tuple[int, int, int, int, int] | None = None

    @property
    def fc(self) -> int:
        return self.hidden * self.aux_layers * self.target_hidden

    @property
    def layer(self) -> int:
        """The drafter's one layer; its attention reads embedding and state side by side (2H)."""
        H, n = self.hidden, self.heads
        if self.mla:
            q_rank, rank, nope, rope, v = self.mla
            query = 2 * H * q_rank + q_rank * n * (nope + rope) if q_rank else 2 * H * n * (nope + rope)
            attention = query + 2 * H * (rank + rope) + rank * n * (nope + v) + n * v * H
        else:
            attention = 2 * H * self.head_dim * (n + 2 * self.kv_heads) + n * self.head_dim * H
        return attention + 3 * H * self.intermediate

    @property
    def head(self) -> int:
        return self.draft_vocab * self.hidden

    @property
    def trained(self) -> int:
        """Trained parameters, norms left out."""
        own = self.vocab * self.hidden if self.hidden != self.target_hidden else 0
        return self.fc + self.layer + self.head + own


def optimizer_bytes(shape: DrafterShape, optimizer: str, dtype: str) -> int:
    """Of all trained parameters of the hand-written step, between steps."""
    hidden = shape.fc + shape.layer
    rest = "adamw" if optimizer == "muon" else optimizer
    return hidden * OPTIMIZER_BYTES[optimizer, dtype] + (shape.trained - hidden) * OPTIMIZER_BYTES[rest, dtype]


def flops_per_token(shape: DrafterShape, steps: int, full_teacher: bool = True) -> int:
    """Floating-point operations of forward and backward per token and K draft steps, attention scores left out.

    fc needs no gradient of its input; the teacher is one product with the draft rows of the target's head."""
    teacher = 2 * shape.draft_vocab * shape.target_hidden if full_teacher else 0
    return 4 * shape.fc + steps * 6 * (shape.layer + shape.head) + teacher
