"""Attention of the MLA form: latent queries and keys, a rotated part shared by all heads (DeepSeek-V2 paper, section
2.1; vllm/model_executor/models/deepseek_v2.py DeepseekV2MLAAttention, layers/mla.py for the order of operations).

Training expands the latent keys and values per head: the same numbers as the engine's absorbed form, and any number of
rows at once. The engine knows two ropes here, default and yarn in DeepSeek's meaning; rotated pairs are interleaved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from draftsmith.drafter.attention import attend
from draftsmith.drafter.config import DrafterConfig
from draftsmith.drafter.norm import RmsNorm
from draftsmith.drafter.rope import Rope, rotate, yarn_mscale
from draftsmith.errors import UserError

if TYPE_CHECKING:
    from draftsmith.drafter.model import Steps


def mla_scale(width: int, rope: dict[str, object]) -> float:
    """width^-0.5, under yarn times mscale(factor, mscale_all_dim)² unless attention_factor is 1."""
    scale = width**-0.5
    if rope.get("rope_type", "default") != "default" and rope.get("attention_factor") != 1.0:
        scale *= yarn_mscale(float(rope["factor"]), float(rope.get("mscale_all_dim") or 0.0)) ** 2  # type: ignore[arg-type]
    return scale


class MlaAttention(nn.Module):
    """n heads; queries through rank q_lora_rank (or directly), keys and values through rank kv_lora_rank."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        sizes, H, n = config.mla, config.hidden_size, config.num_attention_heads
        assert sizes is not None
        kind = config.rope.get("rope_type", "default")
        if kind not in ("default", "yarn"):
            raise UserError(
                f"rope type {kind!r} in an MLA drafter",
                "the engine's MLA class takes every type but 'default' for yarn",
                "use 'default' or 'yarn'",
            )
        self.nope, self.pe, self.v = sizes.qk_nope_head_dim, sizes.qk_rope_head_dim, sizes.v_head_dim
        self.rank, self.heads = sizes.kv_lora_rank, n
        width = self.nope + self.pe
        if sizes.q_lora_rank is None:
            self.q_proj = nn.Linear(2 * H, n * width, bias=False)
        else:
            self.q_a_proj = nn.Linear(2 * H, sizes.q_lora_rank, bias=False)
            self.q_a_layernorm = RmsNorm(sizes.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = nn.Linear(sizes.q_lora_rank, n * width, bias=False)
        self.latent_queries = sizes.q_lora_rank is not None
        self.kv_a_proj_with_mqa = nn.Linear(2 * H, self.rank + self.pe, bias=False)
        self.kv_a_layernorm = RmsNorm(self.rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(self.rank, n * (self.nope + self.v), bias=False)
        self.o_proj = nn.Linear(n * self.v, H, bias=False)
        self.rope = Rope(config.rope, self.pe, deepseek=True)
        self.scale = mla_scale(width, config.rope)

    def forward(self, x: Tensor, position: Tensor, steps: Steps) -> Tensor:
        """x [T, 2H]; position int64 [T] → [T, H]; this step's keys and values are appended to `steps`."""
        cos, sin = self.rope.angles(position, x.dtype)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.latent_queries else self.q_proj(x)
        q = q.unflatten(-1, (self.heads, -1))
        q = torch.cat([q[..., : self.nope], rotate(q[..., self.nope :], cos, sin, interleaved=True)], dim=-1)
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.pe], dim=-1)
        shared = rotate(shared[:, None], cos, sin, interleaved=True).expand(-1, self.heads, -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        k, v = expanded.split([self.nope, self.v], dim=-1)
        steps.keys.append(torch.cat([k, shared], dim=-1))
        steps.values.append(v)
        return self.o_proj(attend(q, steps.keys, steps.values, steps.spans, self.scale).flatten(1))
