"""The EAGLE-3 drafter: what the engine's class computes, as a plain module with the native tensor names.

Row t holds the target's aux states of position t and the embedding of token t+1; it proposes token t+2. One draft
step is `Drafter.step`: q/k/v see [input_layernorm(embedding); hidden_norm(state)], the residual is the state before
(or, with norm_before_residual, after) hidden_norm; then o_proj, post_attention_layernorm, MLP, final norm, lm_head.
The state handed to the next step is the stream before the final norm (after it with norm_output).
Source: vllm/model_executor/models/llama_eagle3.py (LlamaDecoderLayer, LlamaModel, combine_hidden_states) and
deepseek_eagle3.py for the MLA form; attention in llama.py and mla.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from draftsmith.drafter.attention import SharedSpans, Spans
from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.llama import LlamaAttention
from draftsmith.drafter.norm import RmsNorm as RmsNorm
from draftsmith.drafter.norm import rms_norm as rms_norm


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass
class Steps:
    """Keys and values of the draft steps taken so far, one entry per step: all that attention may see."""

    spans: Spans | SharedSpans
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class DrafterLayer(nn.Module):
    """The one decoder layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norms.norm_before_residual
        if config.form == "mla":
            from draftsmith.drafter.mla import MlaAttention

            self.self_attn: nn.Module = MlaAttention(config)
        else:
            self.self_attn = LlamaAttention(config)
        self.mlp = Mlp(H, config.intermediate_size)
        self.input_layernorm = RmsNorm(H, eps)
        self.hidden_norm = RmsNorm(H, eps)
        self.post_attention_layernorm = RmsNorm(H, eps)

    def forward(self, state: Tensor, embedding: Tensor, position: Tensor, steps: Steps) -> Tensor:
        """state, embedding [T, H]; position int64 [T] → stream before the final norm [T, H]."""
        normed = self.hidden_norm(state)
        residual = normed if self.norm_before_residual else state
        x = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        stream = residual + self.self_attn(x, position, steps)
        return stream + self.mlp(self.post_attention_layernorm(stream))


class Drafter(nn.Module):
    """An EAGLE-3 drafter of either form.

    The target's embedding is not a weight of the drafter: `attach_embedding` lends it (frozen, not saved), unless
    `config.own_embedding`. d2t and t2d are saved buffers and start as the identity of the first D tokens.
    """

    d2t: Tensor
    t2d: Tensor
    lent_embedding: Tensor | None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        H, G, A, eps = config.hidden_size, config.target_hidden_size, config.num_aux_layers, config.rms_norm_eps
        self.fc = nn.Linear(A * G, H, bias=False)
        self.input_norm = RmsNorm(A * G, eps) if config.norms.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RmsNorm(G, eps) for _ in range(A)) if config.norms.fc_norm else None
        self.layers = nn.ModuleList([DrafterLayer(config)])
        self.norm = RmsNorm(H, eps)
        self.lm_head = nn.Linear(H, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, H) if config.own_embedding else None
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.register_buffer("lent_embedding", None, persistent=False)

    def attach_embedding(self, weight: Tensor) -> None:
        """Lend the target's embedding table [V, H]; it is neither trained nor saved."""
        if weight.shape != (self.config.vocab_size, self.config.hidden_size):
            raise ValueError(f"embedding {tuple(weight.shape)} for a drafter of {self.config.vocab_size} tokens")
        self.lent_embedding = weight.detach()

    def set_vocab(self, d2t: Tensor, t2d: Tensor) -> None:
        """Take a draft vocab: d2t int64 [D] offsets, t2d bool [V]."""
        if d2t.shape != self.d2t.shape or t2d.shape != self.t2d.shape:
            raise ValueError(f"draft vocab of {len(d2t)} in {len(t2d)} for a drafter of {len(self.d2t)}")
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [T] → [T, H]."""
        if self.embed_tokens is not None:
            return self.embed_tokens(token_ids)
        if self.lent_embedding is None:
            raise RuntimeError("the drafter has no embedding: attach_embedding first")
        return F.embedding(token_ids, self.lent_embedding).to(self.fc.weight.dtype)

    def fuse(self, aux: Tensor) -> Tensor:
        """Aux states [T, A*G] → first state [T, H] (engine: combine_hidden_states)."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            chunks = aux.chunk(self.config.num_aux_layers, dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux)

    def step(self, state: Tensor, embedding: Tensor, position: Tensor, steps: Steps) -> tuple[Tensor, Tensor]:
        """One draft step over all rows; appends its keys and values to `steps`.

        state, embedding [T, H]; position int64 [T] (the row's plus the step) → (normed output for lm_head [T, H],
        state for the next step [T, H])."""
        stream = self.layers[0](state, embedding, position, steps)
        normed = self.norm(stream)
        return normed, normed if self.config.norms.norm_output else stream

    def draft_to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft vocab indices → target token ids."""
        return draft_ids + self.d2t[draft_ids]

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that training moves, in a fixed order."""
        return sorted((name, p) for name, p in self.named_parameters() if p.requires_grad)
