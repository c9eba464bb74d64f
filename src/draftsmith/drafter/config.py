"""A drafter's shape and switches, in draftsmith's own words; dialects/ translates to and from every file format.

Native checkpoint folder: `drafter.json` (this class), `model.safetensors`, `contract.json`. Tensor names
(H drafter hidden, G target hidden, A aux layers, D draft vocab, V target vocab, I MLP width):
  fc.weight [H, A*G]; input_norm.weight [A*G] (norm_before_fc); fc_norm.{a}.weight [G] (fc_norm)
  layers.0.input_layernorm.weight [H] (on the embedding), layers.0.hidden_norm.weight [H] (on the fused state)
  layers.0.self_attn.{q,k,v}_proj.weight [n*d, 2H], .o_proj.weight [H, n*d] (+ .bias with attention_bias)
  layers.0.self_attn.{q_a_proj, q_a_layernorm, q_b_proj, kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj} (MLA)
  layers.0.post_attention_layernorm.weight [H], layers.0.mlp.{gate,up}_proj.weight [I, H], .down_proj.weight [H, I]
  norm.weight [H], lm_head.weight [D, H], d2t int64 [D] offsets, t2d bool [V]
  embed_tokens.weight [V, H] only where the drafter has its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftsmith.contract import NormSwitches
from draftsmith.record import read_json, write_json

FILE = "drafter.json"
WEIGHTS = "model.safetensors"


class MlaSizes(BaseModel):
    """Multi-head latent attention sizes (DeepSeek-V2 paper, section 2.1)."""

    model_config = ConfigDict(extra="forbid")
    q_lora_rank: int | None = None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class DrafterConfig(BaseModel):
    """Shape and switches. rope holds transformers' `rope_parameters` (rope_theta, rope_type, and what the type needs)."""

    model_config = ConfigDict(extra="forbid")
    form: Literal["llama", "mla"] = "llama"
    hidden_size: int
    target_hidden_size: int
    num_aux_layers: int = 3
    aux_layer_ids: list[int] | None = None
    vocab_size: int
    draft_vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    rope: dict[str, Any] = Field(default_factory=lambda: {"rope_theta": 10000.0, "rope_type": "default"})
    max_position_embeddings: int = 2048
    norms: NormSwitches = Field(default_factory=NormSwitches)
    own_embedding: bool = False
    mla: MlaSizes | None = None

    @model_validator(mode="after")
    def _consistent(self) -> DrafterConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} is larger than vocab_size {self.vocab_size}")
        if self.form == "mla" and self.mla is None:
            raise ValueError("form 'mla' needs the mla sizes")
        if self.hidden_size != self.target_hidden_size and not self.own_embedding:
            raise ValueError(
                f"hidden_size {self.hidden_size} differs from the target's {self.target_hidden_size}: the "
                "drafter then needs its own embedding (own_embedding)"
            )
        if self.aux_layer_ids is not None and len(self.aux_layer_ids) != self.num_aux_layers:
            raise ValueError(f"{len(self.aux_layer_ids)} aux layer ids for num_aux_layers {self.num_aux_layers}")
        return self

    def save(self, folder: Path) -> None:
        write_json(folder / FILE, self.model_dump(mode="json"))

    @staticmethod
    def load(folder: Path) -> DrafterConfig:
        return DrafterConfig.model_validate(read_json(folder / FILE))
